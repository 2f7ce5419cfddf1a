//! Reasons why a target cannot express a plan, with suggested planner options.

use crate::plan::schedule::Schedule;
use crate::plan::zero::Zero;
use crate::schedule::ScheduleError;
use crate::text::name::short_name;

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    #[error("the plan is for a published instance, whose nodes have times and names but no model")]
    Instance,
    #[error("schedule {} keeps several weight versions and {tool} supports one", .kind.name())]
    Versions { tool: &'static str, kind: Schedule },
    #[error("schedule {} does not train, and {tool} only trains", .kind.name())]
    TrainsNothing { tool: &'static str, kind: Schedule },
    #[error("stages have {replicas} replicas, and {tool} needs equally many for each")]
    UnequalReplicas { tool: &'static str, replicas: String },
    #[error("the plan has tensor-parallel degree {devices}, and this {tool} format cannot express it")]
    Shared { tool: &'static str, devices: u32 },
    #[error("the plan has expert-parallel degree {devices}, and this {tool} format cannot express it")]
    Experts { tool: &'static str, devices: u32 },
    #[error("the plan uses ZeRO stage {level}; with a pipeline, {tool} supports at most {most}")]
    Zero { tool: &'static str, level: u32, most: u32 },
    #[error("{tool} shards over all replicas, and the plan over groups of {} at ZeRO stage {}", .zero.degree, .zero.level)]
    ShardDegree { tool: &'static str, zero: Zero },
    #[error("{microbatches} micro-batches cannot be divided equally among {replicas} replicas")]
    Deal { microbatches: u32, replicas: u32 },
    #[error("{tool} has no schedule {}; it has {has}", .kind.name())]
    Schedule { tool: &'static str, kind: Schedule, has: &'static str, instead: &'static str },
    #[error("stage {stage} has no named module: its ops belong to no module of the source")]
    NoModules { stage: u32 },
    #[error("module `{}` is in stages {first} and {second}, and {tool} cannot split it", short_name(.module))]
    CutModule { tool: &'static str, module: String, first: u32, second: u32 },
    #[error("module `{}` of stage {stage} is within `{}`, and {tool} {why}", short_name(.module), short_name(.within))]
    Nested { tool: &'static str, module: String, within: String, stage: u32, why: &'static str },
    #[error("module `{}` of stage {stage} {why}", short_name(.module))]
    Place { module: String, stage: u32, why: String },
    #[error("the plan has no list of numbered layers, such as `layers.0` and `layers.1`")]
    NoLayers,
    #[error("the model has layers in `{}` and in `{}`, and {tool} has one list of transformer layers", short_name(.first), short_name(.second))]
    Lists { tool: &'static str, first: String, second: String },
    #[error("stage {stage} only has parts of nodes, and this format keeps nodes whole")]
    Parts { stage: u32 },
    #[error(transparent)]
    Order(#[from] ScheduleError),
    #[error("the schedule is for {found} {what}, the plan for {planned}")]
    Table { what: &'static str, found: u64, planned: u64 },
    #[error("{what}")]
    Model { what: String },
}

impl Refusal {
    /// The planner flags that give a supported plan for a target.
    pub fn remedy(&self, target: &str) -> Option<String> {
        // Targets without a `--target` value of their own use that of torch.
        let target = match target {
            "torchtitan" | "megatron" | "deepspeed" => target,
            _ => "torch",
        };
        let suggest = |flags: &str| {
            Some(format!("`pipec partition MODEL --target {target}{flags}` writes a plan that the target supports"))
        };
        match self {
            Refusal::Instance | Refusal::Model { .. } => None,
            // A pipeline with a flush and a single micro-batch would be sequential.
            Refusal::Versions { .. } | Refusal::TrainsNothing { .. } => suggest(" --schedule 1f1b --microbatches 4"),
            Refusal::UnequalReplicas { .. } => suggest(""),
            Refusal::Shared { .. } | Refusal::Experts { .. } => suggest(" --tensor never"),
            Refusal::ShardDegree { zero, .. } => suggest(&format!(" --zero {}", zero.level)),
            Refusal::Zero { most, .. } => suggest(&format!(" --zero {most}")),
            Refusal::Deal { replicas, .. } => suggest(&format!(" --microbatches {replicas}, or a multiple of it,")),
            Refusal::Schedule { instead, .. } => suggest(&format!(" --schedule {instead}")),
            Refusal::CutModule { .. } => suggest(""),
            Refusal::NoModules { .. } => suggest(" --max-stages N, with fewer stages than this,"),
            Refusal::Nested { .. } | Refusal::Place { .. } | Refusal::NoLayers | Refusal::Lists { .. } => Some(
                "`--to torch` can cut between any two ops of a model from torch.export, independently of modules"
                    .to_string(),
            ),
            Refusal::Parts { .. } => {
                Some("`pipec partition MODEL --cut-after NODE,…` ends stages at node boundaries".to_string())
            }
            Refusal::Order(ScheduleError::NoTable) => {
                Some("`--schedule FILE.csv` selects the file of the custom schedule".to_string())
            }
            Refusal::Order(_) | Refusal::Table { .. } => None,
        }
    }
}
