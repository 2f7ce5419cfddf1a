//! Errors of lowering a model, and the operator sets it supports.

use super::LowerReason;
use super::support::Unsupported;
use crate::graph::AddError;
use crate::tensor::fact::Fact;
use crate::text::name::short_name;
use std::fmt;
use thiserror::Error;

/// Maximum number of errors listed in one message; the rest is only counted.
const LISTED: usize = 20;

/// Supported versions of the standard operator set. Newer versions are read with a warning.
pub const OPSETS: std::ops::RangeInclusive<i64> = 1..=28;

#[derive(Debug, Error)]
pub enum LowerError {
    #[error("{0}")]
    Unsupported(Unsupported),
    #[error("standard operator set {found} is not supported; {} to {} are", OPSETS.start(), OPSETS.end())]
    Opset { found: i64 },
    #[error("{0}")]
    Nodes(Faults),
    #[error("input `{}` is {expected}, the value given is {found}", short_name(name))]
    Given { name: String, expected: Fact, found: Fact },
    #[error("graph output `{}`: {reason}", short_name(name))]
    Output { name: String, reason: Box<LowerReason> },
    #[error("the graph has no outputs")]
    NoOutputs,
    /// A node could not be re-added during pruning: a bug in pipec.
    #[error("bug in pipec: {0}")]
    Prune(Box<AddError>),
}

impl LowerError {
    /// Pairs of symbols that ops need to be equal.
    pub fn equal_symbols(&self) -> Vec<(String, String)> {
        let LowerError::Nodes(faults) = self else { return Vec::new() };
        let pair = |fault: &Fault| match &fault.reason {
            LowerReason::Equal { one, other } => Some((one.clone(), other.clone())),
            _ => None,
        };
        faults.0.iter().filter_map(pair).collect()
    }
}

impl From<AddError> for LowerError {
    fn from(error: AddError) -> LowerError {
        LowerError::Prune(Box::new(error))
    }
}

#[derive(Debug)]
pub struct Faults(pub Vec<Fault>);

#[derive(Debug, Error)]
#[error("node `{}` ({}){}: {reason}", short_name(node), short_name(operator), self.place())]
pub struct Fault {
    pub node: String,
    pub operator: String,
    /// The module of the node; may be empty.
    pub module: String,
    /// Its Python source line; empty if the file does not have it.
    pub line: String,
    pub reason: LowerReason,
}

impl Fault {
    fn place(&self) -> String {
        let module = if self.module.is_empty() { String::new() } else { format!(" in `{}`", short_name(&self.module)) };
        let line = if self.line.is_empty() { String::new() } else { format!(", {}", short_name(&self.line)) };
        module + &line
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, fault) in self.0.iter().take(LISTED).enumerate() {
            write!(f, "{}{fault}", if n > 0 { "\n" } else { "" })?;
        }
        match self.0.len().saturating_sub(LISTED) {
            0 => Ok(()),
            more => write!(f, "\nand {more} more"),
        }
    }
}
