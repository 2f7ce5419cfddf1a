//! The error of the library: its kind, a message, causes, and what to do next.
//!
//! ```text
//! error: cannot import resnet.onnx
//!   node `layer1.0/conv2` (Conv): weight has 64 input channels, its input has 128
//! help: was the model exported with a fixed batch size? `pipec inspect --micro-batch 32` sets one
//! ```

use std::fmt::{self, Display, Formatter};
use std::path::Path;

/// The class of an error: it decides the exit code of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// Bad input or usage.
    Input,
    /// The request ran to its end and its result is negative: training diverged, a plan is not valid.
    Negative,
    /// No plan fits the limits.
    Infeasible,
    /// The signal of this number ended the run.
    Interrupted(i32),
    /// A bug in pipec.
    Bug,
}

/// A failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    causes: Vec<String>,
    help: Option<String>,
    is_retryable: bool,
    is_reported: bool,
}

impl Error {
    fn new(kind: ErrorKind, message: impl Display) -> Error {
        Error {
            kind,
            message: message.to_string(),
            causes: Vec::new(),
            help: None,
            is_retryable: false,
            is_reported: false,
        }
    }

    /// Bad input or usage.
    pub fn input(message: impl Display) -> Error {
        Error::new(ErrorKind::Input, message)
    }

    /// A flag that another setting excludes.
    pub fn conflict(flag: impl Display, other: impl Display) -> Error {
        Error::input(format!("`{flag}` cannot be combined with {other}"))
    }

    /// A negative result.
    pub fn negative(message: impl Display) -> Error {
        Error::new(ErrorKind::Negative, message)
    }

    /// No plan fits the limits.
    pub fn infeasible(message: impl Display) -> Error {
        Error::new(ErrorKind::Infeasible, message)
    }

    /// A signal ended the run.
    pub fn interrupted(signal: i32, message: impl Display) -> Error {
        Error::new(ErrorKind::Interrupted(signal), message)
    }

    /// A panic, or a broken invariant of pipec.
    pub fn bug(message: &str) -> Error {
        let message = format!("bug in pipec {}: {}", env!("CARGO_PKG_VERSION"), message.replace('\n', " "));
        Error::new(ErrorKind::Bug, message)
            .with_help("please report this line with the command and, if you can, the file")
    }

    /// A file that cannot be read or written: `cannot {action} {path}`.
    pub fn file(action: &str, path: &Path, cause: impl Display) -> Error {
        Error::input(format!("cannot {action} {}", path.display())).because(cause)
    }

    /// Adds a cause, one for each line of the text.
    pub fn because(mut self, cause: impl Display) -> Error {
        self.causes.extend(cause.to_string().lines().map(str::to_string));
        self
    }

    /// Sets the help text.
    pub fn with_help(mut self, help: impl Display) -> Error {
        self.help = Some(help.to_string());
        self
    }

    /// Appends to the help text.
    pub fn with_more_help(mut self, more: impl Display) -> Error {
        let help = self.help.take().map_or(String::new(), |help| help + "; ");
        self.help = Some(format!("{help}{more}"));
        self
    }

    /// Marks an error that may not occur again, such as the death of one process of several.
    pub fn retryable(mut self) -> Error {
        self.is_retryable = true;
        self
    }

    /// Marks a negative result that the request has already reported in full: it decides the exit code only.
    pub fn reported(mut self) -> Error {
        self.is_reported = true;
        self
    }

    /// True if the request has already reported this.
    pub fn is_reported(&self) -> bool {
        self.is_reported
    }

    /// The class of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The message, without causes.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The causes, outermost first.
    pub fn causes(&self) -> &[String] {
        &self.causes
    }

    /// The help text: what to do next.
    pub fn help(&self) -> Option<&str> {
        self.help.as_deref()
    }

    /// True if the same request may succeed when it runs again.
    pub fn is_retryable(&self) -> bool {
        self.is_retryable
    }

    /// The causes in one line; the message if there are none.
    pub fn reason(&self) -> String {
        if self.causes.is_empty() { self.message.clone() } else { self.causes.join(" ") }
    }

    /// Message and causes in one line.
    pub fn line(&self) -> String {
        if self.causes.is_empty() {
            self.message.clone()
        } else {
            format!("{}: {}", self.message, self.causes.join(" "))
        }
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.message.replace('\n', " "))?;
        for line in &self.causes {
            write!(f, "\n  {line}")?;
        }
        match &self.help {
            Some(help) => write!(f, "\nhelp: {}", help.replace('\n', " ")),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_starts_with_error() {
        let error = Error::input("cannot import a\nb").because("error: x\nerror: y").with_help("try\nthis");
        let text = error.to_string();
        assert_eq!(text.lines().filter(|line| line.starts_with("error")).count(), 1);
        assert_eq!(text, "error: cannot import a b\n  error: x\n  error: y\nhelp: try this");
    }
}
