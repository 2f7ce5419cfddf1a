//! Colours on terminals for errors, warnings, help and load bars.
//!
//! Text is coloured line by line just before it is written, after control characters have been removed. So commands need not
//! handle colours, and uncoloured text has the same characters.
//!
//! Order of precedence: `--color`, NO_COLOR (<https://no-color.org>), FORCE_COLOR (<https://force-color.org>), presence of a
//! terminal. Empty variables are ignored.

use crate::cli::usage;
use clap::ValueEnum;
use std::env;
use std::io::{self, IsTerminal};
use std::sync::OnceLock;

/// When to colour output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum When {
    /// On a terminal, unless NO_COLOR or FORCE_COLOR is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// An output stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

static CHOICE: OnceLock<When> = OnceLock::new();

const RED: &str = "\x1b[1;31m";
const GREEN: &str = "\x1b[32m";
const YELLOW: &str = "\x1b[33m";
const CYAN: &str = "\x1b[36m";
const FAINT: &str = "\x1b[2m";
const OFF: &str = "\x1b[0m";

/// Sets the choice of the command line for the whole run.
pub fn set_choice(when: When) {
    // The first call wins: a run has one command line.
    let _ = CHOICE.set(when);
}

/// The value of `--color` in arguments that may not parse, so that usage errors are coloured too.
pub fn choice_among(arguments: impl IntoIterator<Item = String>) -> When {
    let valid = |value: &String| When::from_str(value, false).ok();
    usage::flag_values("--color", arguments).iter().filter_map(valid).next_back().unwrap_or(When::Auto)
}

/// True if output to the stream is coloured.
pub fn is_colored(stream: Stream) -> bool {
    let is_terminal = match stream {
        Stream::Out => io::stdout().is_terminal(),
        Stream::Err => io::stderr().is_terminal(),
    };
    let is_set = |name: &str| env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = env::var_os("TERM").is_some_and(|term| term == "dumb");
    should_color(
        CHOICE.get().copied().unwrap_or(When::Auto),
        is_set("NO_COLOR"),
        is_set("FORCE_COLOR"),
        is_terminal && !is_dumb,
    )
}

fn should_color(when: When, no_colour: bool, force_colour: bool, is_terminal: bool) -> bool {
    match when {
        When::Always => true,
        When::Never => false,
        When::Auto => !no_colour && (force_colour || is_terminal),
    }
}

/// Colours the text, if output to the stream is coloured.
pub fn paint(text: &str, stream: Stream) -> String {
    if !is_colored(stream) {
        return text.to_string();
    }
    text.split('\n').map(paint_line).collect::<Vec<_>>().join("\n")
}

/// Colours the prefix of a line, such as `error:`, or its load bar.
fn paint_line(text: &str) -> String {
    let starts = [("error:", RED), ("warning:", YELLOW), ("help:", CYAN), ("next:", CYAN)];
    if let Some((start, colour)) = starts.into_iter().find(|(start, _)| text.starts_with(start)) {
        return format!("{colour}{start}{OFF}{}", &text[start.len()..]);
    }
    let bar = text.find(['█', '░']).zip(text.rfind(['█', '░']));
    let Some((from, last)) = bar else { return text.to_string() };
    let to = last + '█'.len_utf8();
    let full = text[from..to].find('░').map_or(to, |at| from + at);
    format!("{}{GREEN}{}{OFF}{FAINT}{}{OFF}{}", &text[..from], &text[from..full], &text[full..to], &text[to..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_goes_first_and_no_before_force() {
        for no in [false, true] {
            for force in [false, true] {
                for terminal in [false, true] {
                    assert!(should_color(When::Always, no, force, terminal));
                    assert!(!should_color(When::Never, no, force, terminal));
                    assert_eq!(should_color(When::Auto, no, force, terminal), !no && (force || terminal));
                }
            }
        }
    }

    #[test]
    fn arguments_say_when() {
        let choice = |text: &str| choice_among(text.split_whitespace().map(str::to_string));
        assert_eq!(choice("pipec partiton x --color never"), When::Never);
        assert_eq!(choice("pipec --color=always --color"), When::Always);
        assert_eq!(choice("pipec --colors always -- --color never"), When::Auto);
        assert_eq!(choice("pipec --color purple"), When::Auto);
    }

    #[test]
    fn without_its_colours_a_line_is_what_it_was() {
        for text in ["error: no `x`", "  error: x", "0  ██░░  50 %", "██", "░", "", "a: b", "next: pipec simulate"]
        {
            let mut plain = paint_line(text);
            for code in [RED, GREEN, YELLOW, CYAN, FAINT, OFF] {
                plain = plain.replace(code, "");
            }
            assert_eq!(plain, text);
        }
        assert_eq!(paint_line("error: x"), format!("{RED}error:{OFF} x"));
        assert_eq!(paint_line("a █░ b"), format!("a {GREEN}█{OFF}{FAINT}░{OFF} b"));
    }
}
