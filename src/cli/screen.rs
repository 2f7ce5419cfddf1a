//! What the user sees: results on standard output, the rest on standard error.
//!
//! Text from files may hold escape codes, so everything passes through [`clean`] on its way out; JSON keeps the characters, as
//! `\u` escapes. A reader that closes the pipe (`| head`) ends the printing and nothing else.

use crate::cli::args::{Format, Global};
use crate::cli::color;
use crate::cli::color::{Stream, painted};
use crate::cli::prediction;
use crate::cli::render_error;
use crate::cli::stage_table;
use crate::cli::table;
use clap::builder::StyledStr;
use comfy_table::Table;
use compiler::export::quantity;
use compiler::import::onnx::name::display_name;
use compiler::plan::Plan;
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use pipec::error::Error;
use pipec::events::{Event, EventSink};
use serde_json::Value;
use std::cell::{Cell, RefCell};
use std::env;
use std::fmt;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::time::{Duration, Instant};

/// How often a training run reports a step where no terminal shows a progress bar.
const REPORT: Duration = Duration::from_secs(10);

/// Characters of a line of help that are read well.
const READ: usize = 100;

/// Who reads of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// Text is for people.
    Person,
    /// JSON is for programs.
    Program,
}

/// Where a verb prints.
pub struct Screen {
    format: Format,
    reader: Reader,
    quiet: u8,
    verbose: u8,
    /// Set when nobody reads our results any more.
    closed: Cell<bool>,
    fault: RefCell<Option<io::Error>>,
    /// The progress bar of the request that runs.
    bar: RefCell<Option<ProgressBar>>,
    /// When the last step of training was reported without a terminal.
    reported: Cell<Option<Instant>>,
}

impl Screen {
    /// As the global flags say.
    pub fn new(global: &Global, reader: Reader) -> Screen {
        Screen {
            format: global.format,
            reader,
            quiet: global.quiet,
            verbose: global.verbose,
            closed: Cell::new(false),
            fault: RefCell::new(None),
            bar: RefCell::new(None),
            reported: Cell::new(None),
        }
    }

    /// Prints a piece of the result, in text form only.
    pub fn text(&self, text: &str) {
        if self.format == Format::Text {
            self.write(&painted(&clean(text), Stream::Out));
        }
    }

    /// Prints the whole result, in JSON form only.
    pub fn json(&self, value: &Value) {
        if self.format == Format::Json {
            let text = serde_json::to_string_pretty(value).unwrap_or_default();
            self.write(&escaped(&text));
        }
    }

    /// Prints a file of ours as the whole result, in JSON form only: with the bytes that it has.
    pub fn json_file(&self, text: &str) {
        if self.format == Format::Json {
            self.write(&escaped(text));
        }
    }

    /// Prints a document whose bytes are the same in either form: a schema, a plan.
    pub fn document(&self, text: &str) {
        self.write(text);
    }

    /// Prints text as it is, in text form only: a script.
    pub fn verbatim(&self, text: &str) {
        if self.format == Format::Text {
            self.write(text);
        }
    }

    /// Says what may be done next, in text form only, unless `-qq`.
    pub fn next(&self, text: &str) {
        if self.quiet < 2 {
            self.text(text);
        }
    }

    /// Says something beside the result, unless `-q`.
    pub fn note(&self, text: &str) {
        if self.quiet == 0 {
            complain(text);
        }
    }

    /// Says something that only `-v` wants to know.
    pub fn detail(&self, text: &str) {
        if self.verbose > 0 && self.quiet == 0 {
            complain(text);
        }
    }

    /// Warns, unless `-qq`.
    pub fn warn(&self, text: &str) {
        if self.quiet < 2 {
            complain(&format!("warning: {text}"));
        }
    }

    /// A progress bar of `length` steps on standard error: visible on a terminal only, and not under `-q`.
    pub fn progress(&self, length: u64, template: &str) -> ProgressBar {
        let shows = self.quiet == 0 && io::stderr().is_terminal();
        let target = if shows { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        // Bars have colours of their own only where the rest has.
        let template =
            if color::on(Stream::Err) { template.replace("{bar:30}", "{bar:30.green}") } else { template.to_string() };
        let style = ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
        // Templates end in what is at hand; until something is, nothing hangs behind their comma.
        let style = style.with_key("left", left);
        ProgressBar::with_draw_target(Some(length), target).with_style(style).with_message("…")
    }

    /// Says something while a bar runs: above it on a terminal, else as a note.
    pub fn beside(&self, bar: &ProgressBar, text: &str) {
        match bar.is_hidden() {
            true => self.note(text),
            false => bar.println(painted(&clean(text), Stream::Err)),
        }
    }

    /// Fails if a result could not be written, other than by a reader that went away.
    pub fn finish(&self) -> Result<(), Error> {
        match self.fault.take() {
            None => Ok(()),
            Some(fault) => Err(Error::input("cannot write the result to standard output").because(fault)),
        }
    }

    fn write(&self, text: &str) {
        if self.closed.get() {
            return;
        }
        if let Err(fault) = print(text) {
            self.closed.set(true);
            if fault.kind() != ErrorKind::BrokenPipe {
                self.fault.replace(Some(fault));
            }
        }
    }

    /// Characters in a line of the terminal that results go to, if they go to one.
    pub fn width(&self) -> Option<usize> {
        width()
    }

    /// Prints prose, a piece of the result, in text form only.
    pub fn prose(&self, text: &str) {
        self.text(&self.folded(text));
    }

    /// Prose in lines of the terminal's width, if there is one.
    pub fn folded(&self, text: &str) -> String {
        table::folded(text, self.width())
    }

    /// Prints text whose lines would make no sense broken: on a terminal they end at its width.
    pub fn wide(&self, text: &str) {
        match self.width() {
            Some(width) => self.text(&cut(text, width)),
            None => self.text(text),
        }
    }

    /// Prints help or the version, before there is a screen.
    pub fn print(text: &StyledStr) {
        let text = if color::on(Stream::Out) { text.ansi().to_string() } else { clean(&text.to_string()) };
        // Nobody is left to tell when even help cannot be printed.
        let _ = print(&table::folded(&text, width().map(|width| width.min(READ))));
    }

    /// Prints to standard error before there is a screen.
    pub fn complain(text: &str) {
        complain(text);
    }

    /// Who reads of the failures of this run.
    pub fn reader(&self) -> Reader {
        self.reader
    }

    /// Prints a failure.
    pub fn failure(failure: &Error, reader: Reader) {
        match reader {
            Reader::Program => _ = writeln!(io::stderr().lock(), "{}", escaped(&render_error::json(failure))),
            Reader::Person => complain(&failure.to_string()),
        }
    }
}

impl Screen {
    /// The bar of the request that runs.
    fn bar(&self, unit: &str, total: u64) -> ProgressBar {
        let template = match unit {
            "kernels" => "profiling {bar:30} {pos}/{len} {wide_msg}",
            "steps" => "{bar:30} {pos}/{len} steps, {left}, {msg}",
            _ => "{bar:30} {pos}/{len} combinations, {elapsed}, {msg}",
        };
        self.bar.borrow_mut().get_or_insert_with(|| self.progress(total, template)).clone()
    }

    /// Reports a step of training: on the bar, and every ten seconds as a line where no terminal shows the bar.
    fn step(&self, step: u64, total: u64, loss: f64, samples_per_s: f64) {
        let bar = self.bar("steps", total);
        bar.set_message(format!("loss {loss:.4}"));
        bar.set_position(step);
        let last = self.reported.get().unwrap_or_else(Instant::now);
        if !io::stderr().is_terminal() && last.elapsed() >= REPORT {
            self.note(&format!(
                "step {step} of {total}: loss {loss:.4}, {} samples/s",
                quantity::samples(samples_per_s)
            ));
            self.reported.set(Some(Instant::now()));
        } else {
            self.reported.set(Some(last));
        }
    }

    /// Reports the plan that training made for itself.
    fn planned(&self, plan: &Plan) {
        self.note(&format!("planned on analytic costs of a CPU\n{}", stage_table::stages(plan, self.width())));
        plan.warnings.iter().for_each(|warning| self.warn(warning));
        if let Some(shared) = prediction::shared(plan) {
            self.note(&shared);
        }
    }
}

impl EventSink for Screen {
    fn event(&self, event: Event<'_>) {
        match event {
            Event::Note(text) => self.note(text),
            Event::Warning(text) => self.warn(text),
            Event::Detail(text) => self.detail(text),
            Event::Progress { unit, done, total, message } => {
                let bar = self.bar(unit, total);
                bar.set_position(done);
                if !message.is_empty() {
                    bar.set_message(message.to_string());
                }
                if unit == "steps" {
                    self.reported.set(Some(Instant::now()));
                }
            }
            Event::Step { step, total, loss, samples_per_s } => self.step(step, total, loss, samples_per_s),
            Event::Planned(plan) => self.planned(plan),
            Event::ProgressEnd => {
                if let Some(bar) = self.bar.take() {
                    bar.finish_and_clear();
                }
            }
        }
    }
}

/// Characters in a line of the terminal of standard output, if it is one.
fn width() -> Option<usize> {
    let told = io::stdout().is_terminal().then(|| Table::new().width());
    told.map(columns)
}

/// Characters in a line of a terminal, which may not know, or say none: then what COLUMNS says, else 80.
fn columns(told: Option<u16>) -> usize {
    let said = || env::var("COLUMNS").ok()?.parse().ok();
    told.map(usize::from).filter(|&told| told > 0).or_else(said).filter(|&said| said > 0).unwrap_or(80)
}

/// How long it will take yet: nobody knows before the first step.
fn left(state: &ProgressState, out: &mut dyn fmt::Write) {
    let left = state.eta();
    // A bar that cannot be written is not shown.
    let _ = match left.as_secs() {
        _ if state.pos() == 0 => out.write_str("…"),
        0 => out.write_str("less than 1 s left"),
        _ => write!(out, "{:#} left", HumanDuration(left)),
    };
}

fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    if !text.ends_with('\n') {
        out.write_all(b"\n")?;
    }
    out.flush()
}

fn complain(text: &str) {
    let mut table = Table::new();
    // As wide as the terminal that it goes to, if it goes to one.
    let width = io::stderr().is_terminal().then(|| columns(table.use_stderr().width()));
    let mut text = painted(&table::folded(&clean(text.trim_end()), width), Stream::Err);
    text.push('\n');
    // A closed standard error is no reason to stop.
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

/// Lines of at most so many characters; one that goes on ends in `…`.
fn cut(text: &str, width: usize) -> String {
    let line = |line: &str| match line.chars().count() > width.max(1) {
        true => line.chars().take(width.max(1) - 1).chain(['…']).collect(),
        false => line.to_string(),
    };
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

/// `text` without characters that act on a terminal; line breaks stay.
pub fn clean(text: &str) -> String {
    text.split('\n').map(|line| display_name(&line.replace('\t', "  ")).into_owned()).collect::<Vec<_>>().join("\n")
}

/// JSON text whose strings hold no character that acts on a terminal, with the same meaning.
fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        let mut units = [0u16; 2];
        if c != '\n' && display_name(c.encode_utf8(&mut [0; 4])).is_empty() {
            c.encode_utf16(&mut units).iter().for_each(|unit| text += &format!("\\u{unit:04x}"));
        } else {
            text.push(c);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_where_the_terminal_does() {
        assert_eq!(cut("0.0 | F0 F1\n1.0 | F0\n", 8), "0.0 | F…\n1.0 | F0\n");
        assert_eq!(cut("ab", 0), "…");
    }

    #[test]
    fn a_terminal_of_no_columns_is_one_that_does_not_know() {
        assert_eq!(columns(Some(120)), 120);
        assert_eq!(columns(Some(0)), columns(None));
        assert!(columns(Some(0)) > 0);
    }

    #[test]
    fn nothing_acts_on_a_terminal() {
        assert_eq!(clean("a\u{1b}[31m\nb\u{9b}\r\u{202e}c"), "a[31m\nbc");
        let value = serde_json::json!({"name": "a\u{1b}\u{9b}\u{7f}b"});
        let text = escaped(&serde_json::to_string_pretty(&value).unwrap());
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()));
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }
}
