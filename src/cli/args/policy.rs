//! The flags of `pipec train` that say what is done beside the plain step: precision, clipping, running statistics, stale weights.

use clap::{Args, ValueEnum};
use compiler::tensor::DType;
use pipec::error::Error;
use pipec::train::request::{self, PolicyRequest};

/// What is done beside the plain step.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Updates")]
pub struct PolicyArguments {
    /// The type of all floats [default: the model's own]; bf16 and f16 keep weights, gradients' sums and statistics in f32
    #[arg(long, value_enum, value_name = "TYPE")]
    dtype: Option<Type>,
    /// Shorten the gradients of an update to this norm: over all parameters under schedules that flush, else stage by stage
    #[arg(long, value_name = "X", value_parser = norm)]
    clip_norm: Option<f64>,
    /// Whether running statistics are updated for each micro-batch (batch), or once with those of the whole minibatch (deferred)
    #[arg(long, value_enum, value_name = "RULE", default_value = "batch")]
    bn: Bn,
    /// What is done about weights that change while a minibatch is in flight [default: as the schedule does]
    #[arg(long, value_enum, value_name = "NAME")]
    staleness: Option<Staleness>,
    /// pipemare: minibatches until the learning rate is the full one [default: a quarter of all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    anneal: Option<u32>,
}

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Type {
    /// 8 bytes
    F64,
    /// 4 bytes
    F32,
    /// 2 bytes with the range of f32
    Bf16,
    /// 2 bytes; the loss is scaled
    F16,
}

/// When running statistics are updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Bn {
    /// For each micro-batch, with its statistics
    Batch,
    /// Once for each minibatch, with the statistics of all of it
    Deferred,
}

/// What is done about stale weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Staleness {
    /// A minibatch's backward uses the weights of its forward, which are kept until then
    Stash,
    /// The same, and all stages use weights of the same minibatch
    VerticalSync,
    /// One version: forwards use weights predicted for the time of the update
    Predict,
    /// One version: learning rates by delay at first, and backwards use weights set back to about those of the forward
    Pipemare,
    /// One version: forward and backward each use the newest weights
    None,
}

impl PolicyArguments {
    /// The requested policy.
    pub fn request(&self) -> Result<PolicyRequest, Error> {
        if self.anneal.is_some() && self.staleness != Some(Staleness::Pipemare) {
            return Err(Error::input("`--anneal` belongs to `--staleness pipemare`"));
        }
        Ok(PolicyRequest {
            dtype: self.dtype.map(|name| match name {
                Type::F64 => DType::F64,
                Type::F32 => DType::F32,
                Type::Bf16 => DType::Bf16,
                Type::F16 => DType::F16,
            }),
            clip_norm: self.clip_norm,
            deferred_statistics: self.bn == Bn::Deferred,
            staleness: self.staleness.map(|name| match name {
                Staleness::Stash => request::Staleness::Stash,
                Staleness::VerticalSync => request::Staleness::VerticalSync,
                Staleness::Predict => request::Staleness::Predict,
                Staleness::Pipemare => request::Staleness::Pipemare(self.anneal),
                Staleness::None => request::Staleness::None,
            }),
        })
    }
}

fn norm(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| value.is_finite() && *value > 0.0);
    value.ok_or_else(|| "it must be a finite number above 0".to_string())
}
