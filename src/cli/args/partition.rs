//! Arguments of `pipec partition`, also for the published instances.

use crate::cli::args::loss::LossArguments;
use crate::cli::args::plan::PlanArguments;
use crate::cli::args::{Devices, Dims, named};
use clap::Args;
use pipec::costs::{CostInput, ModelFormat};
use pipec::error::Error;
use pipec::plan::request::PlanRequest;
use std::path::PathBuf;

/// The file formats.
const FORMATS: &[(&str, &str, ModelFormat)] = &[
    ("onnx", "An ONNX model", ModelFormat::Onnx),
    ("pt2", "A model written by torch.export.save", ModelFormat::Pt2),
    ("pipedream", "A PipeDream profile, graph.txt", ModelFormat::Pipedream),
    (
        "dnn-partitioning",
        "A device-placement instance: JSON of Microsoft's dnn-partitioning",
        ModelFormat::DnnPartitioning,
    ),
    ("piper", "An instance of layers with several configurations: JSON of Microsoft's Piper", ModelFormat::Piper),
];

/// Arguments of `pipec partition`.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Examples:\n  pipec partition model.onnx --gpus 8\n  pipec partition model.onnx --profile profile.json --cluster cluster.toml -o plan.json\n  pipec partition gpt.onnx --levels 8:450GB/s,2:50GB/s --microbatches 16 --optimizer adamw --compare\n  pipec partition gpt.onnx --levels 8:450GB/s,64:50GB/s --batch 1536 --optimizer adamw"
)]
pub struct Arguments {
    /// The model, or a published profile
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Format of FILE [default: from its name, pipedream for .txt, otherwise a model; required for instances]
    #[arg(long, value_parser = named(FORMATS), value_name = "FORMAT", help_heading = "Model")]
    pub from: Option<ModelFormat>,
    /// Costs: a file of `pipec profile`, or analytic[:KIND] for the roofline of a device type [default: analytic]
    #[arg(long, value_name = "FILE|analytic[:KIND]", help_heading = "Model")]
    pub profile: Option<CostInput>,
    #[command(flatten)]
    pub devices: Devices,
    #[command(flatten)]
    pub dims: Dims,
    #[command(flatten)]
    pub loss: LossArguments,
    #[command(flatten)]
    pub plan_options: PlanArguments,
    /// Global batch: samples per update of the weights; micro-batches, tensor parallelism, ZeRO and schedule become part of the search
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 32), help_heading = "Schedule")]
    pub batch: Option<u64>,
    /// Allow non-contiguous sets of nodes on a device (dnn-partitioning instances)
    #[arg(long, help_heading = "Constraints")]
    pub noncontiguous: bool,
    /// Also place nodes on the CPUs of the file (dnn-partitioning instances)
    #[arg(long, help_heading = "Devices")]
    pub cpus: bool,
    /// Also print the candidates that the plan was chosen from
    #[arg(long, help_heading = "Results")]
    pub compare: bool,
    /// Output file of the plan; - is standard output [default: MODEL.plan.json in the current folder, unless that is another model's]
    #[arg(short, long, value_name = "FILE", help_heading = "Results")]
    pub output: Option<PathBuf>,
}

impl Arguments {
    /// The request; `protected_output` is the file that gets the plan if the user named none.
    pub fn request(&self, protected_output: Option<PathBuf>) -> Result<PlanRequest, Error> {
        if self.from == Some(ModelFormat::Pipedream)
            || self.from.is_none() && self.file.extension().is_some_and(|e| e == "txt")
        {
            let flags = [("--profile", self.profile.is_some()), ("--loss", self.loss.loss.is_some())];
            if let Some((flag, _)) = flags.into_iter().find(|(_, is_given)| *is_given) {
                return Err(Error::input(format!(
                    "`{flag}` cannot be combined with `--from pipedream`: the file has its own costs"
                )));
            }
        }
        Ok(PlanRequest {
            model: self.file.clone(),
            format: self.from,
            costs: self.profile.clone().unwrap_or_default(),
            cluster: self.devices.request()?,
            import: self.dims.import.clone().into(),
            micro_batch: self.dims.micro_batch,
            loss: self.loss.counted_loss(),
            batch: self.batch,
            options: self.plan_options.options()?,
            protected_output,
        })
    }
}
