//! Source positions and interpolation weights for one resized axis.
//!
//! Interpolation is separable, so one axis is handled at a time. Element `i` of the result is a weighted sum of the
//! input elements around [`Axis::origin`]. Per axis, a resize is therefore a gather (nearest) or a product with a
//! matrix `[to, from]` (linear, cubic).

use crate::import::lower_error::LowerReason;

/// Maximum number of matrix elements or indices per axis.
const LARGEST: usize = 1 << 22;

/// The coordinate transformation from result to input positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Transform {
    /// Pixel centres are aligned: `(i + ½)/scale - ½`.
    HalfPixel,
    /// Like `HalfPixel`, but keeps the centres of input and result aligned when the size was rounded.
    HalfPixelSymmetric,
    /// Like `HalfPixel`, but a result of size 1 maps to position 0.
    PytorchHalfPixel,
    /// First and last elements are aligned.
    AlignCorners,
    /// `i/scale`
    Asymmetric,
    /// First and last element map to the bounds of a region; positions outside the input get the extrapolation value.
    Crop,
}

impl Transform {
    pub fn parse(name: &str) -> Option<Transform> {
        Some(match name {
            "half_pixel" => Transform::HalfPixel,
            "half_pixel_symmetric" => Transform::HalfPixelSymmetric,
            "pytorch_half_pixel" => Transform::PytorchHalfPixel,
            "align_corners" => Transform::AlignCorners,
            "asymmetric" => Transform::Asymmetric,
            "tf_crop_and_resize" => Transform::Crop,
            _ => return None,
        })
    }
}

/// Rounding of a fractional position in nearest interpolation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rounding {
    /// To nearest, ties down.
    PreferFloor,
    /// To nearest, ties up.
    PreferCeil,
    Floor,
    Ceil,
}

impl Rounding {
    pub fn parse(name: &str) -> Option<Rounding> {
        Some(match name {
            "round_prefer_floor" => Rounding::PreferFloor,
            "round_prefer_ceil" => Rounding::PreferCeil,
            "floor" => Rounding::Floor,
            "ceil" => Rounding::Ceil,
            _ => return None,
        })
    }

    fn of(self, distance: f64) -> f64 {
        match self {
            Rounding::PreferFloor => (distance - 0.5).ceil(),
            Rounding::PreferCeil => (distance + 0.5).floor(),
            Rounding::Floor => distance.floor(),
            Rounding::Ceil => distance.ceil(),
        }
    }
}

/// The interpolation kernel: weight of an element by its distance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Filter {
    /// Coefficient of the cubic kernel (Keys, 1981, equation 4); `None` for linear.
    pub cubic: Option<f64>,
    /// If true, the kernel is stretched when downsampling, so that every input element contributes.
    pub antialias: bool,
    /// If true, elements outside the input have weight zero, else the edge element is repeated.
    pub exclude_outside: bool,
}

impl Filter {
    fn support(&self) -> f64 {
        if self.cubic.is_some() { 2.0 } else { 1.0 }
    }

    pub fn weight(&self, distance: f64) -> f64 {
        let d = distance.abs();
        match self.cubic {
            None => (1.0 - d).max(0.0),
            Some(a) if d <= 1.0 => ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0,
            Some(a) if d < 2.0 => ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a,
            Some(_) => 0.0,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axis {
    /// Input size, at least 1.
    pub from: usize,
    pub to: usize,
    /// Ratio of result size to input size, before rounding of the result size.
    pub scale: f64,
    /// Crop region in normalised coordinates from 0 to 1.
    pub region: [f64; 2],
}

impl Axis {
    /// The input position of result element `at`.
    pub fn origin(&self, transform: Transform, at: usize) -> f64 {
        let (at, from) = (at as f64, self.from as f64);
        let width = self.scale * from;
        let half_pixel = (at + 0.5) / self.scale - 0.5;
        match transform {
            Transform::HalfPixel => half_pixel,
            Transform::HalfPixelSymmetric => from / 2.0 * (1.0 - self.to as f64 / width) + half_pixel,
            Transform::PytorchHalfPixel if self.to == 1 => 0.0,
            Transform::PytorchHalfPixel => half_pixel,
            Transform::AlignCorners if width == 1.0 => 0.0,
            Transform::AlignCorners => at * (from - 1.0) / (width - 1.0),
            Transform::Asymmetric => at / self.scale,
            Transform::Crop => {
                let [start, end] = self.region;
                let share = if width == 1.0 { 0.5 } else { at / (width - 1.0) };
                (start + share * (end - start)) * (from - 1.0)
            }
        }
    }

    /// For `Crop`, the result elements that come from outside the input; all false for other transforms.
    pub fn outside(&self, transform: Transform) -> Vec<bool> {
        let range = 0.0..=(self.from - 1) as f64;
        (0..self.to).map(|at| transform == Transform::Crop && !range.contains(&self.origin(transform, at))).collect()
    }

    /// The nearest input element for each result element.
    pub fn nearest(&self, transform: Transform, rounding: Rounding) -> Result<Vec<i64>, LowerReason> {
        self.check(1)?;
        Ok((0..self.to).map(|at| self.clamped(rounding.of(self.origin(transform, at))) as i64).collect())
    }

    /// The weight matrix `[to, from]`.
    pub fn weights(&self, transform: Transform, filter: Filter) -> Result<Vec<f64>, LowerReason> {
        let stretch = if filter.antialias { self.scale.min(1.0) } else { 1.0 };
        let radius = (filter.support() / stretch).ceil();
        // A crop may have any scale, so the kernel may be arbitrarily wide.
        self.check(self.from.max((2.0 * radius) as usize))?;
        let mut matrix = vec![0.0; self.to * self.from];
        for (at, row) in matrix.chunks_exact_mut(self.from).enumerate() {
            let origin = self.origin(transform, at);
            let mut total = 0.0;
            // Positions are floats, because far outside they would overflow an index.
            for step in 0..=(2.0 * radius) as usize {
                let position = origin.floor() - radius + step as f64;
                let is_outside = position < 0.0 || position > (self.from - 1) as f64;
                if filter.exclude_outside && is_outside {
                    continue;
                }
                let weight = filter.weight((position - origin) * stretch);
                row[self.clamped(position)] += weight;
                total += weight;
            }
            if (filter.antialias || filter.exclude_outside) && total != 0.0 {
                row.iter_mut().for_each(|weight| *weight /= total);
            }
        }
        Ok(matrix)
    }

    fn clamped(&self, position: f64) -> usize {
        position.clamp(0.0, (self.from - 1) as f64) as usize
    }

    fn check(&self, width: usize) -> Result<(), LowerReason> {
        match self.to.checked_mul(width) {
            Some(count) if count <= LARGEST => Ok(()),
            _ => {
                Err(LowerReason::Unsupported(format!("a resize of an axis from {} to {} elements", self.from, self.to)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(from: usize, to: usize) -> Axis {
        Axis { from, to, scale: to as f64 / from as f64, region: [0.0, 1.0] }
    }

    fn filter(cubic: Option<f64>) -> Filter {
        Filter { cubic, antialias: false, exclude_outside: false }
    }

    #[test]
    fn linear_weights_are_those_of_the_neighbours() {
        let matrix = axis(2, 4).weights(Transform::HalfPixel, filter(None)).unwrap();
        assert_eq!(matrix, [1.0, 0.0, 0.75, 0.25, 0.25, 0.75, 0.0, 1.0]);
        let matrix = axis(2, 3).weights(Transform::AlignCorners, filter(None)).unwrap();
        assert_eq!(matrix, [1.0, 0.0, 0.5, 0.5, 0.0, 1.0]);
    }

    #[test]
    fn weights_sum_to_one() {
        for cubic in [None, Some(-0.75)] {
            for (antialias, exclude_outside) in [(false, false), (true, false), (false, true), (true, true)] {
                for (from, to) in [(5, 3), (3, 7), (9, 2), (1, 4)] {
                    let filter = Filter { cubic, antialias, exclude_outside };
                    let matrix = axis(from, to).weights(Transform::HalfPixel, filter).unwrap();
                    for row in matrix.chunks(from) {
                        assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{filter:?} {from} {to}");
                    }
                }
            }
        }
    }

    #[test]
    fn an_antialiased_half_is_a_tent_over_four_elements() {
        // Element 1 is at 2½. The distances 1½, ½, ½, 1½ are halved by the stretch and give weights ¼, ¾, ¾, ¼, which
        // sum to 2.
        let filter = Filter { cubic: None, antialias: true, exclude_outside: true };
        let matrix = axis(8, 4).weights(Transform::HalfPixel, filter).unwrap();
        assert_eq!(matrix[8..16], [0.0, 0.125, 0.375, 0.375, 0.125, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn ties_follow_the_rounding_mode() {
        let nearest = |rounding| axis(4, 2).nearest(Transform::HalfPixel, rounding).unwrap();
        assert_eq!(nearest(Rounding::PreferFloor), [0, 2]);
        assert_eq!(nearest(Rounding::PreferCeil), [1, 3]);
        assert_eq!(nearest(Rounding::Floor), [0, 2]);
        assert_eq!(nearest(Rounding::Ceil), [1, 3]);
    }

    #[test]
    fn crop_marks_positions_outside_the_input() {
        let crop = Axis { region: [0.5, 1.5], ..axis(3, 3) };
        assert_eq!(crop.outside(Transform::Crop), [false, false, true]);
        assert_eq!(crop.nearest(Transform::Crop, Rounding::Floor).unwrap(), [1, 2, 2]);
    }

    #[test]
    fn extreme_positions_and_sizes_are_handled() {
        let extreme = Axis { region: [-1e300, f64::MAX], ..axis(3, 4) };
        assert!(extreme.weights(Transform::Crop, filter(Some(-0.5))).is_ok());
        let wide = Axis { scale: 1e-30, ..axis(3, 4) };
        assert!(wide.weights(Transform::Crop, Filter { antialias: true, ..filter(None) }).is_err());
        assert!(axis(1 << 20, 1 << 20).weights(Transform::HalfPixel, filter(None)).is_err());
        assert!(axis(1, usize::MAX).nearest(Transform::HalfPixel, Rounding::Floor).is_err());
    }
}
