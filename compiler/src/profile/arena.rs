//! Arena memory of a worker while an op runs: kernel scratch plus the tensors alive at that time.
//!
//! Tensors that cross a cut, and their gradients, are in message buffers instead of the arena. So an op with inputs
//! only from other stages needs less arena memory, and so does one whose outputs are only read by other stages. With
//! split backwards, tensors kept for the weight-gradient pass are outside the arena too.

/// Position of a (fused) op in its stage. The gradient of a tensor with several readers is a sum, whose terms and
/// result are in the arena regardless of the readers' stages. So `first` requires that the op is the only reader of its
/// inputs, and `last` that its outputs have a single reader ([`Flows::ends`](crate::profile::cost_graph::Flows::ends)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaPosition {
    /// All its inputs come from other stages, and there is at least one.
    pub first: bool,
    /// All its readers are in other stages, and there is at least one.
    pub last: bool,
}

impl ArenaPosition {
    pub const ALL: [ArenaPosition; 4] = [
        ArenaPosition { first: false, last: false },
        ArenaPosition { first: true, last: false },
        ArenaPosition { first: false, last: true },
        ArenaPosition { first: true, last: true },
    ];

    fn index(self) -> usize {
        usize::from(self.first) + 2 * usize::from(self.last)
    }
}

/// Bytes alive while an op runs forward or backward, excluding saved tensors, parameters and their gradients; 0 if
/// unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Live {
    /// For a whole backward, by position.
    pub whole: [u64; 4],
    /// For a split backward, by position.
    pub split: [u64; 4],
}

impl Live {
    /// Combines a moment of a whole and one of a split backward; each with the bytes that come from and go to other ops
    /// (see [`raise`]).
    pub fn of(whole: (u64, [u64; 2]), split: (u64, [u64; 2])) -> Live {
        let mut live = Live::default();
        raise(&mut live.whole, whole.0, whole.1);
        raise(&mut live.split, split.0, split.1);
        live
    }

    pub fn at(&self, position: ArenaPosition, is_split: bool) -> u64 {
        if is_split { self.split[position.index()] } else { self.whole[position.index()] }
    }
}

/// Raises the figures of each position to the bytes alive at one moment: `bytes` in total, less `incoming` if the op is
/// first in its stage, less `outgoing` if it is last.
pub fn raise(peaks: &mut [u64; 4], bytes: u64, [incoming, outgoing]: [u64; 2]) {
    for position in ArenaPosition::ALL {
        let external = if position.first { incoming } else { 0 } + if position.last { outgoing } else { 0 };
        let peak = &mut peaks[position.index()];
        *peak = (*peak).max(bytes.saturating_sub(external));
    }
}

/// Variant of the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Way {
    /// Weight gradients of several micro-batches are computed together, see
    /// [`batched_weight_grad`](crate::pass::batched_weight_grad).
    pub is_joint: bool,
    /// Input gradients and weight gradients are separate passes.
    pub is_split: bool,
}

impl Way {
    pub const ALL: [Way; 4] = [
        Way { is_joint: false, is_split: false },
        Way { is_joint: true, is_split: false },
        Way { is_joint: false, is_split: true },
        Way { is_joint: true, is_split: true },
    ];

    pub fn index(self) -> usize {
        usize::from(self.is_joint) + 2 * usize::from(self.is_split)
    }
}

/// Arena bytes by backward variant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Arena([u64; 4]);

impl Arena {
    pub fn by(bytes: impl Fn(Way) -> u64) -> Arena {
        Arena(Way::ALL.map(bytes))
    }

    /// The same size in every variant.
    pub fn always(bytes: u64) -> Arena {
        Arena([bytes; 4])
    }

    pub fn of(self, way: Way) -> u64 {
        self.0[way.index()]
    }

    /// Element-wise maximum.
    pub fn max(self, other: Arena) -> Arena {
        Arena::by(|way| self.of(way).max(other.of(way)))
    }
}

/// Arena needs of an op by position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    by_place: [Arena; 4],
}

impl Needs {
    pub fn by(arena: impl Fn(ArenaPosition) -> Arena) -> Needs {
        Needs { by_place: ArenaPosition::ALL.map(arena) }
    }

    /// Returns whether batched weight gradients change any figure.
    pub fn differ_where_joint(&self) -> bool {
        let differs = |arena: &Arena| {
            [false, true].into_iter().any(|is_split| {
                let [alone, joint] = [false, true].map(|is_joint| arena.of(Way { is_joint, is_split }));
                alone != joint
            })
        };
        self.by_place.iter().any(differs)
    }

    pub fn at(&self, position: ArenaPosition) -> Arena {
        self.by_place[position.index()]
    }
}
