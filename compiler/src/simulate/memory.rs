//! What a worker holds of one of its stages while a program is played.

use std::collections::BTreeSet;

use crate::plan::StageId;
use crate::schedule::collective::Meeting;
use crate::schedule::{MicrobatchId, Token};

/// Items, weights and gradients of one stage.
pub struct Holding {
    /// The stage.
    pub stage: StageId,
    /// Items between their forward and the end of their backward.
    pub in_flight: u64,
    /// Weight versions.
    pub versions: u64,
    /// Gradients that are being summed or wait for their step.
    pub gradients: u64,
    /// Whether one of them is being summed.
    pub summing: bool,
    /// Items whose gradients of weights are in it.
    pub summed: u64,
    /// Buckets of it that are posted.
    pub posted: u32,
    /// Those of them that a backward is yet to make.
    pub due: Vec<(Meeting, Token)>,
    /// Items whose forward has run again and whose backward has not begun.
    pub again: BTreeSet<MicrobatchId>,
}

impl Holding {
    /// The first version of the stage's weights.
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

    /// Gradients of weights are being summed.
    pub fn sum(&mut self) {
        self.gradients += u64::from(!self.summing);
        self.summing = true;
    }

    /// If they are whole, others are summed from here on.
    pub fn close_if(&mut self, is_whole: bool) {
        if is_whole {
            (self.summing, self.summed, self.posted) = (false, 0, 0);
        }
    }
}
