//! Reading the files that verbs are given.

use crate::cmd::partition::Arguments;
use crate::failure::Failure;
use crate::screen::Screen;
use compiler::cluster::Cluster;
use compiler::cluster::device::Kind;
use compiler::import::pipedream;
use compiler::plan::problem::{CostModel, Problem};
use compiler::plan::{Plan, PlannedModel, PlannedProfile, read};
use compiler::profile::Method;
use compiler::profile::cost_graph::CostGraph;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The most bytes of a plan file.
const MOST_PLAN_BYTES: u64 = 256 << 20;

/// The text of a file of at most `most` bytes.
pub fn text(path: &Path, most: u64) -> Result<String, Failure> {
    let fail = |why: String| Failure::file("read", path, why);
    let file = File::open(path).map_err(|error| fail(error.to_string()))?;
    let about = file.metadata().map_err(|error| fail(error.to_string()))?;
    if about.is_dir() {
        return Err(fail("it is a folder".to_string()));
    }
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(|error| fail(error.to_string()))?;
    if bytes.len() as u64 > most {
        return Err(fail(format!("it is larger than {most} bytes")));
    }
    String::from_utf8(bytes).map_err(|error| fail(format!("it is not UTF-8 text: {error}")))
}

/// A plan.
pub fn plan(path: &Path) -> Result<Plan, Failure> {
    let text = text(path, MOST_PLAN_BYTES)?;
    read::from_json(&text).map_err(|error| {
        Failure::file("read the plan", path, error).help("`pipec schema plan` prints what a plan looks like")
    })
}

/// Writes a file whole or not at all.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let part = beside(path);
    let written = std::fs::write(&part, bytes).and_then(|()| std::fs::rename(&part, path));
    written.map_err(|error| {
        // What is left of a failed write helps nobody.
        let _ = std::fs::remove_file(&part);
        Failure::file("write", path, error)
    })
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.part", std::process::id()));
    path.with_file_name(name)
}

/// `folder/model.onnx` becomes `model.KIND.json` in the current folder.
pub fn default_output(path: &Path, kind: &str) -> PathBuf {
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let stem = stem.strip_suffix(".graph").unwrap_or(&stem).to_string();
    PathBuf::from(format!("{}.{kind}.json", if stem.is_empty() { "model" } else { &stem }))
}

/// Whether `-o` means standard output.
pub fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}

/// The formats of models and published profiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// A profile of PipeDream, graph.txt.
    Pipedream,
}

/// A model as costs, ready to be asked about.
pub struct Costs {
    /// The costs.
    pub graph: CostGraph,
    /// The device kind that they are for, where one is named.
    pub kind: Option<&'static Kind>,
    /// Whether the costs know the device, so that its memory is a limit.
    pub has_device: bool,
    /// The model.
    pub model: PlannedModel,
    /// Where the costs came from.
    pub profile: PlannedProfile,
    /// Samples in one micro-batch.
    pub micro_batch: u64,
}

impl Costs {
    /// The question about these costs, with the usual settings.
    pub fn problem(&self, cluster: Cluster, cost: CostModel) -> Problem {
        let mut problem = Problem::new(self.graph.clone(), cluster, cost);
        problem.model = self.model.clone();
        problem.profile = self.profile.clone();
        problem.micro_batch = self.micro_batch;
        problem
    }
}

/// The costs that the arguments name.
pub fn costs(arguments: &Arguments, _screen: &Screen) -> Result<Costs, Failure> {
    let path = &arguments.file;
    let text = text(path, pipedream::MAX_BYTES as u64)?;
    let graph = pipedream::read(&text).map_err(|error| {
        Failure::file("read the profile", path, error).help("`--from` names the format of the file")
    })?;
    let model = PlannedModel {
        file: file_name(path),
        sha256: sha256(text.as_bytes()),
        ops: graph.ops.len() as u64,
        ..PlannedModel::default()
    };
    let profile = PlannedProfile { sha256: model.sha256.clone(), method: Method::Imported };
    let micro_batch = arguments.dims.micro_batch.unwrap_or(1);
    Ok(Costs { graph, kind: None, has_device: false, model, profile, micro_batch })
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
