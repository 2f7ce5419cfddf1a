//! Non-constant padding modes of `Pad`, and `CenterCropPad`.

use super::attribute::axis;
use super::fold::charge;
use super::slice::part;
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::build::Build;
use crate::op::{Gather, Op, Pad, Value};
use crate::tensor::Tensor;
use crate::tensor::dim::Dim;

/// Maximum size of an axis padded with its own elements.
const LARGEST: i64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mode {
    /// Mirrored at the first and last element, which are not repeated.
    Reflect,
    /// Repeats the first or last element.
    Edge,
    /// Continues from the opposite end.
    Wrap,
}

impl Mode {
    pub fn parse(name: &str) -> Option<Mode> {
        Some(match name {
            "reflect" => Mode::Reflect,
            "edge" => Mode::Edge,
            "wrap" => Mode::Wrap,
            _ => return None,
        })
    }

    /// The source index for a position before, inside or after an axis of `size > 0`.
    pub fn source(self, position: i64, size: i64) -> i64 {
        match self {
            Mode::Edge => position.clamp(0, size - 1),
            Mode::Wrap => position.rem_euclid(size),
            Mode::Reflect if size == 1 => 0,
            Mode::Reflect => {
                let phase = position.rem_euclid(2 * (size - 1));
                phase.min(2 * (size - 1) - phase)
            }
        }
    }
}

/// Pads axis `at` with its own elements; negative padding crops.
pub fn pad_by_repetition(
    scope: &mut Scope<'_>,
    x: Value,
    at: usize,
    pads: [&Dim; 2],
    mode: Mode,
) -> Result<Value, LowerReason> {
    let [before, after] = pads;
    if before.is(0) && after.is(0) {
        return Ok(x);
    }
    let size = scope.fact(x).shape[at].clone();
    let (Some(size), Some(before), Some(after)) = (size.known(), before.known(), after.known()) else {
        return Err(LowerReason::Unsupported("non-constant padding of unknown size".to_string()));
    };
    let in_range = |n: i64| (-LARGEST..=LARGEST).contains(&n);
    if !in_range(before) || !in_range(after) || !(1..=LARGEST).contains(&size) {
        return Err(LowerReason::Inputs(format!("paddings of {before} and {after} of an axis of size {size}")));
    }
    charge(scope, (before + size + after).max(0) as usize)?;
    let sources: Vec<i64> = (-before..size + after).map(|place| mode.source(place, size)).collect();
    let sources = scope.constant(Tensor::from_i64(&[sources.len()], &sources))?;
    scope.add(Op::Gather(Gather { axis: at }), &[x, sources])
}

/// Pads with a value computed at run time; `low` and `high` are those of [`Pad`].
pub fn pad_with(
    scope: &mut Scope<'_>,
    x: Value,
    low: Vec<Dim>,
    high: Vec<Dim>,
    value: Value,
) -> Result<Value, LowerReason> {
    let shape = scope.fact(x).shape;
    let pad = |value| Op::Pad(Pad { interior: vec![0; low.len()], low: low.clone(), high: high.clone(), value });
    let one = scope.constant(Tensor::from_bool(&[], &[true]))?;
    let mask = scope.broadcast(one, shape)?;
    let mask = scope.add(pad(0.0), &[mask])?;
    let y = scope.add(pad(0.0), &[x])?;
    let value = scope.reshape(value, Vec::new())?;
    scope.select(mask, y, value)
}

/// Centre crop or zero padding to the requested sizes. An odd element is cropped or added at the end.
pub fn center_crop_pad(scope: &mut Scope<'_>) -> Outputs {
    let target_sizes = scope.dims(1, "the size to crop to")?.ok_or(LowerReason::Missing { slot: 1 })?;
    let mut x = scope.value(0)?;
    let rank = scope.fact(x).rank();
    let axes = match scope.ints("axes")? {
        Some(list) => list.into_iter().map(|a| axis(a, rank)).collect::<Result<Vec<_>, _>>()?,
        None => (0..rank).collect(),
    };
    if target_sizes.len() != axes.len() {
        return Err(LowerReason::Inputs(format!("{} sizes for {} axes", target_sizes.len(), axes.len())));
    }
    let (mut low, mut high) = (vec![Dim::Known(0); rank], vec![Dim::Known(0); rank]);
    for (at, want) in axes.into_iter().zip(target_sizes) {
        let have = scope.fact(x).shape[at].clone();
        if have == want {
            continue;
        }
        let (Some(have), Some(want)) = (have.known(), want.known()) else {
            return Err(LowerReason::Unsupported(format!("a crop to {want} of an axis of size {have}")));
        };
        let excess = have.saturating_sub(want).saturating_abs();
        if want < 0 {
            return Err(LowerReason::Inputs(format!("a requested size of {want}")));
        } else if want < have {
            x = part(scope, x, at, Dim::Known(excess / 2), Dim::Known(excess / 2 + want))?;
        } else {
            (low[at], high[at]) = (Dim::Known(excess / 2), Dim::Known(excess - excess / 2));
        }
    }
    if low.iter().chain(&high).any(|d| !d.is(0)) {
        x = scope.add(Op::Pad(Pad { interior: vec![0; rank], low, high, value: 0.0 }), &[x])?;
    }
    Ok(vec![Known::Value(x)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_outside_come_from_inside() {
        let sources = |mode: Mode, size| (-3..size + 3).map(|place| mode.source(place, size)).collect::<Vec<_>>();
        assert_eq!(sources(Mode::Edge, 3), [0, 0, 0, 0, 1, 2, 2, 2, 2]);
        assert_eq!(sources(Mode::Wrap, 3), [0, 1, 2, 0, 1, 2, 0, 1, 2]);
        assert_eq!(sources(Mode::Reflect, 3), [1, 2, 1, 0, 1, 2, 1, 0, 1]);
        assert_eq!(sources(Mode::Reflect, 1), [0; 7]);
    }
}
