//! Padding around and between elements.

use super::broadcast::walk;
use super::slice::{origin, spread_size};
use super::*;
use crate::tensor::view::strides;

impl OpRule for Pad {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        for (what, got) in [("low", self.low.len()), ("high", self.high.len()), ("interior", self.interior.len())] {
            if got != x.rank() {
                return Err(FactError::Rank { what, expected: format!("{}, as the input", x.rank()), got });
            }
        }
        let shape = (0..x.rank())
            .map(|axis| {
                let (low, high) = (&self.low[axis], &self.high[axis]);
                if [low, high].iter().any(|d| d.known().is_some_and(|v| v < 0)) {
                    let text = format!("axis {axis} is padded by {low} and {high}, which must not be negative");
                    return Err(FactError::Attribute(text));
                }
                Ok(spread_size(&x.shape[axis], self.interior[axis])?.add(low)?.add(high)?)
            })
            .collect::<Result<_, _>>()?;
        Ok(vec![Fact::new(x.dtype, shape)])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 0.0, bytes: moved_bytes(inputs, outputs) }
    }

    // dx = the elements of dy at the positions of x: from `low` on, `interior + 1` apart
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let x = context.inputs[0].fact();
        if !x.dtype.is_float() {
            return vec![None];
        }
        let end = (0..x.rank())
            .map(|axis| spread_size(&x.shape[axis], self.interior[axis])?.add(&self.low[axis]))
            .collect::<Result<_, _>>()
            .expect("infer has added up the same dims");
        let step = self.interior.iter().map(|between| between.saturating_add(1)).collect();
        vec![Some(context.dy().then(Op::Slice(Slice { begin: self.low.clone(), end, step })))]
    }

    // Unpadded axes.
    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        let [x] = inputs else { return Vec::new() };
        let as_it_is = |axis: &usize| self.low[*axis].is(0) && self.high[*axis].is(0) && self.interior[*axis] == 0;
        let mut strategies: Vec<Strategy> =
            (0..x.rank()).filter(as_it_is).map(|axis| Strategy::along(&[Some(axis)], &[Some(axis)])).collect();
        if self.value == 0.0 {
            strategies.push(Strategy::linear(&[true], outputs.len()));
        }
        strategies
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        for i in 0..y.len() {
            y.set_f64(i, self.value);
        }
        if x.is_empty() {
            return Ok(());
        }
        let y_strides = strides(y.shape);
        let base = origin(&self.low, y.shape)?;
        // A single element has no neighbour: its step is unused, and may be huge.
        let step = |axis: usize| if x.shape[axis] > 1 { self.interior[axis] + 1 } else { 0 };
        let steps: Vec<isize> = (0..y_strides.len()).map(|axis| (y_strides[axis] * step(axis)) as isize).collect();
        let size = x.dtype.size();
        for (from, to) in walk(base, &steps, x.shape).enumerate() {
            y.bytes_mut()[to * size..(to + 1) * size].copy_from_slice(&x.bytes()[from * size..(from + 1) * size]);
        }
        Ok(())
    }
}

/// Serializes the pad value. JSON has no infinities (used to pad a maximum) or NaN, so these are text.
pub mod any_float {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Written {
        Number(f64),
        Name(String),
    }

    /// Writes a finite number, or `inf`, `-inf`, `NaN`.
    pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        let written = if value.is_finite() { Written::Number(*value) } else { Written::Name(value.to_string()) };
        written.serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        match Written::deserialize(deserializer)? {
            Written::Number(value) => Ok(value),
            Written::Name(name) => name.parse().map_err(de::Error::custom),
        }
    }
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, x: Tensor, low: &[i64], high: &[i64], interior: &[usize], value| {
        Sample::new(
            title,
            Op::Pad(Pad {
                low: low.iter().map(|&d| Dim::from(d)).collect(),
                high: high.iter().map(|&d| Dim::from(d)).collect(),
                interior: interior.to_vec(),
                value,
            }),
            vec![x],
        )
    };
    let three = || Tensor::from_f32(&[3], &[1.0, 2.0, 3.0]);
    let table = || Tensor::from_f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    vec![
        sample("before and after", three(), &[1], &[2], &[0], 0.0),
        sample("only before", three(), &[2], &[0], &[0], 9.5),
        sample("between", three(), &[0], &[0], &[2], 0.0),
        sample("everywhere", three(), &[1], &[2], &[1], -1.0),
        sample("two axes", table(), &[1, 0], &[0, 2], &[1, 2], 0.0),
        sample("one axis of two", table(), &[0, 1], &[0, 1], &[0, 0], 0.5),
        sample("no padding", table(), &[0, 0], &[0, 0], &[0, 0], 7.0),
        sample("around nothing", Tensor::zeros(DType::F32, &[0]), &[1], &[2], &[3], 4.0),
        sample("around a lone element", Tensor::from_f32(&[1], &[5.0]), &[1], &[1], &[1 << 40], 4.0),
        Sample { differentiate: vec![], ..sample("minus infinity", three(), &[1], &[1], &[0], f64::NEG_INFINITY) },
        sample("a scalar", Tensor::from_f32(&[], &[1.0]), &[], &[], &[], 0.0),
        sample("integers", Tensor::from_i64(&[2], &[i64::MAX, 2]), &[1], &[1], &[0], -3.0),
        sample("bytes", three().cast(DType::U8), &[1], &[1], &[1], 255.0),
        sample("booleans", Tensor::from_bool(&[2], &[false, true]), &[1], &[1], &[0], 1.0),
    ]
}
