//! What a worker's arena holds while an op runs: scratch of its kernels, and the tensors that are alive within the run.
//!
//! A tensor that crosses a cut lies among messages and not in the arena, and so does its gradient. So an op that reads from outside its
//! stage alone has less in the arena, and one that is read outside it alone. Where a backward is split, what its second half reads of the
//! first is kept for it and lies there neither.

/// Where an op stands in its stage, together with those that join it. What a tensor of several readers is told of is a sum, whose terms
/// and result lie in the arena wherever its readers are: so only an op that alone reads what it reads can be first, and only one that
/// a single op reads can be last ([`Flows::ends`](crate::profile::cost_graph::Flows::ends)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaPosition {
    /// It reads tensors, none of them of its own stage.
    pub first: bool,
    /// It is read, by no op of its own stage.
    pub last: bool,
}

impl ArenaPosition {
    /// Every place.
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

/// Bytes of the tensors that are alive while an op runs, forward or backward, and that are neither saved nor parameters nor their
/// gradients; 0 where that is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Live {
    /// By place, where the backward is whole.
    pub whole: [u64; 4],
    /// By place, where it is split.
    pub split: [u64; 4],
}

impl Live {
    /// What is alive at moments of a whole and of a split backward, each with what of it comes from outside and goes there (see [`raise`]).
    pub fn of(whole: (u64, [u64; 2]), split: (u64, [u64; 2])) -> Live {
        let mut live = Live::default();
        raise(&mut live.whole, whole.0, whole.1);
        raise(&mut live.split, split.0, split.1);
        live
    }

    /// What is alive at a place, where the backward is split or not.
    pub fn at(&self, place: ArenaPosition, is_split: bool) -> u64 {
        if is_split { self.split[place.index()] } else { self.whole[place.index()] }
    }
}

/// Raises figures by place to what is alive at one moment: `bytes` in all, of which so many come from outside if the op is the first of
/// its stage, and so many go outside if it is the last.
pub fn raise(figures: &mut [u64; 4], bytes: u64, [comes, goes]: [u64; 2]) {
    for place in ArenaPosition::ALL {
        let elsewhere = if place.first { comes } else { 0 } + if place.last { goes } else { 0 };
        let figure = &mut figures[place.index()];
        *figure = (*figure).max(bytes.saturating_sub(elsewhere));
    }
}

/// How backwards run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Way {
    /// Gradients of several items are made at once: see [`joint`](crate::pass::batched_weight_grad).
    pub is_joint: bool,
    /// They are split in halves.
    pub is_split: bool,
}

impl Way {
    /// Every way.
    pub const ALL: [Way; 4] = [
        Way { is_joint: false, is_split: false },
        Way { is_joint: true, is_split: false },
        Way { is_joint: false, is_split: true },
        Way { is_joint: true, is_split: true },
    ];

    /// Its place among them.
    pub fn index(self) -> usize {
        usize::from(self.is_joint) + 2 * usize::from(self.is_split)
    }
}

/// Bytes of an arena in each way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Arena([u64; 4]);

impl Arena {
    /// Figures by way.
    pub fn by(bytes: impl Fn(Way) -> u64) -> Arena {
        Arena(Way::ALL.map(bytes))
    }

    /// So many in every way.
    pub fn always(bytes: u64) -> Arena {
        Arena([bytes; 4])
    }

    /// The bytes in one.
    pub fn of(self, way: Way) -> u64 {
        self.0[way.index()]
    }

    /// What holds either.
    pub fn max(self, other: Arena) -> Arena {
        Arena::by(|way| self.of(way).max(other.of(way)))
    }
}

/// The arena that an op needs, by its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    by_place: [Arena; 4],
}

impl Needs {
    /// Figures by place.
    pub fn by(arena: impl Fn(ArenaPosition) -> Arena) -> Needs {
        Needs { by_place: ArenaPosition::ALL.map(arena) }
    }

    /// Whether gradients of several items at once make a difference anywhere.
    pub fn differ_where_joint(&self) -> bool {
        let differs = |arena: &Arena| {
            [false, true].into_iter().any(|is_split| {
                let [alone, joint] = [false, true].map(|is_joint| arena.of(Way { is_joint, is_split }));
                alone != joint
            })
        };
        self.by_place.iter().any(differs)
    }

    /// What is needed at a place.
    pub fn at(&self, place: ArenaPosition) -> Arena {
        self.by_place[place.index()]
    }
}
