//! The minibatches after which a run writes a checkpoint.

/// Checkpoint positions: after every `every` minibatches, or at the next point where all stages finish a round; and at
/// the last such point of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cuts {
    /// Minibatches between checkpoints, at least 1; `None` only checkpoints at the end.
    pub every: Option<u32>,
    /// Interval of the points where all stages finish a round, in minibatches.
    pub period: u32,
    pub minibatches: u32,
}

impl Cuts {
    /// The first checkpoint after `minibatches`; `None` if the run ends before one.
    pub fn after(&self, minibatches: u32) -> Option<u32> {
        let regular = self.every.and_then(|every| {
            let every = every.max(1);
            // Earlier multiples of `every` may be delayed past `minibatches`.
            let first = (minibatches.saturating_sub(self.period) / every).max(1);
            let cuts = (first..).map_while(|count| round_up(count.checked_mul(every)?, self.period));
            cuts.take_while(|cut| *cut <= self.minibatches).find(|cut| *cut > minibatches)
        });
        regular.or(Some(self.last()).filter(|last| *last > minibatches))
    }

    /// The last checkpoint; 0 if the run ends before the first point where all stages finish a round.
    pub fn last(&self) -> u32 {
        self.minibatches - self.minibatches % self.period.max(1)
    }

    /// True if there is a checkpoint after `minibatches`.
    pub fn is_at(&self, minibatches: u32) -> bool {
        minibatches > 0 && self.after(minibatches - 1) == Some(minibatches)
    }
}

/// Rounds up to a multiple of `period`; `None` on overflow.
pub fn round_up(minibatches: u32, period: u32) -> Option<u32> {
    minibatches.div_ceil(period.max(1)).checked_mul(period.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_lie_where_rounds_end() {
        let points = |every: Option<u32>, period, minibatches| {
            let cuts = Cuts { every, period, minibatches };
            let positions: Vec<u32> = (1..=minibatches).filter(|position| cuts.is_at(*position)).collect();
            // `after` agrees from any start.
            for from in 0..minibatches {
                assert_eq!(
                    cuts.after(from),
                    positions.iter().copied().find(|cut| *cut > from),
                    "{every:?} {period} {from}"
                );
            }
            positions
        };
        assert_eq!(points(Some(3), 1, 12), [3, 6, 9, 12]);
        assert_eq!(points(Some(3), 2, 13), [4, 6, 10, 12]);
        assert_eq!(points(Some(1), 4, 11), [4, 8]);
        assert_eq!(Cuts { every: Some(u32::MAX), period: 7, minibatches: u32::MAX }.after(u32::MAX), None);
        // The end is a checkpoint too, once.
        assert_eq!(points(Some(3), 1, 13), [3, 6, 9, 12, 13]);
        assert_eq!(points(Some(9), 2, 15), [10, 14]);
        assert_eq!(points(Some(5), 4, 7), [4]);
        assert_eq!(points(None, 1, 12), [12]);
        assert_eq!(points(None, 4, 11), [8]);
        assert_eq!(points(None, 4, 3), [0u32; 0]);
    }
}
