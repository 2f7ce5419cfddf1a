//! The precision, clipping, running-statistics and weight-staleness flags of `pipec train`.

use crate::cli::args::named;
use crate::cli::args::plan::precision;
use clap::{ArgAction, Args};
use compiler::profile::precision::Precision;
use pipec::error::Error;
use pipec::train::request::{PolicyRequest, Staleness};

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
    #[arg(long, value_parser = named(STATISTICS), action = ArgAction::Set, value_name = "RULE", default_value = "batch")]
    bn: bool,
    /// Handling of weights that change while a minibatch is in flight [default: the schedule's]
    #[arg(long, value_parser = named(STALENESS), value_name = "NAME")]
    staleness: Option<Staleness>,
    /// pipemare: minibatches until the full learning rate is reached [default: a quarter of all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    anneal: Option<u32>,
}

/// Update rules of running statistics; true if they are deferred.
const STATISTICS: &[(&str, &str, bool)] = &[
    ("batch", "Per micro-batch, with its statistics", false),
    ("deferred", "Once per minibatch, with its statistics", true),
];

const PIPEMARE: &str = "One weight version: learning rates are scaled by delay at first, and backwards use approximations of the forward's weights";

/// Handling of stale weights.
#[rustfmt::skip]
const STALENESS: &[(&str, &str, Staleness)] = &[
    ("stash", "Weight stashing: a minibatch's backward uses the weight version of its forward", Staleness::Stash),
    ("vertical-sync", "Weight stashing, and all stages use the same weight version for a minibatch", Staleness::VerticalSync),
    ("predict", "One weight version: forwards use weights predicted for the time of the update", Staleness::Predict),
    ("pipemare", PIPEMARE, Staleness::Pipemare(None)),
    ("none", "One weight version: forward and backward each use the newest weights", Staleness::None),
];

impl PolicyArguments {
    /// The requested policy.
    pub fn request(&self) -> Result<PolicyRequest, Error> {
        let is_pipemare = matches!(self.staleness, Some(Staleness::Pipemare(_)));
        if self.anneal.is_some() && !is_pipemare {
            return Err(Error::input("`--anneal` requires `--staleness pipemare`"));
        }
        Ok(PolicyRequest {
            precision: self.precision,
            clip_norm: self.clip_norm,
            deferred_statistics: self.bn,
            staleness: if is_pipemare { Some(Staleness::Pipemare(self.anneal)) } else { self.staleness },
        })
    }
}

fn norm(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| value.is_finite() && *value > 0.0);
    value.ok_or_else(|| "it must be a finite number above 0".to_string())
}
