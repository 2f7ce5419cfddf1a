//! The sum of squares of a tensor, in `f64`.

use super::real::Real;
use super::wide::wide;

/// Parallel partial sums; their number affects rounding.
const LANES: usize = 16;

wide! {
    pub fn squares[T: Real](x: &[T]) -> f64 {
        let mut lanes = [0.0f64; LANES];
        let mut rows = x.chunks_exact(LANES);
        for row in &mut rows {
            for (lane, x) in lanes.iter_mut().zip(row) {
                *lane += x.wide() * x.wide();
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rows.remainder()) {
            *lane += x.wide() * x.wide();
        }
        lanes.iter().fold(0.0, |sum, lane| sum + lane)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_rows_and_a_rest() {
        let x: Vec<f32> = (1..=50).map(|i| i as f32).collect();
        assert_eq!(squares(&x), 50.0 * 51.0 * 101.0 / 6.0);
        assert!(squares(&[1.0, f64::NAN]).is_nan());
    }
}
