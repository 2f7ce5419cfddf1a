//! The planning flags.

use crate::cli::args::optimizer::{self, optimizers};
use crate::cli::args::{memory, schedule};
use clap::Args;
use compiler::cluster::unit;
use compiler::partition::partitioners::Partitioner;
use compiler::plan::groups::MOST as MAX_DEGREE;
use compiler::plan::problem::{CostModel, InFlight, Objective, Recomputation, Target};
use compiler::plan::zero::{LEVELS, MOST, Zero};
use compiler::profile::precision::Precision;
use pipec::costs::PrecisionChoice;
use pipec::error::Error;
use pipec::plan::optimizer::Optimizer;
use pipec::plan::request::{BucketSize, PlanOptions, ScheduleChoice};
use pipec::plan::tensor_parallel::TensorParallel;
use pipec::plan::zero::ZeroStage;
use std::time::Duration;

/// The default of `compiler::plan::buckets`.
const USUAL_BUCKET: &str = "25MiB";

/// The default of `pipec::plan::request`.
const USUAL_GAP: &str = "0.5%";

/// Search settings and constraints.
#[derive(Clone, Debug, Args)]
pub struct PlanArguments {
    /// Cost model: pipec (models links, replicas and schedule), paper (formula of the PipeDream paper) or pipedream (formula of its released optimizer)
    #[arg(long, value_name = "MODEL", value_parser = ["pipec", "paper", "pipedream"], default_value = "pipec", help_heading = "Costs and memory")]
    pub cost: String,
    /// PipeDream's activation compression ratio; without it, `--cost pipedream` treats transfers between stages as free
    #[arg(long, value_name = "R", help_heading = "Costs and memory")]
    pub activation_compression: Option<f64>,
    /// Memory limit per device, for example 16GB [default: the memory of the device]
    #[arg(long, value_name = "SIZE", help_heading = "Costs and memory")]
    pub memory: Option<String>,
    /// Micro-batches per minibatch
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 20), help_heading = "Schedule")]
    pub microbatches: u32,
    /// Pipeline schedule: a name, a table FILE.csv, programs FILE.json, or the best synchronous schedule (auto) [default: 1f1b-rr; 1f1b with micro-batches, a batch or a target; inference with --objective latency]
    #[arg(long, value_name = "NAME|FILE|auto", value_parser = schedule::any, help_heading = "Schedule")]
    pub schedule: Option<ScheduleChoice>,
    /// Stages per rank, for interleaved and bfs [default: 2; zbv and dualpipev have 2]
    #[arg(long, value_name = "V", value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Schedule")]
    pub chunks: Option<u32>,
    /// Objective to minimise: minibatch time (throughput), peak memory per device (memory), or end-to-end latency of an inference pipeline (latency)
    #[arg(long, value_name = "WHAT", default_value = "throughput", value_parser = ["throughput", "memory", "latency"], help_heading = "Search")]
    pub objective: String,
    /// Target framework: equal replicas, a synchronous schedule and, for all but torch, cuts at module boundaries
    #[arg(long, value_name = "NAME", value_parser = ["torchtitan", "megatron", "deepspeed", "torch"], help_heading = "Constraints")]
    pub target: Option<String>,
    /// Partitioning algorithm: pipec (combines all heuristics), pipedream (PipeDream's planner), milp (pipec, then integer programs), exhaustive (up to 12 ops), or a fixed baseline (data-parallel, uniform, single)
    #[arg(long, value_name = "NAME", default_value = "pipec",
          value_parser = ["pipec", "pipedream", "milp", "exhaustive", "data-parallel", "uniform", "single"], help_heading = "Search")]
    pub partitioner: String,
    /// Replicas of each stage, for example 2,1,1; the planner chooses the cuts
    #[arg(long, value_name = "R,R,…", value_delimiter = ',', action = clap::ArgAction::Set, num_args = 1, value_parser = replicas, help_heading = "Constraints")]
    pub stages: Option<Vec<u32>>,
    /// End a stage after each of these nodes, modules or op ids
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', help_heading = "Constraints")]
    pub cut_after: Option<Vec<String>>,
    /// Assign a node, a module or an op id to a stage, counted from 0: --pin encoder=0,lm_head=3
    #[arg(long, value_name = "NAME=STAGE,…", value_delimiter = ',', value_parser = pin, help_heading = "Constraints")]
    pub pin: Vec<(String, u32)>,
    /// Maximum number of stages
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Constraints")]
    pub max_stages: Option<u32>,
    /// Use one replica per stage
    #[arg(long, help_heading = "Constraints")]
    pub no_replication: bool,
    /// Tensor-parallel degree: a number (must divide the innermost level), auto, or never [default: never; auto with --batch]
    #[arg(long, value_name = "never|auto|N", value_parser = tensor_parallel, help_heading = "Constraints")]
    pub tensor: Option<TensorParallel>,
    /// The same as `--tensor never`
    #[arg(long, conflicts_with = "tensor", help_heading = "Constraints")]
    pub no_tensor: bool,
    /// Activation recomputation: auto (as few ops as needed, in stages that do not fit otherwise), never, or full (all ops)
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = ["auto", "never", "full"], help_heading = "Costs and memory")]
    pub recompute: String,
    /// The same as `--recompute never`
    #[arg(long, conflicts_with = "recompute", help_heading = "Costs and memory")]
    pub no_recompute: bool,
    /// Optimizer, for its memory and step time
    #[arg(long, value_parser = optimizers(), value_name = "NAME", default_value = "sgd", help_heading = "Costs and memory")]
    pub optimizer: Optimizer,
    /// sgd, rmsprop: momentum used in training; a non-zero value adds one optimizer-state value per weight
    #[arg(long, value_name = "X", value_parser = optimizer::positive, help_heading = "Costs and memory")]
    pub momentum: Option<f64>,
    /// Precision of training: fp64, fp32, tf32, bf16 or fp16 (mixed, with f32 master weights) [default: that of the profile; bf16 on devices with bf16 tensor cores; else the model's]
    #[arg(long, alias = "dtype", value_name = "NAME", value_parser = precision, help_heading = "Model")]
    pub precision: Option<Precision>,
    /// Maximum number of states a search may visit [default: limits the search to seconds]
    #[arg(long, value_name = "STATES", help_heading = "Search")]
    pub budget: Option<u64>,
    /// End a search for a batch or a schedule at a plan that is at most this much slower than the lower bound
    #[arg(long, value_name = "PERCENT", default_value = USUAL_GAP, value_parser = gap, help_heading = "Search")]
    pub gap: f64,
    /// Wall-clock limit of `--partitioner milp`, for example 60s; its plan may then differ between runs
    #[arg(long, value_name = "TIME", value_parser = time_limit, help_heading = "Search")]
    pub time_limit: Option<Duration>,
    /// In-flight minibatches on each replica of a stage: auto, pipedream (the published rule), or one number per stage
    #[arg(long, value_name = "auto|pipedream|N,N,…", default_value = "auto", value_parser = in_flight, help_heading = "Schedule")]
    pub in_flight: InFlight,
    /// Bucket size of gradient all-reduces, each started once its gradients are ready; 1B is one parameter per bucket, auto the power of two with the fastest simulated program
    #[arg(long, value_name = "SIZE|auto", default_value = USUAL_BUCKET, help_heading = "Schedule")]
    pub bucket: String,
    /// ZeRO stage, which shards across the replicas of a stage: nothing (0), optimizer state (1), gradients too (2), weights too (3), or the best (auto) [default: 0; auto with --batch]. 3:8 shards over groups of 8 replicas, which all-reduce their shards (hybrid sharding)
    #[arg(long, value_name = "LEVEL[:REPLICAS]|auto", value_parser = zero, help_heading = "Costs and memory")]
    pub zero: Option<ZeroStage>,
    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Search")]
    pub seed: u64,
}

impl PlanArguments {
    /// The options of the request.
    pub fn options(&self) -> Result<PlanOptions, Error> {
        let arguments = self.clone();
        let memory_limit = memory(arguments.memory.as_deref())?;
        let bucket = match arguments.bucket.as_str() {
            "auto" => BucketSize::Auto,
            text => BucketSize::Bytes(
                unit::bytes(text).map_err(|error| Error::input("cannot read `--bucket`").because(error))?,
            ),
        };
        Ok(PlanOptions {
            cost: cost(&arguments.cost),
            activation_compression: arguments.activation_compression,
            memory_limit,
            microbatches: arguments.microbatches,
            schedule: arguments.schedule,
            chunks: arguments.chunks,
            objective: match arguments.objective.as_str() {
                "memory" => Objective::Memory,
                "latency" => Objective::Latency,
                _ => Objective::Throughput,
            },
            target: arguments.target.as_deref().and_then(Target::from_name),
            partitioner: Partitioner::from_name(&arguments.partitioner).unwrap_or_default(),
            replicas: arguments.stages,
            cut_after: arguments.cut_after,
            pins: arguments.pin,
            max_stages: arguments.max_stages,
            no_replication: arguments.no_replication,
            tensor_parallel: arguments.tensor.or(arguments.no_tensor.then_some(TensorParallel::Never)),
            recompute: match arguments.no_recompute {
                true => Recomputation::Never,
                false => Recomputation::from_name(&arguments.recompute).unwrap_or_default(),
            },
            optimizer: arguments.optimizer,
            momentum: arguments.momentum,
            precision: arguments.precision.map_or(PrecisionChoice::Usual, PrecisionChoice::Given),
            budget: arguments.budget,
            gap: arguments.gap,
            time_limit: arguments.time_limit,
            in_flight: arguments.in_flight,
            bucket,
            zero: arguments.zero,
            seed: arguments.seed,
        })
    }
}

fn cost(name: &str) -> CostModel {
    match name {
        "pipedream" => CostModel::Pipedream,
        "paper" => CostModel::Paper,
        _ => CostModel::Pipec,
    }
}

/// Reads one number of `--stages`.
pub fn replicas(text: &str) -> Result<u32, String> {
    let value = text.trim().parse().ok().filter(|replicas| *replicas >= 1);
    value.ok_or_else(|| "write the replicas of each stage, separated by commas, for example 2,1,1".to_string())
}

/// Reads one pin of `--pin`.
pub fn pin(text: &str) -> Result<(String, u32), String> {
    let pin =
        text.rsplit_once('=').and_then(|(name, stage)| Some((name.trim().to_string(), stage.trim().parse().ok()?)));
    pin.filter(|(name, _)| !name.is_empty())
        .ok_or_else(|| "write a node, a module or an op id and its stage, for example encoder=0".to_string())
}

/// Reads `--precision`.
pub fn precision(text: &str) -> Result<Precision, String> {
    Precision::from_name(text).ok_or_else(|| {
        let names: Vec<&str> = Precision::ALL.into_iter().map(Precision::name).collect();
        format!("write one of {}", names.join(", "))
    })
}

/// Reads `--gap`.
pub fn gap(text: &str) -> Result<f64, String> {
    let percent = text.strip_suffix('%').and_then(|percent| percent.trim().parse::<f64>().ok());
    let gap = percent.filter(|percent| (0.0..=1000.0).contains(percent)).map(|percent| percent / 100.0);
    gap.ok_or_else(|| "write a percentage from 0% to 1000%, for example 1%".to_string())
}

/// Reads `--time-limit`.
pub fn time_limit(text: &str) -> Result<Duration, String> {
    let seconds = unit::seconds(text).map_err(|error| error.to_string())?;
    Duration::try_from_secs_f64(seconds.0).map_err(|error| error.to_string())
}

/// Reads `--in-flight`.
pub fn in_flight(text: &str) -> Result<InFlight, String> {
    match text {
        "auto" => Ok(InFlight::Auto),
        "pipedream" => Ok(InFlight::Pipedream),
        _ => {
            let caps: Result<Vec<u32>, _> = text.split(',').map(|cap| cap.trim().parse()).collect();
            caps.map(InFlight::Given).map_err(|_| "write auto, pipedream, or one number per stage: 3,2,1".to_string())
        }
    }
}

/// Reads `--tensor`.
fn tensor_parallel(text: &str) -> Result<TensorParallel, String> {
    match text {
        "never" => Ok(TensorParallel::Never),
        "auto" => Ok(TensorParallel::Auto),
        _ => match text.parse() {
            Ok(1) => Ok(TensorParallel::Never),
            Ok(devices) if (2..=MAX_DEGREE).contains(&devices) => Ok(TensorParallel::Degree(devices)),
            _ => Err(format!("write never, auto, or a tensor-parallel degree of up to {MAX_DEGREE}")),
        },
    }
}

/// Reads `--zero`.
fn zero(text: &str) -> Result<ZeroStage, String> {
    let (level, degree) = text.split_once(':').map_or((text, None), |(level, degree)| (level, Some(degree.parse())));
    match (level.parse(), degree) {
        _ if text == "auto" => Ok(ZeroStage::Auto),
        (Ok(level), None) if level <= MOST => Ok(ZeroStage::Given(Zero::over_all(level))),
        (Ok(level @ 1..=MOST), Some(Ok(degree @ 2..))) => Ok(ZeroStage::Given(Zero { level, degree })),
        _ => Err(format!("write a ZeRO stage {LEVELS}, with at least 2 replicas of a group as in 3:8, or auto")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pipec::plan::request::GAP;

    #[test]
    fn gaps_are_percentages() {
        assert_eq!(gap(USUAL_GAP), Ok(GAP));
        assert_eq!((gap("0%"), gap("200 %")), (Ok(0.0), Ok(2.0)));
        assert!(["1", "-1%", "x%", "nan%", "inf%", "1001%"].iter().all(|text| gap(text).is_err()));
    }
}
