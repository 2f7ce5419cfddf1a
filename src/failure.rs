//! A failure as the user reads it: what, where, why, and what to do next.
//!
//! ```text
//! error: cannot import resnet.onnx
//!   node `layer1.0/conv2` (Conv): weight has 64 input channels, its input has 128
//! help: was the model exported with a fixed batch size? `pipec inspect --micro-batch 32` sets one
//! ```
//!
//! Only here, in what calls it, errors are turned into text.

use compiler::export::failure;
use std::fmt;
use std::path::Path;

/// Exit code: it ran, and the answer is no.
pub const NO: u8 = 1;
/// Exit code: bad input or usage.
pub const INPUT: u8 = 2;
/// Exit code: no feasible plan.
pub const INFEASIBLE: u8 = 3;
/// Exit code: our bug.
pub const BUG: u8 = 101;

/// Why a verb did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Exit code.
    pub code: u8,
    what: String,
    why: Vec<String>,
    help: Option<String>,
    /// Whether the same may succeed when it is done once more: a process of several died.
    pub may_pass: bool,
}

impl Failure {
    /// Bad input or usage.
    pub fn input(what: impl fmt::Display) -> Failure {
        Failure::new(INPUT, what)
    }

    /// It ran, and the answer is no.
    pub fn no(what: impl fmt::Display) -> Failure {
        Failure::new(NO, what)
    }

    /// There is no plan within the limits.
    pub fn infeasible(what: impl fmt::Display) -> Failure {
        Failure::new(INFEASIBLE, what)
    }

    /// Ended by a signal, with the exit code that it asks for.
    pub fn stopped(code: u8, what: impl fmt::Display) -> Failure {
        Failure::new(code, what)
    }

    /// A signal asked for the end.
    pub fn interrupted(signal: i32) -> Failure {
        let code = u8::try_from(128 + signal).unwrap_or(NO);
        Failure::stopped(code, format!("interrupted by {}", crate::signals::name(signal)))
    }

    /// A panic, or a promise of ours that did not hold.
    pub fn bug(said: &str) -> Failure {
        let what = format!("bug in pipec {}: {}", env!("CARGO_PKG_VERSION"), said.replace('\n', " "));
        Failure::new(BUG, what).help("please report this line with the command and, if you can, the file")
    }

    /// A file that cannot be read or written.
    pub fn file(what: &str, path: &Path, why: impl fmt::Display) -> Failure {
        Failure::input(format!("cannot {what} {}", path.display())).because(why)
    }

    fn new(code: u8, what: impl fmt::Display) -> Failure {
        Failure { code, what: what.to_string(), why: Vec::new(), help: None, may_pass: false }
    }

    /// Adds the reason, or one more.
    pub fn because(mut self, why: impl fmt::Display) -> Failure {
        self.why.extend(why.to_string().lines().map(str::to_string));
        self
    }

    /// Why, in one line; what, where nothing says why.
    pub fn reason(&self) -> String {
        if self.why.is_empty() { self.what.clone() } else { self.why.join(" ") }
    }

    /// What and why, in one line.
    pub fn line(&self) -> String {
        if self.why.is_empty() { self.what.clone() } else { format!("{}: {}", self.what, self.why.join(" ")) }
    }

    /// The same for programs, in one line.
    pub fn json(&self) -> String {
        let said = failure::Failure {
            message: self.what.clone(),
            causes: self.why.clone(),
            help: self.help.clone(),
            exit_code: self.code,
        };
        serde_json::to_string(&said).unwrap_or_default()
    }

    /// Says that the same may succeed when it is done once more.
    pub fn again(mut self) -> Failure {
        self.may_pass = true;
        self
    }

    /// Says what else to do next.
    pub fn and(mut self, more: impl fmt::Display) -> Failure {
        let help = self.help.take().map_or(String::new(), |help| help + "; ");
        self.help = Some(format!("{help}{more}"));
        self
    }

    /// Says what to do next.
    pub fn help(mut self, help: impl fmt::Display) -> Failure {
        self.help = Some(help.to_string());
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.what.replace('\n', " "))?;
        for line in &self.why {
            write!(f, "\n  {line}")?;
        }
        match &self.help {
            Some(help) => write!(f, "\nhelp: {}", help.replace('\n', " ")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_starts_with_error() {
        let failure = Failure::input("cannot import a\nb").because("error: x\nerror: y").help("try\nthis");
        let text = failure.to_string();
        assert_eq!(text.lines().filter(|line| line.starts_with("error")).count(), 1);
        assert_eq!(text, "error: cannot import a b\n  error: x\n  error: y\nhelp: try this");
    }
}
