//! Optimizers by name, and the optimizer flags of `pipec train`.

use crate::cli::args::named;
use clap::Args;
use clap::builder::TypedValueParser;
use pipec::error::Error;
use pipec::plan::optimizer::Optimizer;
use pipec::train::request::OptimizerRequest;
use runtime::optim::lr_schedule::{Rate, Shape};
use runtime::optim::optimizer::Rule;

/// Default betas of Adam (Kingma and Ba, 2015).
const USUAL_BETAS: [f64; 2] = [0.9, 0.999];

/// Optimizer flags.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Optimizer")]
pub struct OptimizerArguments {
    /// Optimizer
    #[arg(long, value_parser = optimizers(), value_name = "NAME", default_value = "sgd")]
    pub optimizer: Optimizer,
    /// Learning rate [default: 0.01 for sgd, rmsprop and adagrad, 0.001 for adam and adamw]
    #[arg(long, value_name = "X", value_parser = positive)]
    pub lr: Option<f64>,
    /// Learning-rate schedule, with an optional linear `warmup:N,` first: constant, step:N:FACTOR (multiply by FACTOR every N
    /// minibatches), cosine[:FLOOR] or linear[:FLOOR] (decay to this fraction of the learning rate)
    #[arg(long, value_name = "[warmup:N,]SHAPE", default_value = "constant", value_parser = rate)]
    pub lr_schedule: Rate,
    /// sgd, rmsprop: momentum [default: 0, 0.9 for sgd-momentum and rmsprop-momentum]
    #[arg(long, value_name = "X", value_parser = positive)]
    pub momentum: Option<f64>,
    /// sgd: use Nesterov momentum
    #[arg(long)]
    pub nesterov: bool,
    /// L2 penalty on the weights; adamw: decoupled weight decay [default: 0, adamw 0.01]
    #[arg(long, value_name = "X", value_parser = positive)]
    pub weight_decay: Option<f64>,
    /// adam, adamw: beta1 and beta2
    #[arg(long, value_name = "A,B", value_delimiter = ',', num_args = 1, default_value = "0.9,0.999", value_parser = positive)]
    pub betas: Vec<f64>,
    /// rmsprop: smoothing constant of the mean square
    #[arg(long, value_name = "X", default_value_t = 0.99, value_parser = positive)]
    pub alpha: f64,
    /// adagrad: learning-rate decay; the learning rate is divided by 1 + (step - 1) times this
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = positive)]
    pub lr_decay: f64,
    /// All but sgd: epsilon added to the denominator [default: 1e-8, adagrad 1e-10]
    #[arg(long, value_name = "X", value_parser = positive)]
    pub eps: Option<f64>,
}

/// A parser of the names of optimizers.
pub fn optimizers() -> impl TypedValueParser<Value = Optimizer> {
    named(&[
        ("sgd", "Stochastic gradient descent", Optimizer::Sgd),
        ("sgd-momentum", "With momentum", Optimizer::SgdMomentum),
        ("adam", "Adam", Optimizer::Adam),
        ("adamw", "Adam with decoupled weight decay", Optimizer::Adamw),
        ("rmsprop", "RMSProp", Optimizer::Rmsprop),
        ("rmsprop-momentum", "With momentum", Optimizer::RmspropMomentum),
        ("adagrad", "Adagrad", Optimizer::Adagrad),
    ])
}

impl OptimizerArguments {
    /// The requested optimizer.
    pub fn request(&self) -> Result<OptimizerRequest, Error> {
        let refuse = |message: &str| Err(Error::input(message));
        let optimizer = self.optimizer.with_momentum(self.momentum)?;
        let is_sgd = matches!(optimizer, Optimizer::Sgd | Optimizer::SgdMomentum);
        if !is_sgd && self.nesterov {
            return refuse("`--nesterov` requires `--optimizer sgd`");
        }
        if self.nesterov && optimizer == Optimizer::Sgd {
            return refuse("`--nesterov` requires `--momentum`");
        }
        if self.lr_decay != 0.0 && optimizer != Optimizer::Adagrad {
            return refuse("`--lr-decay` requires `--optimizer adagrad`; use `--lr-schedule` with other optimizers");
        }
        if self.betas != USUAL_BETAS && !matches!(optimizer, Optimizer::Adam | Optimizer::Adamw) {
            return refuse("`--betas` requires `--optimizer adam` or `adamw`");
        }
        if self.alpha > 1.0 {
            return refuse("`--alpha` must be at most 1");
        }
        Ok(OptimizerRequest { optimizer, rule: self.rule()?, rate: self.lr_schedule })
    }

    fn rule(&self) -> Result<Rule, Error> {
        let name = self.optimizer;
        let &[beta1, beta2] = &self.betas[..] else {
            return Err(Error::input("`--betas` takes two numbers, for example 0.9,0.999"));
        };
        if beta1 >= 1.0 || beta2 >= 1.0 {
            return Err(Error::input("`--betas` must be below 1"));
        }
        let default_rate = if matches!(name, Optimizer::Adam | Optimizer::Adamw) { 0.001 } else { 0.01 };
        let learning_rate = self.lr.unwrap_or(default_rate);
        let epsilon = self.eps.unwrap_or(if name == Optimizer::Adagrad { 1e-10 } else { 1e-8 });
        let decoupled = name == Optimizer::Adamw;
        let weight_decay = self.weight_decay.unwrap_or(if decoupled { 0.01 } else { 0.0 });
        let (momentum, nesterov) = (self.momentum.unwrap_or(name.default_momentum()), self.nesterov);
        Ok(match name {
            Optimizer::Sgd | Optimizer::SgdMomentum => Rule::Sgd { learning_rate, momentum, nesterov, weight_decay },
            Optimizer::Adam | Optimizer::Adamw => {
                Rule::Adam { learning_rate, betas: (beta1, beta2), epsilon, weight_decay, decoupled }
            }
            Optimizer::Rmsprop | Optimizer::RmspropMomentum => {
                Rule::RmsProp { learning_rate, alpha: self.alpha, epsilon, weight_decay, momentum }
            }
            Optimizer::Adagrad => Rule::Adagrad { learning_rate, decay: self.lr_decay, epsilon, weight_decay },
        })
    }
}

/// Reads `--lr-schedule`, for example `warmup:100,cosine:0.1`.
fn rate(text: &str) -> Result<Rate, String> {
    let expected =
        "write constant, step:N:FACTOR, cosine[:FLOOR] or linear[:FLOOR], with an optional `warmup:N,` first";
    let (warmup, shape) = match text.strip_prefix("warmup:") {
        Some(rest) => rest.split_once(',').unwrap_or((rest, "constant")),
        None => ("0", text),
    };
    let warmup = warmup.parse::<u32>().map_err(|_| expected.to_string())?;
    let mut parts = shape.split(':');
    let (name, first, second) = (parts.next().unwrap_or_default(), parts.next(), parts.next());
    let floor = |text: Option<&str>| {
        let value = text.map_or(Some(0.0), |text| text.parse::<f64>().ok());
        value
            .filter(|value| (0.0..=1.0).contains(value))
            .ok_or("the floor is a fraction of the full learning rate, from 0 to 1")
    };
    let shape = match (name, first, second, parts.next()) {
        ("constant", None, None, None) => Shape::Constant,
        ("step", Some(every), Some(factor), None) => {
            let every = every.parse::<u32>().ok().filter(|every| *every > 0);
            let every = every.ok_or("step:N:FACTOR takes a number of minibatches above 0")?;
            Shape::Step { every, factor: positive(factor)? }
        }
        ("cosine", text, None, None) => Shape::Cosine { floor: floor(text)? },
        ("linear", text, None, None) => Shape::Linear { floor: floor(text)? },
        _ => return Err(expected.to_string()),
    };
    Ok(Rate { warmup, shape })
}

/// Reads a finite number of at least 0.
pub fn positive(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0);
    value.ok_or_else(|| "it must be a finite number of at least 0".to_string())
}
