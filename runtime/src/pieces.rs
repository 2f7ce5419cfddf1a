//! A backward whose gradients leave as they are made (ZeRO 2).
//!
//! The sum of a term has room from the first step that looks at it to the last; then it is added to the shares of its owners and let go.
//! A gradient that no kernel adds, because it lies somewhere else too, is added when the run is over.

use crate::buffer::{Buffer, Ledger};
use crate::compile::StageCode;
use crate::execute::{Item, Sum};
use crate::link::rendezvous::Abandoned;
use crate::share::Share;
use crate::shelf::{Shelf, Term};
use crate::stepper::wide;
use crate::steps::{Sequence, Slot, Step};
use std::sync::Arc;

/// Which of a stage's backward runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Backward, or the first part of it.
    Backward,
    /// The second part.
    Weight,
}

impl Run {
    /// Its steps.
    pub fn of(self, code: &StageCode) -> &Sequence {
        match self {
            Run::Backward => &code.backward,
            Run::Weight => &code.weight,
        }
    }
}

/// Where an item stands among those that add to the same sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// The round.
    pub round: u32,
    /// Items of the round before it.
    pub before: u32,
}

/// By step, the terms whose sums begin there, and those that end.
type Moments = Vec<[Vec<usize>; 2]>;

/// What a stage's replicas do between its steps.
pub struct Pieces {
    shelf: Arc<Shelf>,
    share: Share,
    backward: Moments,
    weight: Moments,
}

impl Pieces {
    /// For a stage whose parameters are dealt out so.
    pub fn new(code: &StageCode, share: Share, shelf: Arc<Shelf>) -> Pieces {
        let (backward, weight) = (moments(code, &share, &code.backward), moments(code, &share, &code.weight));
        Pieces { shelf, share, backward, weight }
    }

    /// This replica has room for the sums of rounds up to this one.
    pub fn open(&self, round: u32) {
        self.shelf.open(self.share.replica(), round);
    }

    /// Whether a term of this parameter goes to the shares of its owners.
    pub fn takes(&self, parameter: usize) -> bool {
        self.share.deals(parameter)
    }

    fn of(&self, run: Run) -> &[[Vec<usize>; 2]] {
        match run {
            Run::Backward => &self.backward,
            Run::Weight => &self.weight,
        }
    }

    /// Whether anything is to be done between the steps of a run.
    pub fn has(&self, run: Run) -> bool {
        self.of(run).iter().any(|[begin, end]| !begin.is_empty() || !end.is_empty())
    }

    /// Makes room for the sums that begin with a step.
    pub fn before(&self, code: &StageCode, run: Run, step: usize, item: &mut Item, ledger: &Arc<Ledger>) {
        for &term in &self.of(run)[step][0] {
            let at = &code.gradient_terms[term];
            let dtype = code.parameters[at.parameter].fact.dtype;
            let mut room = Buffer::new(at.place.bytes / dtype.size() * wide(dtype).size());
            room.count_in(ledger);
            item.sums[term] = Some(Sum { buffer: Arc::new(room), is_begun: false });
        }
    }

    /// Adds the sums that end with a step to those of their owners. Waits for the items before this one.
    pub fn after(&self, code: &StageCode, run: Run, step: usize, item: &mut Item) -> Result<(), Abandoned> {
        for &term in &self.of(run)[step][1] {
            if let Some(made) = item.sums[term].take() {
                self.add(code, term, item.turn, made.buffer.bytes())?;
            }
        }
        Ok(())
    }

    /// Adds what an item has made of a term, in the type of sums.
    pub fn add(&self, code: &StageCode, term: usize, turn: Turn, made: &[u8]) -> Result<(), Abandoned> {
        let parameter = code.gradient_terms[term].parameter;
        let of = (parameter, code.parameters[parameter].fact.dtype);
        self.shelf.add(Term { round: turn.round, term }, turn.before, made, of, &self.share)
    }

    /// Takes this replica's share of the sum of a term.
    pub fn sum(&self, round: u32, term: usize) -> Option<Arc<Buffer>> {
        self.shelf.take(Term { round, term }, self.share.replica()).map(Arc::new)
    }
}

/// The first and the last step that looks at each term's sum.
fn moments(code: &StageCode, share: &Share, sequence: &Sequence) -> Moments {
    let mut moments: Moments = sequence.steps.iter().map(|_| [Vec::new(), Vec::new()]).collect();
    for (term, at) in code.gradient_terms.iter().enumerate() {
        if !at.is_summed || !share.deals(at.parameter) {
            continue;
        }
        let looks = |step: &&Step| looks(step, term);
        let first = sequence.steps.iter().position(|step| looks(&step));
        let last = sequence.steps.iter().rposition(|step| looks(&step));
        if let (Some(first), Some(last)) = (first, last) {
            moments[first][0].push(term);
            moments[last][1].push(term);
        }
    }
    moments
}

fn looks(step: &Step, term: usize) -> bool {
    let is_there = |slot: Slot| match slot {
        Slot::Sum(of) | Slot::Gradient { term: of, .. } => of == term,
        _ => false,
    };
    let places = step.inputs.iter().chain(&step.outputs).any(|place| is_there(place.slot));
    places || step.adds_to.contains(&term) || step.terms.contains(&term)
}
