//! Optimizers, by their names in plans.

use crate::error::Error;

/// The momentum of `sgd-momentum` and `rmsprop-momentum` if none is given.
const DEFAULT_MOMENTUM: f64 = 0.9;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Optimizer {
    /// Stochastic gradient descent.
    Sgd,
    SgdMomentum,
    Adam,
    /// Adam with decoupled weight decay.
    Adamw,
    Rmsprop,
    RmspropMomentum,
    Adagrad,
}

impl Optimizer {
    const ALL: [Optimizer; 7] = [
        Optimizer::Sgd,
        Optimizer::SgdMomentum,
        Optimizer::Adam,
        Optimizer::Adamw,
        Optimizer::Rmsprop,
        Optimizer::RmspropMomentum,
        Optimizer::Adagrad,
    ];

    /// The name in plans and on the command line, and the state values for each weight.
    fn row(self) -> (&'static str, f64) {
        match self {
            Optimizer::Sgd => ("sgd", 0.0),
            Optimizer::SgdMomentum => ("sgd-momentum", 1.0),
            Optimizer::Adam => ("adam", 2.0),
            Optimizer::Adamw => ("adamw", 2.0),
            Optimizer::Rmsprop => ("rmsprop", 1.0),
            Optimizer::RmspropMomentum => ("rmsprop-momentum", 2.0),
            Optimizer::Adagrad => ("adagrad", 1.0),
        }
    }

    /// State values for each weight.
    pub fn state(self) -> f64 {
        self.row().1
    }

    pub fn name(self) -> &'static str {
        self.row().0
    }

    pub fn from_name(name: &str) -> Option<Optimizer> {
        Optimizer::ALL.into_iter().find(|optimizer| optimizer.name() == name)
    }

    /// The optimizer with this momentum: `sgd` with momentum is `sgd-momentum`, and `sgd-momentum` with none is `sgd`.
    pub fn with_momentum(self, momentum: Option<f64>) -> Result<Optimizer, Error> {
        let Some(momentum) = momentum else { return Ok(self) };
        Ok(match (self, momentum == 0.0) {
            (Optimizer::Sgd | Optimizer::SgdMomentum, true) => Optimizer::Sgd,
            (Optimizer::Sgd | Optimizer::SgdMomentum, false) => Optimizer::SgdMomentum,
            (Optimizer::Rmsprop | Optimizer::RmspropMomentum, true) => Optimizer::Rmsprop,
            (Optimizer::Rmsprop | Optimizer::RmspropMomentum, false) => Optimizer::RmspropMomentum,
            (other, true) => other,
            (other, false) => {
                return Err(Error::conflict("--momentum", format!("`--optimizer {}`", other.name()))
                    .with_help("it requires `--optimizer sgd` or `rmsprop`"));
            }
        })
    }

    /// The default momentum of an optimizer, by its name.
    pub fn default_momentum(self) -> f64 {
        if matches!(self, Optimizer::SgdMomentum | Optimizer::RmspropMomentum) { DEFAULT_MOMENTUM } else { 0.0 }
    }
}
