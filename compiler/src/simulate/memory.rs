//! Memory state of one stage on one worker during a simulation.

use std::collections::BTreeSet;

use crate::plan::StageId;
use crate::schedule::collective::CollectiveId;
use crate::schedule::{MicrobatchId, Token};

pub struct StageMemoryState {
    pub stage: StageId,
    /// Items between the start of their forward and the end of their backward.
    pub in_flight: u64,
    pub versions: u64,
    /// Gradient sums that are accumulating or wait for their step.
    pub gradients: u64,
    /// True if one of them is accumulating.
    pub summing: bool,
    /// Items accumulated in it.
    pub summed: u64,
    pub posted: u32,
    /// Posted buckets whose last backward has not run.
    pub due: Vec<(CollectiveId, Token)>,
    /// Items that are recomputed and wait for their backward.
    pub again: BTreeSet<MicrobatchId>,
}

impl StageMemoryState {
    pub fn new(stage: StageId) -> Self {
        Self {
            stage,
            in_flight: 0,
            versions: 1,
            gradients: 0,
            summing: false,
            summed: 0,
            posted: 0,
            due: Vec::new(),
            again: BTreeSet::new(),
        }
    }

    pub fn sum(&mut self) {
        self.gradients += u64::from(!self.summing);
        self.summing = true;
    }

    pub fn close_if(&mut self, is_whole: bool) {
        if is_whole {
            (self.summing, self.summed, self.posted) = (false, 0, 0);
        }
    }
}
