//! Terminal output: results on standard output, everything else on standard error.
//!
//! Text from files may contain escape codes, so all output passes through [`clean`]; JSON keeps the characters as `\u` escapes.
//! A closed pipe (`| head`) ends only the printing.

use crate::cli::args::{Format, Global};
use crate::cli::color::{Stream, paint};
use crate::cli::{color, prediction, render_error, stage_table, table};
use clap::builder::StyledStr;
use comfy_table::Table;
use compiler::plan::Plan;
use compiler::text::name::display_name;
use compiler::text::quantity;
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use pipec::error::Error;
use pipec::events::{Event, EventSink};
use pipec::launch::stop_signal::Stop;
use serde_json::Value;
use std::cell::{Cell, RefCell};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::time::{Duration, Instant};
use std::{env, fmt};

/// Interval of step reports in a training run without a terminal.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum width of help text in characters.
const MAX_HELP_WIDTH: usize = 100;

/// The form in which failures are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// Text, for people.
    Person,
    /// JSON, for programs.
    Program,
}

pub struct Screen {
    format: Format,
    reader: Reader,
    quiet: u8,
    verbose: u8,
    /// Set once standard output is closed.
    closed: Cell<bool>,
    fault: RefCell<Option<io::Error>>,
    bar: RefCell<Option<ProgressBar>>,
    /// Time of the last step report without a terminal.
    last_report: Cell<Option<Instant>>,
    /// The signals of the process, if they end the request early instead of the process.
    stop: Cell<Option<&'static Stop>>,
}

impl Screen {
    /// A screen for the global flags.
    pub fn new(global: &Global, reader: Reader) -> Screen {
        Screen {
            format: global.format,
            reader,
            quiet: global.quiet,
            verbose: global.verbose,
            closed: Cell::new(false),
            fault: RefCell::new(None),
            bar: RefCell::new(None),
            last_report: Cell::new(None),
            stop: Cell::new(None),
        }
    }

    /// Runs a search that a signal ends with the best result so far. A second signal ends the process.
    pub fn interruptible<T>(&self, search: impl FnOnce() -> T) -> T {
        self.stop.set(Stop::listen().ok());
        let result = search();
        if let Some(stop) = self.stop.take() {
            stop.exit_on_next();
        }
        result
    }

    /// Prints a piece of the result, in text form only.
    pub fn text(&self, text: &str) {
        if self.format == Format::Text {
            self.write(&paint(&clean(text), Stream::Out));
        }
    }

    /// Prints the whole result, in JSON form only.
    pub fn json(&self, value: &Value) {
        if self.format == Format::Json {
            let text = serde_json::to_string_pretty(value).unwrap_or_default();
            self.write(&escape(&text));
        }
    }

    /// Prints the text of a JSON file as the whole result, in JSON form only, byte for byte.
    pub fn json_file(&self, text: &str) {
        if self.format == Format::Json {
            self.write(&escape(text));
        }
    }

    /// Prints a document that is the same in either form: a schema, a plan.
    pub fn document(&self, text: &str) {
        self.write(text);
    }

    /// Prints text unchanged, in text form only: a script.
    pub fn verbatim(&self, text: &str) {
        if self.format == Format::Text {
            self.write(text);
        }
    }

    /// Suggests the next command, in text form only, unless `-qq`.
    pub fn next(&self, text: &str) {
        if self.quiet < 2 {
            self.text(text);
        }
    }

    /// Prints a note, unless `-q`.
    pub fn note(&self, text: &str) {
        if self.quiet == 0 {
            print_error(text);
        }
    }

    /// Prints a detail, with `-v` only.
    pub fn detail(&self, text: &str) {
        if self.verbose > 0 && self.quiet == 0 {
            print_error(text);
        }
    }

    /// Prints a warning, unless `-qq`.
    pub fn warn(&self, text: &str) {
        if self.quiet < 2 {
            print_error(&format!("warning: {text}"));
        }
    }

    /// A progress bar of `length` steps on standard error, shown only on a terminal and without `-q`.
    pub fn progress(&self, length: u64, template: &str) -> ProgressBar {
        let is_shown = self.quiet == 0 && io::stderr().is_terminal();
        let target = if is_shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        // Bars are coloured only if the other output is.
        let template = if color::is_colored(Stream::Err) {
            template.replace("{bar:30}", "{bar:30.green}")
        } else {
            template.to_string()
        };
        let style = ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
        // Templates end in a message; until there is one, `…` follows their comma.
        let style = style.with_key("left", remaining_time);
        ProgressBar::with_draw_target(Some(length), target).with_style(style).with_message("…")
    }

    /// Prints a line while a bar is shown: above it on a terminal, otherwise as a note.
    pub fn print_beside(&self, bar: &ProgressBar, text: &str) {
        match bar.is_hidden() {
            true => self.note(text),
            false => bar.println(paint(&clean(text), Stream::Err)),
        }
    }

    /// Fails if a result could not be written, except to a closed pipe.
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

    /// Width in characters of the terminal of standard output, if it is one.
    pub fn width(&self) -> Option<usize> {
        width()
    }

    /// Prints prose, wrapped to the terminal, in text form only.
    pub fn prose(&self, text: &str) {
        self.text(&self.wrap(text));
    }

    /// Wraps prose to the width of the terminal, if there is one.
    pub fn wrap(&self, text: &str) -> String {
        table::wrap(text, self.width())
    }

    /// Prints text whose lines must not be wrapped; on a terminal they are cut at its width.
    pub fn wide(&self, text: &str) {
        match self.width() {
            Some(width) => self.text(&truncate_lines(text, width)),
            None => self.text(text),
        }
    }

    /// Prints help or the version, before there is a screen.
    pub fn print(text: &StyledStr) {
        let text = if color::is_colored(Stream::Out) { text.ansi().to_string() } else { clean(&text.to_string()) };
        // If even help cannot be printed, there is nowhere to report it.
        let _ = print(&table::wrap(&text, width().map(|width| width.min(MAX_HELP_WIDTH))));
    }

    /// Prints to standard error before there is a screen.
    pub fn print_error(text: &str) {
        print_error(text);
    }

    /// The form in which failures of this run are printed.
    pub fn reader(&self) -> Reader {
        self.reader
    }

    pub fn failure(failure: &Error, reader: Reader) {
        match reader {
            Reader::Program => _ = writeln!(io::stderr().lock(), "{}", escape(&render_error::json(failure))),
            Reader::Person => print_error(&failure.to_string()),
        }
    }

    fn bar(&self, unit: &str, total: u64) -> ProgressBar {
        let template = match unit {
            "kernels" => "profiling {bar:30} {pos}/{len} {wide_msg}",
            "steps" => "{bar:30} {pos}/{len} steps, {left}, {msg}",
            _ => "{bar:30} {pos}/{len} combinations, {elapsed}, {msg}",
        };
        self.bar.borrow_mut().get_or_insert_with(|| self.progress(total, template)).clone()
    }

    /// Reports a training step: on the bar, or without a terminal as a line every ten seconds.
    fn step(&self, step: u64, total: u64, loss: f64, samples_per_s: f64) {
        let bar = self.bar("steps", total);
        bar.set_message(format!("loss {loss:.4}"));
        bar.set_position(step);
        let last = self.last_report.get().unwrap_or_else(Instant::now);
        if !io::stderr().is_terminal() && last.elapsed() >= REPORT_INTERVAL {
            self.note(&format!(
                "step {step} of {total}: loss {loss:.4}, {} samples/s",
                quantity::samples(samples_per_s)
            ));
            self.last_report.set(Some(Instant::now()));
        } else {
            self.last_report.set(Some(last));
        }
    }

    /// Reports the plan that training made.
    fn planned(&self, plan: &Plan) {
        self.note(&format!("planned with analytic costs of a CPU\n{}", stage_table::stages(plan, self.width())));
        plan.warnings.iter().for_each(|warning| self.warn(warning));
        if let Some(shared) = prediction::shared_cores_text(plan) {
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
                    self.last_report.set(Some(Instant::now()));
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

    fn stop_signal(&self) -> Option<i32> {
        self.stop.get().and_then(Stop::received)
    }
}

/// Width in characters of the terminal of standard output, if it is one.
fn width() -> Option<usize> {
    let reported = io::stdout().is_terminal().then(|| Table::new().width());
    reported.map(columns)
}

/// Width of a terminal; if it is unknown or 0, the value of COLUMNS, else 80.
fn columns(reported: Option<u16>) -> usize {
    let from_environment = || env::var("COLUMNS").ok()?.parse().ok();
    reported
        .map(usize::from)
        .filter(|&reported| reported > 0)
        .or_else(from_environment)
        .filter(|&columns| columns > 0)
        .unwrap_or(80)
}

/// Remaining time, unknown before the first step.
fn remaining_time(state: &ProgressState, out: &mut dyn fmt::Write) {
    let remaining = state.eta();
    // Errors of a progress bar are ignored.
    let _ = match remaining.as_secs() {
        _ if state.pos() == 0 => out.write_str("…"),
        0 => out.write_str("less than 1 s left"),
        _ => write!(out, "{:#} left", HumanDuration(remaining)),
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

fn print_error(text: &str) {
    let mut table = Table::new();
    // As wide as the terminal of standard error, if it is one.
    let width = io::stderr().is_terminal().then(|| columns(table.use_stderr().width()));
    let mut text = paint(&table::wrap(&clean(text.trim_end()), width), Stream::Err);
    text.push('\n');
    // Errors of standard error are ignored.
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

/// Cuts lines to `width` characters; a cut line ends in `…`.
fn truncate_lines(text: &str, width: usize) -> String {
    let line = |line: &str| match line.chars().count() > width.max(1) {
        true => line.chars().take(width.max(1) - 1).chain(['…']).collect(),
        false => line.to_string(),
    };
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

/// `text` without control characters; line breaks stay.
pub fn clean(text: &str) -> String {
    text.split('\n').map(|line| display_name(&line.replace('\t', "  ")).into_owned()).collect::<Vec<_>>().join("\n")
}

/// JSON text with the same meaning, without control characters in its strings.
fn escape(json: &str) -> String {
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
        assert_eq!(truncate_lines("0.0 | F0 F1\n1.0 | F0\n", 8), "0.0 | F…\n1.0 | F0\n");
        assert_eq!(truncate_lines("ab", 0), "…");
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
        let text = escape(&serde_json::to_string_pretty(&value).unwrap());
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()));
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }
}
