//! The training loss, and the loss included in the costs.
//!
//! A loss is not an op of a plan. It runs in the stage that computes the predictions, and its costs are added to the op that computes them.

use crate::error::Error;
use compiler::graph::Graph;
use compiler::pass::attribution::{Attribution, AttributionError, Training, attribute};
use compiler::pass::loss::{self, Loss};
use compiler::text::name::short_name;

/// The default loss of a graph: its own, if a scalar output is named `loss`, comes first or depends on labels; else cross-entropy of the first
/// output.
pub fn default_of(graph: &Graph) -> Loss {
    let is_loss = |at: usize| match at {
        _ if graph.outputs[at].name == "loss" => true,
        0 => graph.fact(graph.outputs[0].value).rank() == 0,
        _ => loss::reads_extra_inputs(graph, at),
    };
    if loss::output_of(graph).is_some_and(is_loss) { Loss::Output } else { Loss::CrossEntropy }
}

/// The loss included in the costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CountedLoss {
    /// The default loss of the model, if it fits the output.
    #[default]
    Default,
    /// This loss, with its class axis.
    One(Loss, Option<i64>),
    /// No loss: the gradient of the predictions is given.
    None,
}

impl CountedLoss {
    /// The form in plans and profiles: `cross-entropy`, or `cross-entropy over 1` with a class axis.
    pub fn to_text(self) -> Option<String> {
        match self {
            CountedLoss::One(loss, Some(axis)) => Some(format!("{}{OVER}{axis}", loss.name())),
            CountedLoss::One(loss, None) => Some(loss.name().to_string()),
            CountedLoss::Default | CountedLoss::None => None,
        }
    }

    /// Reads the form in plans and profiles.
    pub fn read(text: Option<&str>) -> Result<CountedLoss, Error> {
        let Some(text) = text else { return Ok(CountedLoss::None) };
        let (name, axis) = match text.split_once(OVER) {
            Some((name, axis)) => (name, axis.parse().ok().map(Some)),
            None => (text, Some(None)),
        };
        let loss = Loss::from_name(name);
        match (loss, axis) {
            (Some(loss), Some(axis)) => Ok(CountedLoss::One(loss, axis)),
            _ => Err(Error::input(format!("unknown loss `{}`", short_name(text)))
                .because("a newer version of pipec may have written it")),
        }
    }
}

const OVER: &str = " over ";

/// The op of every node, including those of the loss.
pub struct Attributed {
    /// By op.
    pub attribution: Attribution,
    /// The loss included in it.
    pub counted: CountedLoss,
    /// The start of its backward.
    pub training: Training,
    /// The reason why the model cannot be trained, if any.
    pub untrainable: Option<String>,
}

/// Attributes the graph with that loss on its output. A model that cannot be trained is attributed by its forward only.
pub fn attribute_with_loss(graph: &Graph, counted: CountedLoss) -> Result<Attributed, AttributionError> {
    let (training, counted) = match counted {
        CountedLoss::Default => {
            let default = CountedLoss::One(default_of(graph), None);
            return match attribute_with_loss(graph, default) {
                // No built-in loss fits such an output; its training needs a loss of the user.
                Err(AttributionError::Loss(_)) => attribute_with_loss(graph, CountedLoss::None),
                result => result,
            };
        }
        CountedLoss::One(loss, axis) => (Training::Loss(loss, axis), counted),
        CountedLoss::None => (Training::Gradient, counted),
    };
    match attribute(graph, training) {
        Err(AttributionError::Backward(why)) => Ok(Attributed {
            attribution: attribute(graph, Training::No)?,
            counted: CountedLoss::None,
            training: Training::No,
            untrainable: Some(why.to_string()),
        }),
        attribution => Ok(Attributed { attribution: attribution?, counted, training, untrainable: None }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for counted in
            [CountedLoss::None, CountedLoss::One(Loss::Mse, None), CountedLoss::One(Loss::CrossEntropy, Some(-2))]
        {
            assert_eq!(CountedLoss::read(counted.to_text().as_deref()).unwrap(), counted);
        }
        assert!(CountedLoss::read(Some("hinge")).is_err());
        assert!(CountedLoss::read(Some("cross-entropy over x")).is_err());
    }
}
