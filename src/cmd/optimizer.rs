//! Optimizers by name, and the optimizer flags of `pipec train`.

use crate::failure::Failure;
use crate::screen::Screen;
use clap::{Args, ValueEnum};
use runtime::optim::lr_schedule::{Rate, Shape};
use runtime::optim::optimizer;
use runtime::optim::optimizer::Rule;

/// The decays of Adam (Kingma and Ba, 2015).
const USUAL_BETAS: [f64; 2] = [0.9, 0.999];

/// What `sgd-momentum` and `rmsprop-momentum` keep of the last step where nobody says.
const USUAL_MOMENTUM: f64 = 0.9;

/// How parameters move.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Updates")]
pub struct OptimizerArguments {
    /// Optimizer
    #[arg(long, value_enum, value_name = "NAME", default_value = "sgd")]
    pub optimizer: Optimizer,
    /// Step length [default: 0.01 for sgd, rmsprop and adagrad, 0.001 for adam and adamw]
    #[arg(long, value_name = "X", value_parser = positive)]
    pub lr: Option<f64>,
    /// How the step length changes, after `warmup:N,` or at once: constant, step:N:FACTOR (times FACTOR after every N
    /// minibatches), cosine[:FLOOR] or linear[:FLOOR] (down to that share at the end)
    #[arg(long, value_name = "[warmup:N,]SHAPE", default_value = "constant", value_parser = rate)]
    pub lr_schedule: Rate,
    /// sgd, rmsprop: the share of the last step that is kept [default: 0, 0.9 for sgd-momentum and rmsprop-momentum]
    #[arg(long, value_name = "X", value_parser = positive)]
    pub momentum: Option<f64>,
    /// sgd: look ahead along the momentum
    #[arg(long)]
    pub nesterov: bool,
    /// Penalty on the weights; adamw: decay [default: 0, adamw 0.01]
    #[arg(long, value_name = "X", value_parser = positive)]
    pub weight_decay: Option<f64>,
    /// adam, adamw: the shares of the moments that are kept
    #[arg(long, value_name = "A,B", value_delimiter = ',', num_args = 1, default_value = "0.9,0.999", value_parser = positive)]
    pub betas: Vec<f64>,
    /// rmsprop: the share of the mean square that is kept
    #[arg(long, value_name = "X", default_value_t = 0.99, value_parser = positive)]
    pub alpha: f64,
    /// adagrad: how the step length falls, over 1 + (step - 1) times this
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = positive)]
    pub lr_decay: f64,
    /// All but sgd: added to the root of the squares [default: 1e-8, adagrad 1e-10]
    #[arg(long, value_name = "X", value_parser = positive)]
    pub eps: Option<f64>,
}

/// An optimizer by its name, on the command line and in plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Optimizer {
    /// Stochastic gradient descent
    Sgd,
    /// The same with momentum
    SgdMomentum,
    /// Adam
    Adam,
    /// Adam with decoupled weight decay
    Adamw,
    /// RMSProp
    Rmsprop,
    /// The same with momentum
    RmspropMomentum,
    /// Adagrad
    Adagrad,
}

impl Optimizer {
    /// Numbers of state for each weight.
    pub fn state(self) -> f64 {
        match self {
            Optimizer::Sgd => 0.0,
            Optimizer::SgdMomentum | Optimizer::Rmsprop | Optimizer::Adagrad => 1.0,
            Optimizer::Adam | Optimizer::Adamw | Optimizer::RmspropMomentum => 2.0,
        }
    }

    /// The name in plans.
    pub fn name(self) -> &'static str {
        match self {
            Optimizer::Sgd => "sgd",
            Optimizer::SgdMomentum => "sgd-momentum",
            Optimizer::Adam => "adam",
            Optimizer::Adamw => "adamw",
            Optimizer::Rmsprop => "rmsprop",
            Optimizer::RmspropMomentum => "rmsprop-momentum",
            Optimizer::Adagrad => "adagrad",
        }
    }

    /// The same with what `--momentum` says: `sgd` with momentum is `sgd-momentum`, and without it that one is `sgd`.
    pub fn with_momentum(self, momentum: Option<f64>) -> Result<Optimizer, Failure> {
        let Some(momentum) = momentum else { return Ok(self) };
        Ok(match (self, momentum == 0.0) {
            (Optimizer::Sgd | Optimizer::SgdMomentum, true) => Optimizer::Sgd,
            (Optimizer::Sgd | Optimizer::SgdMomentum, false) => Optimizer::SgdMomentum,
            (Optimizer::Rmsprop | Optimizer::RmspropMomentum, true) => Optimizer::Rmsprop,
            (Optimizer::Rmsprop | Optimizer::RmspropMomentum, false) => Optimizer::RmspropMomentum,
            (other, true) => other,
            (other, false) => {
                return Err(Failure::input(format!("`--momentum` does not go with `--optimizer {}`", other.name()))
                    .help("it belongs to `--optimizer sgd` and `rmsprop`"));
            }
        })
    }

    /// The momentum of those names that have it where nobody says how much.
    fn usual_momentum(self) -> f64 {
        if matches!(self, Optimizer::SgdMomentum | Optimizer::RmspropMomentum) { USUAL_MOMENTUM } else { 0.0 }
    }
}

impl OptimizerArguments {
    /// The optimizer they describe.
    pub fn build(&self) -> Result<optimizer::Optimizer, Failure> {
        let wrong = |what: &str| Err(Failure::input(what));
        let optimizer = self.planned()?;
        let is_sgd = matches!(optimizer, Optimizer::Sgd | Optimizer::SgdMomentum);
        if !is_sgd && self.nesterov {
            return wrong("`--nesterov` belongs to `--optimizer sgd`");
        }
        if self.nesterov && optimizer == Optimizer::Sgd {
            return wrong("`--nesterov` needs `--momentum`");
        }
        if self.lr_decay != 0.0 && optimizer != Optimizer::Adagrad {
            return wrong("`--lr-decay` belongs to `--optimizer adagrad`; others take `--lr-schedule`");
        }
        if self.betas != USUAL_BETAS && !matches!(optimizer, Optimizer::Adam | Optimizer::Adamw) {
            return wrong("`--betas` belong to `--optimizer adam` and `adamw`");
        }
        if self.alpha > 1.0 {
            return wrong("`--alpha` is at most 1");
        }
        Ok(optimizer::Optimizer { rule: self.rule()?, rate: self.lr_schedule })
    }

    fn rule(&self) -> Result<Rule, Failure> {
        let &[first, second] = &self.betas[..] else {
            return Err(Failure::input("`--betas` takes two numbers, for example 0.9,0.999"));
        };
        if first >= 1.0 || second >= 1.0 {
            return Err(Failure::input("`--betas` are below 1"));
        }
        let usual = if matches!(self.optimizer, Optimizer::Adam | Optimizer::Adamw) { 0.001 } else { 0.01 };
        let learning_rate = self.lr.unwrap_or(usual);
        let epsilon = self.eps.unwrap_or(if self.optimizer == Optimizer::Adagrad { 1e-10 } else { 1e-8 });
        let decoupled = self.optimizer == Optimizer::Adamw;
        let weight_decay = self.weight_decay.unwrap_or(if decoupled { 0.01 } else { 0.0 });
        let (momentum, nesterov) = (self.momentum.unwrap_or(self.optimizer.usual_momentum()), self.nesterov);
        Ok(match self.optimizer {
            Optimizer::Sgd | Optimizer::SgdMomentum => Rule::Sgd { learning_rate, momentum, nesterov, weight_decay },
            Optimizer::Adam | Optimizer::Adamw => {
                Rule::Adam { learning_rate, betas: (first, second), epsilon, weight_decay, decoupled }
            }
            Optimizer::Rmsprop | Optimizer::RmspropMomentum => {
                Rule::RmsProp { learning_rate, alpha: self.alpha, epsilon, weight_decay, momentum }
            }
            Optimizer::Adagrad => Rule::Adagrad { learning_rate, decay: self.lr_decay, epsilon, weight_decay },
        })
    }

    /// What they do that one might not expect.
    pub fn remarks(&self, screen: &Screen) {
        if self.lr == Some(0.0) {
            screen.warn("`--lr 0` moves no parameter: losses are those of the weights that the run begins with");
        }
    }

    /// The same, as plans name it.
    pub fn planned(&self) -> Result<Optimizer, Failure> {
        self.optimizer.with_momentum(self.momentum)
    }
}

/// `warmup:100,cosine:0.1` and the like.
fn rate(text: &str) -> Result<Rate, String> {
    let asked =
        "it is constant, step:N:FACTOR, cosine[:FLOOR] or linear[:FLOOR], with or without `warmup:N,` before it";
    let (warmup, shape) = match text.strip_prefix("warmup:") {
        Some(rest) => rest.split_once(',').unwrap_or((rest, "constant")),
        None => ("0", text),
    };
    let warmup = warmup.parse::<u32>().map_err(|_| asked.to_string())?;
    let mut parts = shape.split(':');
    let (name, first, second) = (parts.next().unwrap_or_default(), parts.next(), parts.next());
    let floor = |given: Option<&str>| {
        let value = given.map_or(Some(0.0), |text| text.parse::<f64>().ok());
        value.filter(|value| (0.0..=1.0).contains(value)).ok_or("a floor is a share of the full rate, from 0 to 1")
    };
    let shape = match (name, first, second, parts.next()) {
        ("constant", None, None, None) => Shape::Constant,
        ("step", Some(every), Some(factor), None) => {
            let every = every.parse::<u32>().ok().filter(|every| *every > 0);
            let every = every.ok_or("step:N:FACTOR takes a number of minibatches above 0")?;
            Shape::Step { every, factor: positive(factor)? }
        }
        ("cosine", given, None, None) => Shape::Cosine { floor: floor(given)? },
        ("linear", given, None, None) => Shape::Linear { floor: floor(given)? },
        _ => return Err(asked.to_string()),
    };
    Ok(Rate { warmup, shape })
}

/// Reads a finite number of at least 0.
pub fn positive(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0);
    value.ok_or_else(|| "it must be a finite number of at least 0".to_string())
}
