//! The minibatches after which a run writes a checkpoint.

/// After which minibatches a run is cut: every so many, or as soon behind as rounds end at every stage; and at its end, or where rounds
/// last end at every stage in front of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cuts {
    /// Minibatches between two cuts, at least 1; nothing where the only one is at the end.
    pub every: Option<u32>,
    /// Minibatches between two places where rounds end at every stage.
    pub period: u32,
    /// Minibatches of the whole run.
    pub whole: u32,
}

impl Cuts {
    /// The first cut behind so many minibatches; nothing where the run ends before.
    pub fn after(&self, minibatches: u32) -> Option<u32> {
        let regular = self.every.and_then(|every| {
            let every = every.max(1);
            // Multiples in front of that place may be cut behind it.
            let first = (minibatches.saturating_sub(self.period) / every).max(1);
            let cuts = (first..).map_while(|count| up(count.checked_mul(every)?, self.period));
            cuts.take_while(|cut| *cut <= self.whole).find(|cut| *cut > minibatches)
        });
        regular.or(Some(self.last()).filter(|last| *last > minibatches))
    }

    /// The last cut; 0 where the run ends before rounds have ended at every stage.
    pub fn last(&self) -> u32 {
        self.whole - self.whole % self.period.max(1)
    }

    /// Whether there is a cut after so many minibatches.
    pub fn is_at(&self, minibatches: u32) -> bool {
        minibatches > 0 && self.after(minibatches - 1) == Some(minibatches)
    }
}

/// The next multiple of a period.
pub fn up(minibatches: u32, period: u32) -> Option<u32> {
    minibatches.div_ceil(period.max(1)).checked_mul(period.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_lie_where_rounds_end() {
        let all = |every: Option<u32>, period, whole| {
            let cuts = Cuts { every, period, whole };
            let found: Vec<u32> = (1..=whole).filter(|at| cuts.is_at(*at)).collect();
            // One after the other from anywhere is the same.
            for from in 0..whole {
                assert_eq!(
                    cuts.after(from),
                    found.iter().copied().find(|cut| *cut > from),
                    "{every:?} {period} {from}"
                );
            }
            found
        };
        assert_eq!(all(Some(3), 1, 12), [3, 6, 9, 12]);
        assert_eq!(all(Some(3), 2, 13), [4, 6, 10, 12]);
        assert_eq!(all(Some(1), 4, 11), [4, 8]);
        assert_eq!(Cuts { every: Some(u32::MAX), period: 7, whole: u32::MAX }.after(u32::MAX), None);
        // The end is cut, too, once.
        assert_eq!(all(Some(3), 1, 13), [3, 6, 9, 12, 13]);
        assert_eq!(all(Some(9), 2, 15), [10, 14]);
        assert_eq!(all(Some(5), 4, 7), [4]);
        assert_eq!(all(None, 1, 12), [12]);
        assert_eq!(all(None, 4, 11), [8]);
        assert_eq!(all(None, 4, 3), [0u32; 0]);
    }
}
