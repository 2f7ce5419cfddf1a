//! Events of a request while it runs: notes, warnings, progress.

use compiler::partition::planned::Planned;
use compiler::plan::Plan;

/// Something that happened while a request runs.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// Additional information: a default that was chosen, a file that was written.
    Note(&'a str),
    /// A likely mistake, or a result that needs care.
    Warning(&'a str),
    /// Information for debugging.
    Detail(&'a str),
    /// `done` of `total` units are done.
    Progress {
        /// The unit, in the plural: `combinations`, `steps`.
        unit: &'a str,
        /// Finished units.
        done: u64,
        /// All units.
        total: u64,
        /// The unit in progress, or the latest result.
        message: &'a str,
    },
    /// One minibatch of training is done.
    Step {
        /// The number of the minibatch, from 1 on.
        step: u64,
        /// Minibatches in all.
        total: u64,
        loss: f64,
        /// Samples per second since the run began.
        samples_per_s: f64,
    },
    /// Training made its own plan.
    Planned(&'a Plan),
    /// The work that reported progress has ended.
    ProgressEnd,
}

/// Receives the events of a request.
pub trait EventSink {
    /// Called for each event, in order, on the thread that made the request.
    fn event(&self, event: Event<'_>);

    /// The signal by which the user asks the request to end early, with the best result so far. Only searches look at it.
    fn stop_signal(&self) -> Option<i32> {
        None
    }

    /// True if the user asks the request to end early.
    fn stops(&self) -> bool {
        self.stop_signal().is_some()
    }

    /// Called when a search has a better plan. `plan` makes it, with the reason why the runtime cannot train it, if there
    /// is one.
    fn found(&self, _plan: &dyn Fn() -> Option<(Planned, Option<String>)>) {}
}

impl dyn EventSink + '_ {
    /// Sends a note.
    pub fn note(&self, text: &str) {
        self.event(Event::Note(text));
    }

    /// Sends a warning.
    pub fn warn(&self, text: &str) {
        self.event(Event::Warning(text));
    }

    /// Sends a detail.
    pub fn detail(&self, text: &str) {
        self.event(Event::Detail(text));
    }
}

/// Drops every event.
pub struct Silent;

impl EventSink for Silent {
    fn event(&self, _: Event<'_>) {}
}
