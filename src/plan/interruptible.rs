//! Planning on a thread of its own, so that the user can end it at any point with the best plan so far.

use crate::error::Error;
use crate::events::{Event, EventSink};
use crate::plan::request::PlanRequest;
use crate::plan::result::PlanResult;
use crate::plan::solve;
use compiler::partition::planned::Planned;
use compiler::plan::Plan;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Why a search is not complete.
pub const INTERRUPTED: &str = "the search was interrupted";

/// Time in which a search that was asked to end returns its own result.
const GRACE: Duration = Duration::from_millis(600);

/// How often requests to end are looked at.
const INTERVAL: Duration = Duration::from_millis(20);

/// As the stack of a main thread.
const STACK_BYTES: usize = 8 << 20;

/// Plans a model. If `events` asks to end, returns within a second: the best plan so far, or an error.
pub fn plan(request: &PlanRequest, events: &dyn EventSink) -> Result<PlanResult, Error> {
    let (sender, receiver) = channel();
    let signal = Arc::new(AtomicI32::new(0));
    let (request, mailbox) = (request.clone(), Mailbox { sender, signal: signal.clone() });
    let search = thread::Builder::new()
        .stack_size(STACK_BYTES)
        .spawn(move || solve::plan(&request, &mailbox))
        .map_err(|error| Error::input("cannot start a thread for the search").because(error))?;
    match receive(&receiver, &signal, events) {
        Received::End => search.join().unwrap_or_else(|panic| resume_unwind(panic)),
        // The thread ends with the process.
        Received::Best(best) => Ok(*best),
        Received::Nothing => {
            Err(Error::interrupted(signal.load(Ordering::Relaxed), format!("{INTERRUPTED} before it found a plan")))
        }
    }
}

enum Received {
    End,
    Best(Box<PlanResult>),
    Nothing,
}

/// Passes events on until the search has ended, or the user waits no longer.
fn receive(receiver: &Receiver<Message>, signal: &AtomicI32, events: &dyn EventSink) -> Received {
    let (mut best, mut since): (Option<Box<PlanResult>>, Option<Instant>) = (None, None);
    loop {
        if let Some(number) = events.stop_signal().filter(|_| since.is_none()) {
            signal.store(number, Ordering::Relaxed);
            since = Some(Instant::now());
        }
        if since.is_some_and(|since| since.elapsed() > GRACE) {
            events.event(Event::ProgressEnd);
            let Some(mut best) = best else { return Received::Nothing };
            mark_interrupted(&mut best.planned.plan);
            return Received::Best(best);
        }
        match receiver.recv_timeout(INTERVAL) {
            Ok(Message::Best(plan)) => best = Some(plan),
            Ok(message) => message.pass(events),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Received::End,
        }
    }
}

/// States in a plan that its search was interrupted. What was not searched has no bound.
pub fn mark_interrupted(plan: &mut Plan) {
    plan.search.fallback = Some(INTERRUPTED.to_string());
    plan.warnings.push(format!("{INTERRUPTED}: a better plan may exist"));
    (plan.lower_bound_us, plan.proven_optimal) = (0.0, false);
}

/// Events of a search, and its best plan so far.
enum Message {
    /// A text, and what sends it.
    Text(String, fn(&dyn EventSink, &str)),
    Progress {
        unit: String,
        done: u64,
        total: u64,
        message: String,
    },
    ProgressEnd,
    Best(Box<PlanResult>),
}

impl Message {
    fn pass(self, events: &dyn EventSink) {
        match self {
            Message::Text(text, send) => send(events, &text),
            Message::Progress { unit, done, total, message } => {
                events.event(Event::Progress { unit: &unit, done, total, message: &message });
            }
            Message::ProgressEnd => events.event(Event::ProgressEnd),
            Message::Best(_) => {}
        }
    }
}

struct Mailbox {
    sender: Sender<Message>,
    /// 0 until there is one.
    signal: Arc<AtomicI32>,
}

impl Mailbox {
    fn send(&self, message: Message) {
        // Nobody listens to a search that was left.
        let _ = self.sender.send(message);
    }
}

impl EventSink for Mailbox {
    fn event(&self, event: Event<'_>) {
        self.send(match event {
            Event::Note(text) => Message::Text(text.to_string(), |events, text| events.note(text)),
            Event::Warning(text) => Message::Text(text.to_string(), |events, text| events.warn(text)),
            Event::Detail(text) => Message::Text(text.to_string(), |events, text| events.detail(text)),
            Event::Progress { unit, done, total, message } => {
                Message::Progress { unit: unit.to_string(), done, total, message: message.to_string() }
            }
            Event::ProgressEnd => Message::ProgressEnd,
            // Planning trains nothing.
            Event::Step { .. } | Event::Planned(_) => return,
        });
    }

    fn stop_signal(&self) -> Option<i32> {
        Some(self.signal.load(Ordering::Relaxed)).filter(|signal| *signal != 0)
    }

    fn found(&self, plan: &dyn Fn() -> Option<(Planned, Option<String>)>) {
        let Some((planned, untrainable)) = plan() else { return };
        let (tried, alternative, too_large) = (Vec::new(), None, Vec::new());
        self.send(Message::Best(Box::new(PlanResult { planned, untrainable, tried, alternative, too_large })));
    }
}
