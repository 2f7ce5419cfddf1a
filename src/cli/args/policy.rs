//! The precision, clipping, running-statistics and weight-staleness flags of `pipec train`.

use crate::cli::args::plan::precision;
use clap::{Args, ValueEnum};
use compiler::profile::precision::Precision;
use pipec::error::Error;
use pipec::train::request::{self, PolicyRequest};

/// Precision, clipping, running-statistics and weight-staleness flags.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Optimizer")]
pub struct PolicyArguments {
    /// Precision: fp64, fp32, tf32 (fp32 with matrix products in TF32 on GPUs), bf16 or fp16; the last two keep master weights, gradient sums and statistics in f32 [default: the plan's; without a plan, the model's]
    #[arg(long, alias = "dtype", value_name = "NAME", value_parser = precision)]
    precision: Option<Precision>,
    /// Clip gradients to this norm: global under synchronous schedules, per stage otherwise
    #[arg(long, value_name = "X", value_parser = norm)]
    clip_norm: Option<f64>,
    /// Update running statistics per micro-batch (batch), or once per minibatch with its statistics (deferred)
    #[arg(long, value_enum, value_name = "RULE", default_value = "batch")]
    bn: Bn,
    /// Handling of weights that change while a minibatch is in flight [default: the schedule's]
    #[arg(long, value_enum, value_name = "NAME")]
    staleness: Option<Staleness>,
    /// pipemare: minibatches until the full learning rate is reached [default: a quarter of all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    anneal: Option<u32>,
}

/// Update rule of running statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Bn {
    /// Per micro-batch, with its statistics
    Batch,
    /// Once per minibatch, with its statistics
    Deferred,
}

/// Handling of stale weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Staleness {
    /// Weight stashing: a minibatch's backward uses the weight version of its forward
    Stash,
    /// Weight stashing, and all stages use the same weight version for a minibatch
    VerticalSync,
    /// One weight version: forwards use weights predicted for the time of the update
    Predict,
    /// One weight version: learning rates are scaled by delay at first, and backwards use approximations of the forward's weights
    Pipemare,
    /// One weight version: forward and backward each use the newest weights
    None,
}

impl PolicyArguments {
    /// The requested policy.
    pub fn request(&self) -> Result<PolicyRequest, Error> {
        if self.anneal.is_some() && self.staleness != Some(Staleness::Pipemare) {
            return Err(Error::input("`--anneal` requires `--staleness pipemare`"));
        }
        Ok(PolicyRequest {
            precision: self.precision,
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
