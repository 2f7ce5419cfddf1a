//! Tensor shardings over a tensor-parallel group, and the sharding strategies of ops.
//!
//! A tensor is replicated, split into equal shards along an axis, or partial (each device has a term of a sum). A
//! [`Strategy`] gives the required input shardings and the resulting output shardings of an op. Each device runs the op
//! itself on its shards, the op with divided sizes, or a few ops emitted by the op's rule. All devices run the same ops
//! (SPMD): only the results of [`Shard`] depend on the rank.
//!
//! A shard may consist of several blocks. A fused QKV projection has three blocks along its axis; with `blocks: 3`
//! every device owns a share of each, so that slicing out one block needs no communication.
//!
//! ```text
//! eight elements, two devices       blocks 1: 0 0 0 0 1 1 1 1        blocks 2: 0 0 1 1 0 0 1 1
//! ```

use crate::op::table::rule;
use crate::op::*;
use crate::tensor::element_count;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;

/// A split axis, divided into `blocks` equal blocks; each block is split evenly over the devices of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SplitDim {
    pub axis: usize,
    pub blocks: usize,
}

/// Distribution of a tensor over the devices of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Sharding {
    /// Every device has the full tensor.
    Replicated,
    /// Every device has an equal shard.
    Split(SplitDim),
    /// Every device has a term of full shape; their sum is the tensor.
    Partial,
}

/// `R`, `S1`, `S1/3` (three blocks) or `P`.
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
    pub fn split(axis: usize) -> Sharding {
        Sharding::Split(SplitDim { axis, blocks: 1 })
    }

    /// The local fact of a sharded tensor; `None` if the axis is not divisible, or for a partial sum of booleans.
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

/// A tensor-parallel group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    pub devices: usize,
    /// By axis size, the block counts besides 1 to consider for splitting it.
    pub blocks: BTreeMap<usize, Vec<usize>>,
}

impl Group {
    /// A group without block splits.
    pub fn of(devices: usize) -> Group {
        Group { devices, blocks: BTreeMap::new() }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Local {
    Same,
    Sized(Op),
    /// The ops emitted by [`OpRule::write_part`].
    Written,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Strategy {
    pub inputs: Vec<Sharding>,
    pub outputs: Vec<Sharding>,
    pub local: Local,
    /// The op is invariant to a permutation of the split axes that is common to all tensors, so that block splits are
    /// valid too.
    pub any_order: bool,
}

impl Strategy {
    pub fn replicated(inputs: usize, outputs: usize) -> Strategy {
        let (inputs, outputs) = (vec![Sharding::Replicated; inputs], vec![Sharding::Replicated; outputs]);
        Strategy { inputs, outputs, local: Local::Same, any_order: false }
    }

    /// Splits each tensor along the given axis. Inputs without an axis are replicated, outputs without one are partial
    /// sums.
    pub fn along(inputs: &[Option<usize>], outputs: &[Option<usize>]) -> Strategy {
        let layouts = |axes: &[Option<usize>], without: Sharding| -> Vec<Sharding> {
            axes.iter().map(|axis| axis.map_or(without, Sharding::split)).collect()
        };
        let (inputs, outputs) = (layouts(inputs, Sharding::Replicated), layouts(outputs, Sharding::Partial));
        Strategy { inputs, outputs, local: Local::Same, any_order: true }
    }

    /// For an op that is linear in the marked inputs together: partial inputs give partial outputs.
    pub fn linear(terms: &[bool], outputs: usize) -> Strategy {
        let layout = |term: &bool| if *term { Sharding::Partial } else { Sharding::Replicated };
        let (inputs, outputs) = (terms.iter().map(layout).collect(), vec![Sharding::Partial; outputs]);
        Strategy { inputs, outputs, local: Local::Same, any_order: false }
    }

    pub fn sized(self, op: Op) -> Strategy {
        Strategy { local: Local::Sized(op), ..self }
    }

    /// The same strategy with local ops from the rule, which depend on the element index.
    pub fn written(self) -> Strategy {
        Strategy { local: Local::Written, any_order: false, ..self }
    }

    fn in_blocks(&self, blocks: usize) -> Strategy {
        let cut = |layout: &Sharding| match layout {
            Sharding::Split(cut) => Sharding::Split(SplitDim { blocks, ..*cut }),
            other => *other,
        };
        let (inputs, outputs) = (self.inputs.iter().map(cut).collect(), self.outputs.iter().map(cut).collect());
        Strategy { inputs, outputs, ..self.clone() }
    }

    fn fits(&self, inputs: &[&Fact], outputs: &[Fact], devices: usize) -> bool {
        let facts = inputs.iter().copied().chain(outputs);
        self.inputs.iter().chain(&self.outputs).zip(facts).all(|(layout, fact)| layout.part(fact, devices).is_some())
    }
}

/// All strategies of an op at fixed sizes, full replication first.
pub fn strategies(op: &Op, inputs: &[&Fact], outputs: &[Fact], group: &Group) -> Vec<Strategy> {
    let mut list = vec![Strategy::replicated(inputs.len(), outputs.len())];
    for strategy in rule(op).strategies(inputs, outputs, group) {
        let mut ways = vec![strategy.clone()];
        if strategy.any_order {
            let facts = inputs.iter().copied().chain(outputs);
            let split = strategy.inputs.iter().chain(&strategy.outputs).zip(facts).find_map(|pair| match pair {
                (Sharding::Split(cut), fact) => size(fact, cut.axis),
                _ => None,
            });
            let blocks = split.and_then(|size| group.blocks.get(&size)).into_iter().flatten();
            ways.extend(blocks.map(|&blocks| strategy.in_blocks(blocks)));
        }
        for way in ways {
            if way.fits(inputs, outputs, group.devices) && !list.contains(&way) {
                list.push(way);
            }
        }
    }
    list
}

pub(crate) fn size(fact: &Fact, axis: usize) -> Option<usize> {
    usize::try_from(fact.shape.get(axis)?.known()?).ok()
}

/// The context in which a rule emits the local ops of a device.
pub struct LocalContext<'a> {
    pub inputs: &'a [Expr<'a>],
    /// Facts of the full inputs.
    pub whole: &'a [&'a Fact],
    pub devices: usize,
}

/// Emits the local ops of a strategy, from the local inputs and the facts of the full ones.
pub fn write(
    op: &Op,
    strategy: &Strategy,
    inputs: &[Value],
    whole: &[&Fact],
    devices: usize,
    out: &mut dyn Emit,
) -> Vec<Value> {
    match &strategy.local {
        Local::Same => out.emit_all(op.clone(), inputs),
        Local::Sized(sized) => out.emit_all(sized.clone(), inputs),
        Local::Written => {
            let builder = RefCell::new(out);
            let context = LocalContext { inputs: &Expr::list(inputs, &builder), whole, devices };
            expr::values(&rule(op).write_part(strategy, &context))
        }
    }
}

/// One device's shard of a tensor. The axis must be divisible.
pub fn part_of(whole: &Tensor, cut: SplitDim, devices: usize, device: usize) -> Tensor {
    let mut shape = whole.shape().to_vec();
    shape[cut.axis] /= devices;
    let (outer, run) = runs(&shape, cut, whole.dtype());
    let bytes = (0..outer).flat_map(|o| &whole.bytes()[(o * devices + device) * run..(o * devices + device + 1) * run]);
    let bytes: Vec<u8> = bytes.copied().collect();
    Tensor::new(whole.dtype(), shape, bytes.into()).expect("the axis is divided into equal shards")
}

/// Concatenates shards, in device order, to the full tensor.
pub fn whole_of(parts: &[Tensor], cut: SplitDim) -> Tensor {
    let (outer, run) = runs(parts[0].shape(), cut, parts[0].dtype());
    let mut bytes = Vec::with_capacity(outer * run * parts.len());
    for o in 0..outer {
        parts.iter().for_each(|part| bytes.extend_from_slice(&part.bytes()[o * run..(o + 1) * run]));
    }
    let mut shape = parts[0].shape().to_vec();
    shape[cut.axis] *= parts.len();
    Tensor::new(parts[0].dtype(), shape, bytes.into()).expect("shards of one shape")
}

/// Number of contiguous runs in a shard, and the bytes of each.
pub fn runs(part: &[usize], cut: SplitDim, dtype: DType) -> (usize, usize) {
    let outer = part[..cut.axis].iter().product::<usize>() * cut.blocks;
    let elements = element_count(part).expect("a shard is smaller than its tensor");
    (outer, elements.checked_div(outer).unwrap_or(0) * dtype.size())
}

/// Strategies of an elementwise op with broadcasting.
pub(crate) fn elementwise(inputs: &[&Fact], output: &Fact) -> Vec<Strategy> {
    let aligned = |input: &Fact, axis: usize| {
        let input_axis = (axis + input.rank()).checked_sub(output.rank())?;
        (!input.shape[input_axis].is(1)).then_some(input_axis)
    };
    let axes = (0..output.rank()).filter(|axis| !output.shape[*axis].is(1));
    axes.map(|axis| {
        let inputs: Vec<Option<usize>> = inputs.iter().map(|input| aligned(input, axis)).collect();
        Strategy::along(&inputs, &[Some(axis)])
    })
    .collect()
}

/// Strategies of an op that is independent along all axes except `used`: its first input and all outputs split along
/// any other axis.
pub(crate) fn all_but(fact: &Fact, used: &[usize], outputs: usize) -> Vec<Strategy> {
    let axes = (0..fact.rank()).filter(|axis| !used.contains(axis));
    axes.map(|axis| Strategy::along(&[Some(axis)], &vec![Some(axis); outputs])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_in_blocks_are_joined_again() {
        let tensor = Tensor::from_i64(&[2, 8], &(0..16).collect::<Vec<_>>());
        let part = |axis, blocks, device| part_of(&tensor, SplitDim { axis, blocks }, 2, device).to_i64();
        assert_eq!(part(1, 1, 0), [0, 1, 2, 3, 8, 9, 10, 11]);
        assert_eq!(part(1, 2, 1), [2, 3, 6, 7, 10, 11, 14, 15]);
        assert_eq!(part(0, 1, 1), (8..16).collect::<Vec<_>>());
        for cut in [SplitDim { axis: 0, blocks: 1 }, SplitDim { axis: 1, blocks: 1 }, SplitDim { axis: 1, blocks: 4 }] {
            let parts: Vec<Tensor> = (0..2).map(|device| part_of(&tensor, cut, 2, device)).collect();
            assert_eq!(whole_of(&parts, cut), tensor);
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
