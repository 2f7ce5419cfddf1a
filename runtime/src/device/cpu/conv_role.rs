//! The role says which pass of a convolution a kernel computes.

/// The convolution pass.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Computes `y` from `x` and `w`.
    Forward,
    /// Computes `dx` from `dy` and `w`.
    InputGrad,
    /// Computes `dw` from `dy` and `x`.
    WeightGrad,
}
