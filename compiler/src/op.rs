//! The dictionary: every core op as a struct with typed fields and a sentence that defines it.
//!
//! Importers lower source operators to these, gradients are graphs of these, and a device implements only these. What
//! an op *means* (shapes, cost, backward, reference kernel, samples) stands in a file of its own, `op/NAME.rs`, as its
//! [`OpRule`]; [`table`] gathers them.
//!
//! Conventions. Shapes are row-major. Axes are never negative. Elementwise ops with several inputs broadcast as NumPy
//! does: shapes are aligned at the right, and a dim of 1 stretches. `N` is the batch, `C` channels, `D…` the spatial
//! dims. An op computes in the element type of its inputs unless it says otherwise.

pub mod batch_gather;
pub mod batch_norm;
pub mod binary;
pub mod bit_cast;
pub mod broadcast;
pub mod cast;
pub mod collective;
pub mod compare;
pub mod concat;
pub mod conv;
pub mod cross_entropy;
pub mod cumulative;
pub mod dropout;
pub mod flip;
pub mod gather;
pub mod grouped_matmul;
pub mod gru;
pub mod iota;
pub mod layer_norm;
pub mod lstm;
pub mod matmul;
pub mod pad;
pub mod pool;
pub mod reduce;
pub mod reshape;
pub mod rnn;
pub mod rule;
pub mod sample;
pub mod scatter;
pub mod select;
pub mod sharding;
pub mod slice;
pub mod softmax;
pub mod source;
pub mod stop_gradient;
pub mod table;
pub mod top_k;
pub mod transpose;
pub mod unary;
pub mod uniform;
pub mod window;

use crate::tensor::dim::{Dim, DimError};
use crate::tensor::fact::Fact;
use crate::tensor::view::{View, ViewMut};
use crate::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

pub use crate::op::sharding::{Group, PartSite, Sharding, SplitDim, Strategy};
pub use rule::{Cost, Emit, FactError, KernelError, OpRule, Sample, Site, elements, moved};

/// Any core op.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Op {
    // Where values come from.
    Input(Input),
    Parameter(Parameter),
    State(State),
    Constant(Constant),
    Iota(Iota),
    Uniform(Uniform),
    // Elementwise.
    Unary(Unary),
    Binary(Binary),
    Compare(Compare),
    Select(Select),
    Cast(Cast),
    BitCast(BitCast),
    // Reductions.
    Reduce(Reduce),
    ArgReduce(ArgReduce),
    TopK(TopK),
    Cumulative(Cumulative),
    // Contractions.
    #[serde(rename = "matmul")]
    MatMul(MatMul),
    #[serde(rename = "grouped_matmul")]
    GroupedMatMul(GroupedMatMul),
    #[serde(rename = "grouped_matmul_grad")]
    GroupedMatMulGrad(GroupedMatMulGrad),
    Conv(Conv),
    ConvInputGrad(ConvInputGrad),
    ConvWeightGrad(ConvWeightGrad),
    // Recurrent layers.
    Lstm(Lstm),
    LstmGrad(LstmGrad),
    Gru(Gru),
    GruGrad(GruGrad),
    Rnn(Rnn),
    RnnGrad(RnnGrad),
    // Windows.
    MaxPool(MaxPool),
    MaxPoolGrad(MaxPoolGrad),
    AvgPool(AvgPool),
    AvgPoolGrad(AvgPoolGrad),
    // Movement.
    Reshape(Reshape),
    Transpose(Transpose),
    Broadcast(Broadcast),
    Slice(Slice),
    Pad(Pad),
    Concat(Concat),
    Flip(Flip),
    Gather(Gather),
    ScatterAdd(ScatterAdd),
    BatchGather(BatchGather),
    BatchScatterAdd(BatchScatterAdd),
    Scatter(Scatter),
    StopGradient(StopGradient),
    // Normalisation and losses.
    Softmax(Softmax),
    LogSoftmax(LogSoftmax),
    LayerNorm(LayerNorm),
    LayerNormGrad(LayerNormGrad),
    BatchNorm(BatchNorm),
    BatchNormGrad(BatchNormGrad),
    Dropout(Dropout),
    CrossEntropy(CrossEntropy),
    CrossEntropyGrad(CrossEntropyGrad),
    // What devices that share a stage do together.
    AllReduce(AllReduce),
    ReduceScatter(ReduceScatter),
    AllGather(AllGather),
    AllToAll(AllToAll),
    Shard(Shard),
    DropoutPart(DropoutPart),
}

/// A tensor that the caller gives for every minibatch. No inputs; the fact is `fact`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Input {
    /// Name in the source model and in data files.
    pub name: String,
    /// Element type and shape.
    pub fact: Fact,
}

/// A trained tensor. Its initial value lies beside the graph, by name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Parameter {
    /// Name in the source model, in checkpoints and in gradients.
    pub name: String,
    /// Element type and shape.
    pub fact: Fact,
}

/// A tensor that is kept between minibatches but has no gradient, such as a running mean. Its initial value lies beside
/// the graph, by name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Name in the source model and in checkpoints.
    pub name: String,
    /// Element type and shape.
    pub fact: Fact,
}

/// A fixed value.
#[derive(Clone, Debug, PartialEq)]
pub struct Constant {
    /// The value.
    pub tensor: Tensor,
}

/// `0, 1, 2, …` along `axis`, the same along every other axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Iota {
    /// Element type and shape of the result.
    pub fact: Fact,
    /// The axis that counts.
    pub axis: usize,
}

/// Random numbers from 0 to 1, 1 left out. Input: counter (`i64`, one value). They follow from stream, counter and the
/// place of the element; see [`uniform`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Uniform {
    /// Element type and shape of the result.
    pub fact: Fact,
    /// Tells the random numbers of a model apart, dropouts among them.
    pub stream: u64,
}

/// `y = f(x)` for each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unary {
    /// `-x`
    Neg,
    /// `|x|`
    Abs,
    /// -1, 0 or 1.
    Sign,
    /// `e^x`
    Exp,
    /// Natural logarithm.
    Log,
    /// `√x`
    Sqrt,
    /// `1/√x`
    Rsqrt,
    /// `1/x`
    Reciprocal,
    /// `sin x`
    Sin,
    /// `cos x`
    Cos,
    /// `arcsin x`
    Asin,
    /// `arccos x`
    Acos,
    /// `arctan x`
    Atan,
    /// `sinh x`
    Sinh,
    /// `cosh x`
    Cosh,
    /// `tanh x`
    Tanh,
    /// `arsinh x`
    Asinh,
    /// `arcosh x`
    Acosh,
    /// `artanh x`
    Atanh,
    /// `1/(1+e^-x)`
    Sigmoid,
    /// `max(x, 0)`; the gradient at 0 is 0.
    Relu,
    /// Gauss error function.
    Erf,
    /// `x·Φ(x)` with the exact normal distribution.
    Gelu,
    /// `x/2·(1+tanh(√(2/π)(x+0.044715x³)))`
    GeluTanh,
    /// `x·sigmoid(x)`
    Silu,
    /// `log(1+e^x)`
    Softplus,
    /// Largest whole number not above `x`.
    Floor,
    /// Smallest whole number not below `x`.
    Ceil,
    /// Nearest whole number, halves to even.
    Round,
    /// Logical not (`bool`); of a whole number every bit turned.
    Not,
}

/// `y = f(a, b)` for each element, broadcasting. Both inputs have one element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Binary {
    /// `a + b`
    Add,
    /// `a - b`
    Sub,
    /// `a · b`
    Mul,
    /// `a / b`; integers truncate toward zero, and division by zero is 0.
    Div,
    /// `a^b`
    Pow,
    /// The larger; NaN wins; the gradient goes to `a` on a tie.
    Max,
    /// The smaller; NaN wins; the gradient goes to `a` on a tie.
    Min,
    /// Rest of `a / b` with the sign of `b`, as Python's `%`.
    Mod,
    /// Logical and (`bool`), or bit by bit of whole numbers.
    And,
    /// Logical or (`bool`), or bit by bit of whole numbers.
    Or,
    /// Logical exclusive or (`bool`), or bit by bit of whole numbers.
    Xor,
    /// Bits of the whole number `a` moved up by `b` places. By fewer than 0, or by all there are, none is left.
    ShiftLeft,
    /// Bits of the whole number `a` moved down by `b` places, the sign drawn after them. By fewer than 0, or by all
    /// there are, nothing but the sign is left.
    ShiftRight,
}

/// `y = a ? b` as `bool`, broadcasting. Both inputs have one element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compare {
    /// `a == b`
    Equal,
    /// `a < b`
    Less,
    /// `a <= b`
    LessEqual,
}

/// `condition ? a : b` for each element, broadcasting. Inputs: condition (`bool`), a, b.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Select {}

/// The same values as element type `to`; floats truncate toward zero when they become integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cast {
    /// Element type of the result.
    pub to: DType,
}

/// The same bits as element type `to`, which has as many. No gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BitCast {
    /// Element type of the result.
    pub to: DType,
}

/// One value for all elements along `axes`. No axes: a copy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reduce {
    /// How elements are joined.
    pub kind: ReduceKind,
    /// Axes that go away, sorted.
    pub axes: Vec<usize>,
    /// Whether the axes stay as dims of 1.
    pub keep: bool,
}

/// How a reduction joins elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceKind {
    /// Sum.
    Sum,
    /// Arithmetic mean; NaN over no elements.
    Mean,
    /// Largest; the gradient is shared equally by equal elements.
    Max,
    /// Smallest; the gradient is shared equally by equal elements.
    Min,
    /// Product.
    Prod,
}

/// The `i64` index of the largest (or smallest) element along `axis`, the first one on ties. No gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArgReduce {
    /// Largest, else smallest.
    pub largest: bool,
    /// The axis that goes away.
    pub axis: usize,
    /// Whether the axis stays as a dim of 1.
    pub keep: bool,
}

/// The `count` largest (or smallest) elements along `axis`, the best first and the earlier one on ties, and their `i64`
/// indices. NaN is larger than every number. Outputs: values, indices; a gradient flows through the values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopK {
    /// The axis that is sorted.
    pub axis: usize,
    /// Its size in the result, at most that in the input.
    pub count: Dim,
    /// Largest, else smallest.
    pub largest: bool,
}

/// At each place along `axis`, all elements up to there joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cumulative {
    /// How elements are joined.
    pub kind: CumulativeKind,
    /// The axis along which they are.
    pub axis: usize,
    /// Whether an element itself is left out of its result.
    pub exclusive: bool,
    /// Whether the last element comes first.
    pub reverse: bool,
}

/// How [`Cumulative`] joins elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CumulativeKind {
    /// Sum.
    Sum,
    /// Product; no gradient.
    Prod,
}

/// Matrix product of the last two dims, `[…, M, K] × […, K, N] → […, M, N]`; leading dims broadcast. A transposed
/// operand is stored as `[…, K, M]` or `[…, N, K]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MatMul {
    /// Whether the first operand is stored transposed.
    pub transpose_a: bool,
    /// Whether the second operand is stored transposed.
    pub transpose_b: bool,
}

/// The product of every row with the matrix of its group; rows are sorted by group. Inputs: x `[S, K]`, the matrices
/// `[G, K, N]` or transposed `[G, N, K]`, and where the rows of each group end (`i64[G]`). Output: `[S, N]`; see
/// [`grouped_matmul`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupedMatMul {
    /// Whether the matrices are stored transposed.
    pub transpose: bool,
}

/// `aᵀ b` of the rows of each group, as the gradient of the matrices of [`GroupedMatMul`] needs it. Inputs: a `[S, M]`,
/// b `[S, N]`, where the rows of each group end (`i64[G]`). Output: `[G, M, N]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupedMatMulGrad {}

/// A long short-term memory over a sequence; the gates are in the order i, f, g, o; see [`lstm`]. Inputs: x `[T, N, I]`,
/// w_ih `[4H, I]`, w_hh `[4H, H]`, b_ih and b_hh `[4H]`, h0 and c0 `[N, H]`. Outputs: y `[T, N, H]`; h and c after the
/// last step, `[N, H]`; the gates `[T, N, 4H]` and the cells `[T, N, H]` of every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lstm {
    /// Whether the last step comes first. Step `t` of x still makes step `t` of y.
    pub reverse: bool,
}

/// The gradient of [`Lstm`]: inputs dy, dh and dc after the last step, x, w_ih, w_hh, h0, c0, y, gates, cells; outputs
/// dx, dw_ih, dw_hh, db (of each bias), dh0, dc0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LstmGrad {
    /// Whether the last step comes first.
    pub reverse: bool,
}

/// A gated recurrent unit over a sequence; the gates are in the order r, z, n; see [`gru`]. Inputs: x `[T, N, I]`, w_ih
/// `[3H, I]`, w_hh `[3H, H]`, b_ih and b_hh `[3H]`, h0 `[N, H]`. Outputs: y `[T, N, H]`; h after the last step,
/// `[N, H]`; the gates of every step and what the reset gate met, `[T, N, 4H]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gru {
    /// Whether the last step comes first. Step `t` of x still makes step `t` of y.
    pub reverse: bool,
    /// Whether the reset gate works on the product of state and weight (as in PyTorch), else on the state.
    pub reset_after: bool,
}

/// The gradient of [`Gru`]: inputs dy, dh after the last step, x, w_ih, w_hh, h0, y, gates; outputs dx, dw_ih, dw_hh,
/// db_ih, db_hh, dh0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GruGrad {
    /// Whether the last step comes first.
    pub reverse: bool,
    /// Where the reset gate works.
    pub reset_after: bool,
}

/// What a plain recurrent layer does with its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `tanh x`
    Tanh,
    /// `max(x, 0)`; the gradient at 0 is 0.
    Relu,
    /// `1/(1+e^-x)`
    Sigmoid,
}

/// A plain recurrent layer over a sequence; see [`rnn`]. Inputs: x `[T, N, I]`, w_ih `[H, I]`, w_hh `[H, H]`, b_ih and
/// b_hh `[H]`, h0 `[N, H]`. Outputs: y `[T, N, H]`; h after the last step, `[N, H]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rnn {
    /// Whether the last step comes first. Step `t` of x still makes step `t` of y.
    pub reverse: bool,
    /// The function of the sums.
    pub activation: Activation,
}

/// The gradient of [`Rnn`]: inputs dy, dh after the last step, x, w_ih, w_hh, h0, y; outputs dx, dw_ih, dw_hh, db (of
/// each bias), dh0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RnnGrad {
    /// Whether the last step comes first.
    pub reverse: bool,
    /// The function of the sums.
    pub activation: Activation,
}

/// How a window moves over the spatial dims; every list has one entry a spatial dim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Steps between windows, at least 1.
    pub strides: Vec<usize>,
    /// Padding before the first element.
    pub pads_begin: Vec<usize>,
    /// Padding after the last element.
    pub pads_end: Vec<usize>,
    /// Steps between the elements of a window, at least 1.
    pub dilations: Vec<usize>,
}

/// Cross-correlation, `x [N, C, D…] ⋆ w [O, C/groups, K…] → [N, O, E…]`, zero padded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conv {
    /// How the kernel moves.
    pub window: Window,
    /// Channels are convolved in this many separate groups.
    pub groups: usize,
}

/// The gradient of [`Conv`] for `x`: inputs `dy [N, O, E…]`, `w`; output `[N, C, D…]`. Also transposed convolution.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConvInputGrad {
    /// How the kernel of the forward convolution moves.
    pub window: Window,
    /// Groups of the forward convolution.
    pub groups: usize,
    /// `D…`, the spatial dims of `x`.
    pub spatial: Vec<Dim>,
}

/// The gradient of [`Conv`] for `w`: inputs `dy [N, O, E…]`, `x [N, C, D…]`; output `[O, C/groups, K…]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConvWeightGrad {
    /// How the kernel of the forward convolution moves.
    pub window: Window,
    /// Groups of the forward convolution.
    pub groups: usize,
    /// `K…`, the spatial dims of `w`.
    pub kernel: Vec<usize>,
}

/// Largest element of each window; padding never wins. `x [N, C, D…] → [N, C, E…]`. With `ceil`, a last window may
/// start inside the data and reach beyond the padding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaxPool {
    /// Sizes of the window.
    pub kernel: Vec<usize>,
    /// How it moves.
    pub window: Window,
    /// Whether the number of windows is rounded up.
    pub ceil: bool,
}

/// The gradient of [`MaxPool`]: inputs `x`, `dy`; output like `x`. Each `dy` goes to the first largest element of its
/// window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaxPoolGrad {
    /// The forward op.
    pub forward: MaxPool,
}

/// Mean of each window, `x [N, C, D…] → [N, C, E…]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AvgPool {
    /// Sizes of the window.
    pub kernel: Vec<usize>,
    /// How it moves.
    pub window: Window,
    /// Whether the number of windows is rounded up.
    pub ceil: bool,
    /// Whether padding counts in the divisor (what lies beyond the padding never does).
    pub count_padding: bool,
}

/// The gradient of [`AvgPool`]: input `dy`; output `[N, C, D…]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AvgPoolGrad {
    /// The forward op.
    pub forward: AvgPool,
    /// `D…`, the spatial dims of `x`.
    pub spatial: Vec<Dim>,
}

/// The same elements in row-major order under another shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reshape {
    /// The shape of the result.
    pub shape: Vec<Dim>,
}

/// Axis `i` of the result is axis `perm[i]` of the input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transpose {
    /// A permutation of the axes.
    pub perm: Vec<usize>,
}

/// The input stretched to `shape` as NumPy broadcasts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Broadcast {
    /// The shape of the result.
    pub shape: Vec<Dim>,
}

/// Elements `begin, begin+step, … < end` of every axis; `0 ≤ begin ≤ end ≤ size`, `step ≥ 1`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Slice {
    /// First index, for each axis.
    pub begin: Vec<Dim>,
    /// One past the last index, for each axis.
    pub end: Vec<Dim>,
    /// Distance between elements, for each axis.
    pub step: Vec<usize>,
}

/// `value` around the input and `interior` times between neighbours, for each axis; `low` and `high` are not negative.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pad {
    /// Elements before the first.
    pub low: Vec<Dim>,
    /// Elements after the last.
    pub high: Vec<Dim>,
    /// Elements between neighbours.
    pub interior: Vec<usize>,
    /// What is filled in.
    #[serde(with = "pad::any_float")]
    pub value: f64,
}

/// All inputs one behind the other along `axis`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Concat {
    /// The axis that grows.
    pub axis: usize,
}

/// The order of the elements reversed along `axes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flip {
    /// Axes that run backward, sorted.
    pub axes: Vec<usize>,
}

/// `x [A…, S, B…]`, integer indices `[I…]` → `[A…, I…, B…]`: slices of `x` along `axis`. An embedding has axis 0. An
/// index below zero counts from the end; one outside is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gather {
    /// The axis that is indexed.
    pub axis: usize,
}

/// The gradient of [`Gather`]: inputs `dy [A…, I…, B…]`, indices `[I…]`; output `[A…, size, B…]`, zero but for the
/// sums of the slices, added in the order of the indices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScatterAdd {
    /// The axis that is indexed.
    pub axis: usize,
    /// Its size.
    pub size: Dim,
}

/// `x [A…, S, B…]`, integer indices `[A…, I…]` → `[A…, I…, B…]`: slices of `x` along its axis `batch`, with indices of its own for each
/// example. An index is as in [`Gather`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchGather {
    /// How many leading axes tell examples apart.
    pub batch: usize,
}

/// The gradient of [`BatchGather`]: inputs `dy [A…, I…, B…]`, indices `[A…, I…]`; output `[A…, size, B…]`, zero but for the sums of the
/// slices, added in the order of the indices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchScatterAdd {
    /// How many leading axes tell examples apart.
    pub batch: usize,
    /// The size of the axis behind them.
    pub size: Dim,
}

/// `x [A…, S, B…]` with slices along `axis` replaced by, or joined with, `updates [A…, I…, B…]`, at the places that the
/// integer indices `[I…]` say, in their order. Inputs: x, indices, updates. Indices are as in [`Gather`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scatter {
    /// How a slice is joined with what is there.
    pub kind: ScatterKind,
    /// The axis that is indexed.
    pub axis: usize,
}

/// How [`Scatter`] joins an update with what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScatterKind {
    /// The last update of a place is what it holds.
    Replace,
    /// Sum.
    Add,
    /// Product; no gradient.
    Mul,
    /// The largest; the gradient is shared equally by equal elements.
    Max,
    /// The smallest; the gradient is shared equally by equal elements.
    Min,
}

/// The input as it is, without gradient: what it depends on is not trained through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopGradient {}

/// `y_i = e^(x_i) / Σ e^(x_j)` along `axis`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Softmax {
    /// The axis that sums to one.
    pub axis: usize,
}

/// The logarithm of [`Softmax`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogSoftmax {
    /// The axis whose exponentials sum to one.
    pub axis: usize,
}

/// `y = (x - mean)/√(variance + epsilon)·scale + bias` over all dims from `axis` on. Inputs: x, scale, bias (both of
/// the shape of the normalised dims). Outputs: y; mean and 1/√(variance + epsilon), with the normalised dims as 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerNorm {
    /// First normalised axis.
    pub axis: usize,
    /// Added to the (biased) variance.
    pub epsilon: f64,
}

/// The gradient of [`LayerNorm`]: inputs dy, x, scale, mean, rstd; outputs dx, dscale, dbias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerNormGrad {
    /// First normalised axis.
    pub axis: usize,
}

/// Batch normalisation with the statistics of this batch. Inputs: x `[N, C, D…]`, scale `[C]`, bias `[C]`. Outputs: y;
/// mean, biased variance and 1/√(variance + epsilon), each `[C]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchNorm {
    /// Added to the variance.
    pub epsilon: f64,
}

/// The gradient of [`BatchNorm`]: inputs dy, x, scale, mean, rstd; outputs dx, dscale, dbias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchNormGrad {}

/// `y = x/(1 - ratio)` where the mask keeps an element, else 0. Inputs: x, counter (`i64`, one value). The mask follows
/// from stream, counter and the place of the element; see [`dropout`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dropout {
    /// The share that is dropped, 0 to 1.
    pub ratio: f64,
    /// Tells the dropouts of a model apart.
    pub stream: u64,
}

/// Mean cross-entropy of logits against class indices. Inputs: logits (classes along `axis`), integer target (the shape
/// without `axis`). Outputs: the scalar loss, averaged over the targets that are not `ignore`; log Σ e^logit with the
/// shape of the target. No target left: the loss is 0, and nothing gets a gradient (PyTorch's loss is NaN).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrossEntropy {
    /// The axis of classes.
    pub axis: usize,
    /// A target that counts for nothing.
    pub ignore: Option<i64>,
}

/// The gradient of [`CrossEntropy`] for the logits: inputs dloss (scalar), logits, target, log-sum-exp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrossEntropyGrad {
    /// The axis of classes.
    pub axis: usize,
    /// A target that counts for nothing.
    pub ignore: Option<i64>,
}

/// The terms that the devices of a group have, joined, on every device. See [`collective`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllReduce {
    /// How terms are joined.
    pub kind: ReduceKind,
    /// Devices in the group.
    pub devices: usize,
}

/// One part of the sum of the terms that the devices of a group have, on each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReduceScatter {
    /// How the sum is divided.
    pub cut: SplitDim,
    /// Devices in the group.
    pub devices: usize,
}

/// The whole, on every device of a group, from the parts that they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllGather {
    /// How the whole was divided.
    pub cut: SplitDim,
    /// Devices in the group.
    pub devices: usize,
}

/// Other parts of the whole than those that the devices of a group have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllToAll {
    /// How the whole was divided.
    pub from: SplitDim,
    /// How it is divided then.
    pub to: SplitDim,
    /// Devices in the group.
    pub devices: usize,
}

/// The part of a tensor, which all devices of a group have, that is this device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// How the tensor is divided.
    pub cut: SplitDim,
    /// Devices in the group.
    pub devices: usize,
}

/// [`Dropout`] of a device's part of a tensor, with the mask of the whole. Inputs: x, counter, and which device of the group it is
/// (`i64`, one value).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DropoutPart {
    /// The dropout of the whole.
    pub whole: Dropout,
    /// Elements that lie together in the whole.
    pub run: usize,
    /// Devices in the group, whose runs take turns.
    pub devices: usize,
}

/// A node of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub u32);

/// One output of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Value {
    /// The node that makes it.
    pub node: NodeId,
    /// Which of its outputs.
    pub output: u32,
}
