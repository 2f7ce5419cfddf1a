//! Broadcasting: the shape rule of elementwise ops, its gradient, and the broadcast op.

use super::*;
use crate::tensor::view::strides;

impl OpRule for Broadcast {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        check_sizes("broadcast", &self.shape)?;
        if broadcast_shapes(&x.shape, &self.shape)? != self.shape {
            return Err(FactError::mismatch(
                "the input shape",
                shape_text(&x.shape),
                "the target shape",
                shape_text(&self.shape),
            ));
        }
        Ok(vec![Fact::new(x.dtype, self.shape.clone())])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 0.0, bytes: moved_bytes(inputs, outputs) }
    }

    // dx = Σ dy over the broadcast axes
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let x = context.inputs[0];
        vec![x.is_float().then(|| context.dy().sum_to(x))]
    }

    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], group: &Group) -> Vec<Strategy> {
        let with_local_shape = |strategy: Strategy| {
            let part = strategy.outputs[0].part(&outputs[0], group.devices)?;
            Some(strategy.sized(Op::Broadcast(Broadcast { shape: part.shape })))
        };
        let mut strategies: Vec<Strategy> =
            sharding::elementwise(inputs, &outputs[0]).into_iter().filter_map(with_local_shape).collect();
        strategies.push(Strategy::linear(&[true], 1));
        strategies
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        // Fast path: importers fold large constant-filled tensors.
        if x.bytes().len() == x.dtype.size() {
            fill(y.bytes_mut(), x.bytes());
            return Ok(());
        }
        let from = broadcast_indices(x.shape, y.shape);
        copy_elements(x, y, from);
        Ok(())
    }
}

/// The broadcast shape of two operands, as in NumPy. Symbolic dims agree if they are the same polynomial.
pub fn broadcast_shapes(a: &[Dim], b: &[Dim]) -> Result<Vec<Dim>, FactError> {
    let rank = a.len().max(b.len());
    let one = Dim::Known(1);
    (0..rank)
        .map(|axis| {
            // Missing leading axes have size 1.
            let da = (axis + a.len()).checked_sub(rank).map_or(&one, |i| &a[i]);
            let db = (axis + b.len()).checked_sub(rank).map_or(&one, |i| &b[i]);
            match (da == db || db.is(1), da.is(1)) {
                (true, _) => Ok(da.clone()),
                (false, true) => Ok(db.clone()),
                (false, false) => Err(FactError::mismatch(
                    "one shape",
                    shape_text(a),
                    "the other",
                    format!("{}, which does not broadcast with it", shape_text(b)),
                )),
            }
        })
        .collect()
}

impl<'b> Expr<'b> {
    /// Reduces a gradient to the shape of `target`, summing over the broadcast axes; itself if the shapes are equal.
    pub fn sum_to(self, target: Expr<'b>) -> Expr<'b> {
        let (from, target) = (self.shape(), target.shape());
        if from == target {
            return self;
        }
        let leading = from.len() - target.len();
        let is_summed = |axis: &usize| !from[*axis].is(1) && (*axis < leading || target[axis - leading].is(1));
        let axes: Vec<usize> = (0..from.len()).filter(is_summed).collect();
        let sum = if axes.is_empty() { self } else { self.reduce(ReduceKind::Sum, axes, true) };
        if leading > 0 { sum.reshape(target) } else { sum }
    }
}

/// Formats a shape for messages: `[batch, 3]`.
pub fn shape_text(shape: &[Dim]) -> String {
    let dims: Vec<String> = shape.iter().map(Dim::to_string).collect();
    format!("[{}]", dims.join(", "))
}

/// Refuses a shape attribute with a negative size.
pub fn check_sizes(op: &str, shape: &[Dim]) -> Result<(), FactError> {
    if shape.iter().any(|d| d.known().is_some_and(|v| v < 0)) {
        return Err(FactError::Attribute(format!("{op} to {}, which has a negative size", shape_text(shape))));
    }
    Ok(())
}

/// For every element of `out`, in order, the index of the operand's element that is broadcast to it.
pub fn broadcast_indices(shape: &[usize], out: &[usize]) -> impl Iterator<Item = usize> + use<> {
    let leading = out.len() - shape.len();
    let own_strides = strides(shape);
    let steps: Vec<isize> = (0..out.len())
        .map(|axis| if axis < leading || shape[axis - leading] == 1 { 0 } else { own_strides[axis - leading] as isize })
        .collect();
    walk(0, &steps, out)
}

/// The offset `base + Σ index·step` of every index of `shape`, in row-major order. Data movement ops differ only in the
/// steps: a transpose permutes them, a broadcast has zeros, a flip has negative ones.
pub fn walk(base: usize, steps: &[isize], shape: &[usize]) -> impl Iterator<Item = usize> + use<> {
    let count: usize = shape.iter().product();
    let axes: Vec<(usize, usize, isize)> =
        strides(shape).into_iter().zip(shape).zip(steps).map(|((row, &dim), &step)| (row, dim, step)).collect();
    (0..count).map(move |flat| {
        let offset: isize = axes.iter().map(|&(row, dim, step)| (flat / row % dim) as isize * step).sum();
        base.wrapping_add_signed(offset)
    })
}

/// Copies the elements of `x` at these offsets to `y`, in order. Both have one element type; bytes are copied
/// unchanged.
pub fn copy_elements(x: &View<'_>, y: &mut ViewMut<'_>, offsets: impl Iterator<Item = usize>) {
    let size = x.dtype.size();
    for (to, from) in y.bytes_mut().chunks_exact_mut(size).zip(offsets) {
        to.copy_from_slice(&x.bytes()[from * size..(from + 1) * size]);
    }
}

/// Fills `bytes` with repetitions of `element` by doubling the filled prefix.
fn fill(bytes: &mut [u8], element: &[u8]) {
    let mut filled = element.len().min(bytes.len());
    bytes[..filled].copy_from_slice(&element[..filled]);
    while filled < bytes.len() {
        let step = filled.min(bytes.len() - filled);
        bytes.copy_within(..step, filled);
        filled += step;
    }
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, shape: &[i64], x: Tensor| {
        Sample::new(title, Op::Broadcast(Broadcast { shape: shape.iter().map(|&d| Dim::from(d)).collect() }), vec![x])
    };
    vec![
        sample("a scalar", &[2, 3], Tensor::from_f32(&[], &[1.5])),
        sample("a row", &[2, 3], Tensor::from_f32(&[3], &[1.0, -2.0, 0.5])),
        sample("a column", &[2, 3], Tensor::from_f32(&[2, 1], &[1.0, -2.0])),
        sample("inner and outer", &[2, 2, 3, 2], Tensor::from_f32(&[2, 1, 2], &[1.0, -2.0, 0.5, 3.0])),
        sample("ones stay", &[1, 2, 1], Tensor::from_f32(&[2, 1], &[1.0, -2.0])),
        sample("nothing to stretch", &[2], Tensor::from_f32(&[2], &[4.0, 5.0])),
        sample("a scalar to a scalar", &[], Tensor::from_f32(&[], &[4.0])),
        sample("to nothing", &[0, 3], Tensor::from_f32(&[3], &[4.0, 5.0, 6.0])),
        sample("integers", &[2, 2], Tensor::from_i64(&[2], &[i64::MIN, 7])),
        sample("bytes", &[2, 2], Tensor::from_i64(&[2, 1], &[255, 7]).cast(DType::U8)),
        sample("booleans", &[3], Tensor::from_bool(&[1], &[true])),
    ]
}
