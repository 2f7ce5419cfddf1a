//! The optimizer flags of `pipec train`.

use crate::cmd::partition;
use crate::failure::Failure;
use clap::{Args, ValueEnum};
use runtime::optimizer::Optimizer;

/// How parameters move.
#[derive(Clone, Debug, Args)]
pub struct OptimizerArguments {
    /// Optimizer
    #[arg(long, value_enum, value_name = "NAME", default_value = "sgd")]
    pub optimizer: Rule,
    /// Step length [default: 0.01 for sgd, 0.001 for adam and adamw]
    #[arg(long, value_name = "X", value_parser = positive)]
    pub lr: Option<f64>,
    /// sgd: the share of the last step that is kept
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = positive)]
    pub momentum: f64,
    /// sgd: look ahead along the momentum
    #[arg(long)]
    pub nesterov: bool,
    /// Penalty on the weights; adamw: decay [default: 0, adamw 0.01]
    #[arg(long, value_name = "X", value_parser = positive)]
    pub weight_decay: Option<f64>,
    /// adam, adamw: the shares of the moments that are kept
    #[arg(long, value_name = "A,B", value_delimiter = ',', num_args = 1, default_value = "0.9,0.999", value_parser = positive)]
    pub betas: Vec<f64>,
    /// adam, adamw: added to the root of the second moment
    #[arg(long, value_name = "X", default_value_t = 1e-8, value_parser = positive)]
    pub eps: f64,
}

/// An optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Rule {
    /// Stochastic gradient descent
    Sgd,
    /// Adam
    Adam,
    /// Adam with decoupled weight decay
    Adamw,
}

impl OptimizerArguments {
    /// The optimizer they describe.
    pub fn build(&self) -> Result<Optimizer, Failure> {
        let wrong = |what: &str| Err(Failure::input(what));
        let is_sgd = self.optimizer == Rule::Sgd;
        if !is_sgd && (self.momentum != 0.0 || self.nesterov) {
            return wrong("`--momentum` and `--nesterov` belong to `--optimizer sgd`");
        }
        if self.nesterov && self.momentum == 0.0 {
            return wrong("`--nesterov` needs `--momentum`");
        }
        let &[first, second] = &self.betas[..] else {
            return wrong("`--betas` takes two numbers, for example 0.9,0.999");
        };
        if first >= 1.0 || second >= 1.0 {
            return wrong("`--betas` are below 1");
        }
        if is_sgd {
            return Ok(Optimizer::Sgd {
                learning_rate: self.lr.unwrap_or(0.01),
                momentum: self.momentum,
                nesterov: self.nesterov,
                weight_decay: self.weight_decay.unwrap_or(0.0),
            });
        }
        let decoupled = self.optimizer == Rule::Adamw;
        Ok(Optimizer::Adam {
            learning_rate: self.lr.unwrap_or(0.001),
            betas: (first, second),
            epsilon: self.eps,
            weight_decay: self.weight_decay.unwrap_or(if decoupled { 0.01 } else { 0.0 }),
            decoupled,
        })
    }

    /// The same, as far as memory is concerned.
    pub fn planned(&self) -> partition::Optimizer {
        match self.optimizer {
            Rule::Sgd if self.momentum == 0.0 => partition::Optimizer::Sgd,
            Rule::Sgd => partition::Optimizer::SgdMomentum,
            Rule::Adam => partition::Optimizer::Adam,
            Rule::Adamw => partition::Optimizer::Adamw,
        }
    }
}

fn positive(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0);
    value.ok_or_else(|| "it must be a finite number of at least 0".to_string())
}
