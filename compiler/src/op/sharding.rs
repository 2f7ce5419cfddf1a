//! How a tensor lies on the devices of a group that shares every op of a stage, and the ways of sharing one op.
//!
//! A tensor is whole on every device, or in equal parts along an axis, or each device has a term of a sum. A [`Strategy`] of an op
//! says how its inputs must lie and how its outputs lie then; what each device runs is the op itself on its parts, or with its sizes
//! divided, or a few ops that its rule writes. All devices run the same ops: only what a [`Shard`] makes tells them apart.
//!
//! A part may be made of several runs. A fused projection to queries, keys and values has three blocks along its axis; in
//! `blocks: 3` every device has its share of each, so that a slice takes its block without asking another device.
//!
//! ```text
//! eight elements, two devices       blocks 1: 0 0 0 0 1 1 1 1        blocks 2: 0 0 1 1 0 0 1 1
//! ```

use crate::op::table::rule;
use crate::op::*;
use crate::tensor::element_count;
use std::collections::BTreeMap;
use std::fmt;

/// Where an axis is divided: in `blocks` equal blocks, of each of which device d of the group holds the part number d.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SplitDim {
    /// The axis.
    pub axis: usize,
    /// The blocks.
    pub blocks: usize,
}

/// How a tensor lies on the devices of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Sharding {
    /// Every device holds all of it.
    Replicated,
    /// Every device holds an equal part.
    Split(SplitDim),
    /// Every device holds a term of the shape of the whole, which is the sum of all terms.
    Partial,
}

/// `R`, `S1`, `S1/3` (in three blocks) or `P`.
impl fmt::Display for Sharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sharding::Replicated => f.write_str("R"),
            Sharding::Split(SplitDim { axis, blocks: 1 }) => write!(f, "S{axis}"),
            Sharding::Split(SplitDim { axis, blocks }) => write!(f, "S{axis}/{blocks}"),
            Sharding::Partial => f.write_str("P"),
        }
    }
}

impl Sharding {
    /// In parts along an axis, each of one run.
    pub fn split(axis: usize) -> Sharding {
        Sharding::Split(SplitDim { axis, blocks: 1 })
    }

    /// What one device holds of a tensor; nothing where its axis is not divided into equal parts, or truths would be added up.
    pub fn part(self, whole: &Fact, devices: usize) -> Option<Fact> {
        if self == Sharding::Partial && whole.dtype == DType::Bool {
            return None;
        }
        let mut part = whole.clone();
        if let Sharding::Split(cut) = self {
            let size = usize::try_from(whole.shape.get(cut.axis)?.known()?).ok()?;
            let parts = cut.blocks.checked_mul(devices)?;
            if size == 0 || size.checked_rem(parts)? != 0 {
                return None;
            }
            part.shape[cut.axis] = Dim::from(size / devices);
        }
        Some(part)
    }
}

/// The devices that share a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// How many.
    pub devices: usize,
    /// By size of an axis, in how many blocks it may be worth dividing it besides one.
    pub blocks: BTreeMap<usize, Vec<usize>>,
}

impl Group {
    /// A group that divides no axis into blocks.
    pub fn of(devices: usize) -> Group {
        Group { devices, blocks: BTreeMap::new() }
    }
}

/// What each device runs.
#[derive(Clone, Debug, PartialEq)]
pub enum Local {
    /// The op as it is.
    Same,
    /// The op with its sizes divided.
    Sized(Op),
    /// What [`OpRule::write_part`] writes.
    Written,
}

/// One way of sharing an op.
#[derive(Clone, Debug, PartialEq)]
pub struct Strategy {
    /// How each input must lie.
    pub inputs: Vec<Sharding>,
    /// How each output lies then.
    pub outputs: Vec<Sharding>,
    /// What each device runs.
    pub local: Local,
    /// Whether the elements along the split axes may come in any order that is the same in all tensors, so that they may as well be
    /// split in blocks.
    pub any_order: bool,
}

impl Strategy {
    /// Every device does everything.
    pub fn replicated(inputs: usize, outputs: usize) -> Strategy {
        let (inputs, outputs) = (vec![Sharding::Replicated; inputs], vec![Sharding::Replicated; outputs]);
        Strategy { inputs, outputs, local: Local::Same, any_order: false }
    }

    /// Each device has its part along one axis of each tensor. An input without it is whole, an output without it the sum of
    /// what the devices make.
    pub fn along(inputs: &[Option<usize>], outputs: &[Option<usize>]) -> Strategy {
        let layouts = |axes: &[Option<usize>], without: Sharding| -> Vec<Sharding> {
            axes.iter().map(|axis| axis.map_or(without, Sharding::split)).collect()
        };
        let (inputs, outputs) = (layouts(inputs, Sharding::Replicated), layouts(outputs, Sharding::Partial));
        Strategy { inputs, outputs, local: Local::Same, any_order: true }
    }

    /// The op is linear in the inputs that are marked, taken together: from terms of those come terms of every output.
    pub fn linear(terms: &[bool], outputs: usize) -> Strategy {
        let layout = |term: &bool| if *term { Sharding::Partial } else { Sharding::Replicated };
        let (inputs, outputs) = (terms.iter().map(layout).collect(), vec![Sharding::Partial; outputs]);
        Strategy { inputs, outputs, local: Local::Same, any_order: false }
    }

    /// The same with this op on each device.
    pub fn sized(self, op: Op) -> Strategy {
        Strategy { local: Local::Sized(op), ..self }
    }

    /// The same with what the rule writes on each device, which depends on the place of each element.
    pub fn written(self) -> Strategy {
        Strategy { local: Local::Written, any_order: false, ..self }
    }

    /// The same with every axis that is split in so many blocks.
    fn in_blocks(&self, blocks: usize) -> Strategy {
        let cut = |layout: &Sharding| match layout {
            Sharding::Split(cut) => Sharding::Split(SplitDim { blocks, ..*cut }),
            other => *other,
        };
        let (inputs, outputs) = (self.inputs.iter().map(cut).collect(), self.outputs.iter().map(cut).collect());
        Strategy { inputs, outputs, ..self.clone() }
    }

    fn fits(&self, inputs: &[&Fact], outputs: &[Fact], devices: usize) -> bool {
        let whole = inputs.iter().copied().chain(outputs);
        self.inputs.iter().chain(&self.outputs).zip(whole).all(|(layout, fact)| layout.part(fact, devices).is_some())
    }
}

/// All ways of sharing an op at fixed sizes, the one in which every device does everything first.
pub fn strategies(op: &Op, inputs: &[&Fact], outputs: &[Fact], group: &Group) -> Vec<Strategy> {
    let mut all = vec![Strategy::replicated(inputs.len(), outputs.len())];
    for strategy in rule(op).strategies(inputs, outputs, group) {
        let mut ways = vec![strategy.clone()];
        if strategy.any_order {
            let whole = inputs.iter().copied().chain(outputs);
            let split = strategy.inputs.iter().chain(&strategy.outputs).zip(whole).find_map(|pair| match pair {
                (Sharding::Split(cut), fact) => size(fact, cut.axis),
                _ => None,
            });
            let blocks = split.and_then(|size| group.blocks.get(&size)).into_iter().flatten();
            ways.extend(blocks.map(|&blocks| strategy.in_blocks(blocks)));
        }
        for way in ways {
            if way.fits(inputs, outputs, group.devices) && !all.contains(&way) {
                all.push(way);
            }
        }
    }
    all
}

/// The size of an axis, where it is known.
pub(crate) fn size(fact: &Fact, axis: usize) -> Option<usize> {
    usize::try_from(fact.shape.get(axis)?.known()?).ok()
}

/// What the rule of an op sees where it writes what one device runs.
pub struct PartSite<'a> {
    /// What the device holds of each input.
    pub inputs: &'a [Value],
    /// The facts of the whole inputs.
    pub whole: &'a [&'a Fact],
    /// The devices.
    pub devices: usize,
}

/// Writes what each device runs under a strategy.
pub fn write(op: &Op, strategy: &Strategy, at: &PartSite<'_>, out: &mut dyn Emit) -> Vec<Value> {
    match &strategy.local {
        Local::Same => out.emit_all(op.clone(), at.inputs),
        Local::Sized(sized) => out.emit_all(sized.clone(), at.inputs),
        Local::Written => rule(op).write_part(strategy, at, out),
    }
}

/// One device's part of a tensor that is divided like this. The caller knows that the axis divides.
pub fn part_of(whole: &Tensor, cut: SplitDim, devices: usize, device: usize) -> Tensor {
    let mut shape = whole.shape().to_vec();
    shape[cut.axis] /= devices;
    let (outer, run) = runs(&shape, cut, whole.dtype());
    let bytes = (0..outer).flat_map(|o| &whole.bytes()[(o * devices + device) * run..(o * devices + device + 1) * run]);
    let bytes: Vec<u8> = bytes.copied().collect();
    Tensor::new(whole.dtype(), shape, bytes.into()).expect("the axis is divided into equal parts")
}

/// The tensor whose parts, in the order of the devices, these are.
pub fn whole_of(parts: &[Tensor], cut: SplitDim) -> Tensor {
    let (outer, run) = runs(parts[0].shape(), cut, parts[0].dtype());
    let mut bytes = Vec::with_capacity(outer * run * parts.len());
    for o in 0..outer {
        parts.iter().for_each(|part| bytes.extend_from_slice(&part.bytes()[o * run..(o + 1) * run]));
    }
    let mut shape = parts[0].shape().to_vec();
    shape[cut.axis] *= parts.len();
    Tensor::new(parts[0].dtype(), shape, bytes.into()).expect("parts of one shape")
}

/// How many runs of neighbours a part has, and the bytes of each.
fn runs(part: &[usize], cut: SplitDim, dtype: DType) -> (usize, usize) {
    let outer = part[..cut.axis].iter().product::<usize>() * cut.blocks;
    let elements = element_count(part).expect("the part of a tensor is smaller than the tensor");
    (outer, elements.checked_div(outer).unwrap_or(0) * dtype.size())
}

/// The strategies of an op that computes every element of its output from those at the same place of its inputs, which broadcast.
pub(crate) fn elementwise(inputs: &[&Fact], output: &Fact) -> Vec<Strategy> {
    let aligned = |input: &Fact, axis: usize| {
        let own = (axis + input.rank()).checked_sub(output.rank())?;
        (!input.shape[own].is(1)).then_some(own)
    };
    let axes = (0..output.rank()).filter(|axis| !output.shape[*axis].is(1));
    axes.map(|axis| {
        let inputs: Vec<Option<usize>> = inputs.iter().map(|input| aligned(input, axis)).collect();
        Strategy::along(&inputs, &[Some(axis)])
    })
    .collect()
}

/// The strategies of an op that treats all axes but some alike: its first input and all outputs are split along any other axis.
pub(crate) fn all_but(fact: &Fact, used: &[usize], outputs: usize) -> Vec<Strategy> {
    let axes = (0..fact.rank()).filter(|axis| !used.contains(axis));
    axes.map(|axis| Strategy::along(&[Some(axis)], &vec![Some(axis); outputs])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_in_blocks_are_joined_again() {
        let whole = Tensor::from_i64(&[2, 8], &(0..16).collect::<Vec<_>>());
        let part = |axis, blocks, device| part_of(&whole, SplitDim { axis, blocks }, 2, device).to_i64();
        assert_eq!(part(1, 1, 0), [0, 1, 2, 3, 8, 9, 10, 11]);
        assert_eq!(part(1, 2, 1), [2, 3, 6, 7, 10, 11, 14, 15]);
        assert_eq!(part(0, 1, 1), (8..16).collect::<Vec<_>>());
        for cut in [SplitDim { axis: 0, blocks: 1 }, SplitDim { axis: 1, blocks: 1 }, SplitDim { axis: 1, blocks: 4 }] {
            let parts: Vec<Tensor> = (0..2).map(|device| part_of(&whole, cut, 2, device)).collect();
            assert_eq!(whole_of(&parts, cut), whole);
        }
    }

    #[test]
    fn an_axis_is_split_only_where_it_divides() {
        let fact = Fact::of(DType::F32, &[6, 0, 8]);
        let part = |axis, blocks, devices| {
            Sharding::Split(SplitDim { axis, blocks }).part(&fact, devices).map(|f| f.to_string())
        };
        assert_eq!(part(0, 1, 2).as_deref(), Some("f32[3, 0, 8]"));
        assert_eq!(part(0, 3, 2).as_deref(), Some("f32[3, 0, 8]"));
        assert_eq!((part(0, 2, 2), part(0, 1, 4), part(1, 1, 2), part(3, 1, 2)), (None, None, None, None));
        assert_eq!(Sharding::Partial.part(&fact, 4), Some(fact.clone()));
    }
}
