//! What training makes small, as costs need to know it: `--loss` and `--class-dim`.
//!
//! A loss is no op of a plan. It runs in the stage that makes the predictions, and its time and memory stand with the op that makes them.

use crate::failure::Failure;
use clap::{Args, ValueEnum};
use compiler::graph::Graph;
use compiler::import::onnx::name::shown;
use compiler::pass::attribution::{Attribution, AttributionError, Training, attribute};
use compiler::pass::loss;

/// What training makes small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Loss {
    /// Mean cross-entropy of logits against class numbers, of which -100 counts for nothing; where none counts it is 0
    CrossEntropy,
    /// Mean squared error
    Mse,
    /// Mean binary cross-entropy of logits against targets from 0 to 1
    Bce,
    /// The model's own loss: its first output where that is a scalar, else the only scalar among its outputs
    Output,
}

impl Loss {
    /// As the passes know it.
    pub fn of(self) -> loss::Loss {
        match self {
            Loss::CrossEntropy => loss::Loss::CrossEntropy,
            Loss::Mse => loss::Loss::Mse,
            Loss::Bce => loss::Loss::Bce,
            Loss::Output => loss::Loss::Output,
        }
    }

    /// Of a graph where nobody says: a scalar that comes first, or that follows from labels, is a loss by itself. Else the
    /// first output is taken for logits.
    pub fn usual(graph: &Graph) -> Loss {
        let is_loss = |at: usize| match at {
            0 => graph.fact(graph.outputs[0].value).rank() == 0,
            _ => loss::reads_more(graph, at),
        };
        if loss::own(graph).is_some_and(is_loss) { Loss::Output } else { Loss::CrossEntropy }
    }

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Loss::CrossEntropy => "cross-entropy",
            Loss::Mse => "mse",
            Loss::Bce => "bce",
            Loss::Output => "output",
        }
    }
}

/// The loss whose costs are counted.
#[derive(Clone, Debug, Default, Args)]
pub struct LossArguments {
    /// The loss whose costs are counted, in the stage that makes the predictions: cross-entropy, mse, bce, output, or none [default: what `train` would take; none for inference]
    #[arg(long, value_name = "NAME", value_parser = ["cross-entropy", "mse", "bce", "output", "none"], help_heading = "Costs and memory")]
    pub loss: Option<String>,
    /// The axis of classes; negative counts from the end [default: -1]
    #[arg(long, value_name = "AXIS", allow_hyphen_values = true, requires = "loss", help_heading = "Costs and memory")]
    pub class_dim: Option<i64>,
}

/// Which loss the costs of a model have in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Counted {
    /// What training takes where nobody says, if the model has such an output.
    #[default]
    Usual,
    /// This one, with its axis of classes.
    One(Loss, Option<i64>),
    /// None: a gradient arrives for the predictions.
    None,
}

impl LossArguments {
    /// What was said, if anything was.
    pub fn said(&self) -> Option<Counted> {
        let name = self.loss.as_deref()?;
        let loss = Loss::value_variants().iter().find(|loss| loss.name() == name);
        Some(loss.map_or(Counted::None, |loss| Counted::One(*loss, self.class_dim)))
    }
}

impl Counted {
    /// As plans and profiles write it: `cross-entropy`, or `cross-entropy over 1` with an axis of classes.
    pub fn written(self) -> Option<String> {
        match self {
            Counted::One(loss, Some(axis)) => Some(format!("{}{OVER}{axis}", loss.name())),
            Counted::One(loss, None) => Some(loss.name().to_string()),
            Counted::Usual | Counted::None => None,
        }
    }

    /// What a plan or a profile wrote.
    pub fn read(written: Option<&str>) -> Result<Counted, Failure> {
        let Some(text) = written else { return Ok(Counted::None) };
        let (name, axis) = match text.split_once(OVER) {
            Some((name, axis)) => (name, axis.parse().ok().map(Some)),
            None => (text, Some(None)),
        };
        let loss = Loss::value_variants().iter().find(|loss| loss.name() == name);
        match (loss, axis) {
            (Some(loss), Some(axis)) => Ok(Counted::One(*loss, axis)),
            _ => Err(Failure::input(format!("the loss `{}` is not known", shown(text)))
                .because("a newer version of pipec may have written it")),
        }
    }
}

const OVER: &str = " over ";

/// Which op answers for which node, the loss included.
pub struct Attributed {
    /// By op.
    pub attribution: Attribution,
    /// The loss that is in it.
    pub counted: Counted,
    /// What its backward starts from.
    pub training: Training,
    /// Why the model cannot be trained, where it cannot.
    pub untrainable: Option<String>,
}

/// Attributes the graph with that loss on its output. One that cannot be trained answers by its forward alone.
pub fn attributed(graph: &Graph, counted: Counted) -> Result<Attributed, AttributionError> {
    let (training, counted) = match counted {
        Counted::Usual => {
            let usual = Counted::One(Loss::usual(graph), None);
            return match attributed(graph, usual) {
                // No loss fits such an output; whoever trains it has one of their own.
                Err(AttributionError::Loss(_)) => attributed(graph, Counted::None),
                other => other,
            };
        }
        Counted::One(loss, axis) => (Training::Loss(loss.of(), axis), counted),
        Counted::None => (Training::Gradient, counted),
    };
    match attribute(graph, training) {
        Err(AttributionError::Backward(why)) => Ok(Attributed {
            attribution: attribute(graph, Training::No)?,
            counted: Counted::None,
            training: Training::No,
            untrainable: Some(why.to_string()),
        }),
        known => Ok(Attributed { attribution: known?, counted, training, untrainable: None }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for counted in [Counted::None, Counted::One(Loss::Mse, None), Counted::One(Loss::CrossEntropy, Some(-2))] {
            assert_eq!(Counted::read(counted.written().as_deref()).unwrap(), counted);
        }
        assert!(Counted::read(Some("hinge")).is_err());
        assert!(Counted::read(Some("cross-entropy over x")).is_err());
    }
}
