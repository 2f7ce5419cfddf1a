//! Sums, norms and moving averages by element type.

use super::gather;
use super::half::{is_half, widen};
use super::real::Real;
use super::square::squares;
use super::wide::wide;
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::tensor::DType;
use compiler::tensor::view::ViewMut;

/// Elements of a 16-bit term that are widened at a time.
const CHUNK: usize = 1024;

/// `sum = first + second`, for `f32` or `f64`.
pub fn add(dtype: DType, first: &[u8], second: &[u8], sum: &mut [u8]) {
    match dtype {
        DType::F64 => add_each::<f64>(cast_slice(first), cast_slice(second), cast_slice_mut(sum)),
        _ => add_each::<f32>(cast_slice(first), cast_slice(second), cast_slice_mut(sum)),
    }
}

wide! {
    fn add_each[T: Real](first: &[T], second: &[T], sum: &mut [T]) {
        for (sum, (&first, &second)) in sum.iter_mut().zip(first.iter().zip(second)) {
            *sum = first + second;
        }
    }
}

/// `sum += term`; 16-bit terms are summed in `f32`.
pub fn accumulate(dtype: DType, term: &[u8], sum: &mut [u8]) {
    match dtype {
        DType::F64 => gather::add::<f64>(cast_slice(term), cast_slice_mut(sum)),
        dtype if is_half(dtype) => {
            let mut wide = [0.0f32; CHUNK];
            let chunks = cast_slice_mut::<u8, f32>(sum).chunks_mut(CHUNK);
            for (sum, term) in chunks.zip(term.chunks(CHUNK * dtype.size())) {
                let wide = &mut wide[..sum.len()];
                widen(dtype, term, wide);
                gather::add::<f32>(wide, sum);
            }
        }
        _ => gather::add::<f32>(cast_slice(term), cast_slice_mut(sum)),
    }
}

/// Sum of squares, for `f32` or `f64`.
pub fn squared_norm(dtype: DType, values: &[u8]) -> f64 {
    match dtype {
        DType::F64 => squares(cast_slice::<u8, f64>(values)),
        _ => squares(cast_slice::<u8, f32>(values)),
    }
}

/// `values *= factor`, computed in `f64`.
pub fn scale(dtype: DType, values: &mut [u8], factor: f64) {
    let shape = [values.len() / dtype.size()];
    let mut view = ViewMut::new(dtype, &shape, values);
    for i in 0..shape[0] {
        let value = view.as_view().f64(i);
        view.set_f64(i, value * factor);
    }
}

/// `state = keep · state + (1 − keep) · sample`, computed in `f64`.
pub fn moving_average(dtype: DType, sample: &[f64], keep: f64, state: &mut [u8]) {
    let shape = [state.len() / dtype.size()];
    let mut state = ViewMut::new(dtype, &shape, state);
    for (i, sample) in sample.iter().enumerate().take(shape[0]) {
        let old = state.as_view().f64(i);
        state.set_f64(i, keep * old + (1.0 - keep) * sample);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_accumulate() {
        let mut sum = [1.0f32, 2.0];
        accumulate(DType::F32, cast_slice(&[0.5f32, -2.0]), cast_slice_mut(&mut sum));
        assert_eq!(sum, [1.5, 0.0]);
        add(DType::F32, cast_slice(&[0.5f32, 3.0]), cast_slice(&[1.0f32, -2.0]), cast_slice_mut(&mut sum));
        assert_eq!(sum, [1.5, 1.0]);
    }
}
