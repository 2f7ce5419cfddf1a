//! Reading the files that verbs are given.

use crate::cmd::partition::Arguments;
use crate::failure::Failure;
use crate::groups::Shareable;
use crate::loss::{Attributed, Counted, attributed};
use crate::machines;
use crate::model::{self, Loaded};
use crate::screen::Screen;
use crate::{advice, kind, output, replaced};
use compiler::cluster::device::{self, Kind};
use compiler::cluster::{Cluster, Device};
use compiler::graph::hash::sha256;
use compiler::import::onnx::name::shown;
use compiler::import::pipedream;
use compiler::pass::analytic::{self, Subject};
use compiler::pass::attribution::AttributionError;
use compiler::pass::costs::{cost_graph, dtype, fill};
use compiler::pass::precision::precision;
use compiler::plan::problem::{CostModel, Problem};
use compiler::plan::{Plan, PlannedModel, PlannedProfile, read};
use compiler::profile::cost_graph::CostGraph;
use compiler::profile::{self, Method, Profile};
use compiler::tensor::DType;
use profiler::scratch::{of_joint, scratch};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// The device kind whose kernels are ours.
pub const CPU: &str = "cpu";

/// The most bytes of a plan file.
pub const MOST_PLAN_BYTES: u64 = 256 << 20;

/// The text of a file of at most `most` bytes.
pub fn text(path: &Path, most: u64) -> Result<String, Failure> {
    let fail = |why: String| Failure::file("read", path, why);
    let file = File::open(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => fail("there is no such file".to_string()).help(advice::absent(path)),
        _ => fail(error.to_string()).help("check its permissions"),
    })?;
    let about = file.metadata().map_err(|error| fail(error.to_string()))?;
    if about.is_dir() {
        return Err(fail("it is a folder".to_string()).help("name a file in it"));
    }
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(|error| fail(error.to_string()))?;
    let is_text = str::from_utf8(&bytes).is_ok();
    if let Some((what, help)) = kind::of(&bytes).filter(|_| !is_text) {
        return Err(fail(what.to_string()).help(help));
    }
    if bytes.len() as u64 > most {
        return Err(fail(format!("it is larger than {most} bytes")));
    }
    String::from_utf8(bytes).map_err(|error| fail(format!("it is not UTF-8 text: {error}")))
}

/// A plan.
pub fn plan(path: &Path) -> Result<Plan, Failure> {
    if path.extension().is_some_and(|extension| extension == "onnx" || extension == "pt2") {
        let help = format!("`pipec partition {}` makes its plan", path.display());
        return Err(Failure::file("read the plan", path, "it is called as a model is, a plan is expected").help(help));
    }
    let text = text(path, MOST_PLAN_BYTES)?;
    read::from_json(&text).map_err(|error| {
        // A small model without weights may be text, too.
        let (why, help) = match kind::of(text.as_bytes()) {
            Some((what, help)) => (what.to_string(), help),
            None => match (other_file(&text, "plan"), cut_short(&text)) {
                (None, Some(why)) => (why, "copy it again, or `pipec partition` writes it anew"),
                (other, _) => {
                    (other.unwrap_or_else(|| error.to_string()), "`pipec schema plan` prints what a plan looks like")
                }
            },
        };
        Failure::file("read the plan", path, why).help(help)
    })
}

/// What a file says it is, where that is another kind of ours than the one that was expected.
pub fn other_file(text: &str, expected: &str) -> Option<String> {
    let value = serde_json::from_str::<serde_json::Value>(text);
    let schema = match &value {
        Ok(value) => value.get("schema")?.as_str()?,
        // A cluster is TOML.
        Err(_) => text.lines().find_map(|line| line.strip_prefix("schema = \"")?.split('"').next())?,
    };
    let kind = schema.strip_prefix("pipec.")?.split('/').next()?;
    (kind != expected).then(|| format!("it is a {} (`{}`), a {expected} is expected", shown(kind), shown(schema)))
}

/// Whether a file of JSON ends before what it began.
fn cut_short(text: &str) -> Option<String> {
    let error = serde_json::from_str::<serde_json::Value>(text).err().filter(serde_json::Error::is_eof)?;
    Some(format!("it ends early, after {} bytes, in line {}", text.len(), error.line()))
}

/// Writes a file whole or not at all, in place of its like alone. A link is followed; what is there and is no file, a pipe or a device, is
/// written into as it is.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let there = std::fs::metadata(path).ok();
    if there.is_some_and(|about| !about.is_file() && !about.is_dir()) {
        return std::fs::write(path, bytes).map_err(|error| output::unwritten(path, &error));
    }
    replaced::check_bytes(path, bytes)?;
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let part = output::part(&target);
    let written = std::fs::write(&part, bytes).and_then(|()| std::fs::rename(&part, &target));
    written.map_err(|error| {
        // What is left of a failed write helps nobody.
        let _ = std::fs::remove_file(&part);
        output::unwritten(path, &error)
    })
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
    /// A model in ONNX
    Onnx,
    /// A model that torch.export.save wrote
    Pt2,
    /// A profile of PipeDream, graph.txt
    Pipedream,
    /// An instance of device placement: JSON of Microsoft's dnn-partitioning
    DnnPartitioning,
    /// An instance of layers with choices: JSON of Microsoft's Piper
    Piper,
}

/// A model as costs on a cluster, ready to be asked about.
#[derive(Clone)]
pub struct Costs {
    /// The costs.
    pub graph: CostGraph,
    /// The devices.
    pub cluster: Cluster,
    /// Whether the memory of these devices is a limit: not where the device is a mere default.
    pub has_memory: bool,
    /// The model.
    pub model: PlannedModel,
    /// Why the model cannot be trained, where it cannot.
    pub untrainable: Option<String>,
    /// Where the costs came from.
    pub profile: PlannedProfile,
    /// Samples in one micro-batch.
    pub micro_batch: u64,
    /// Element type.
    pub dtype: String,
    /// The device whose costs these are, where that is known.
    pub source: Option<String>,
    /// What groups of devices can be asked about, where the ops are known.
    pub shareable: Option<Shareable>,
}

impl Costs {
    /// The question about these costs, with the usual settings.
    pub fn problem(self, cost: CostModel) -> Problem {
        let mut problem = Problem::new(self.graph, self.cluster, cost);
        problem.model = self.model;
        problem.profile = self.profile;
        problem.micro_batch = self.micro_batch;
        problem.dtype = self.dtype;
        problem
    }
}

/// What `--profile` says.
enum Told {
    /// The roofline of a device, or of the cluster's.
    Analytic(Option<&'static Kind>),
    /// A file, its SHA-256 and what it holds.
    File(PathBuf, String, Box<Profile>),
}

impl Told {
    /// The device of the costs, where that is not what the cluster is made of.
    fn other_kind(&self, cluster: &Cluster) -> Option<String> {
        let kind = &cluster.device.kind;
        let is = |name: &str| kind.eq_ignore_ascii_case(name);
        match self {
            Told::Analytic(known) => known.map(|known| known.name.to_string()).filter(|name| !is(name)),
            Told::File(_, _, profile) => {
                let name = &profile.device.name;
                // What is measured is a CPU, whose name is that of the processor.
                let is_cpu = profile.method == Method::Measured && device::find(name).is_none() && is("cpu");
                (!is_cpu && !is(name)).then(|| name.clone())
            }
        }
    }
}

/// The format of the file, as told or by its name.
pub fn format(arguments: &Arguments) -> Format {
    arguments.from.unwrap_or_else(|| format_of(&arguments.file))
}

/// The format of a file by its name.
pub fn format_of(path: &Path) -> Format {
    let is_text = path.extension().is_some_and(|extension| extension == "txt");
    match path.extension() {
        _ if is_text => Format::Pipedream,
        Some(extension) if extension == "pt2" => Format::Pt2,
        _ => Format::Onnx,
    }
}

/// The costs that the arguments name.
pub fn costs(arguments: &Arguments, screen: &Screen) -> Result<Costs, Failure> {
    match format(arguments) {
        Format::Pipedream => published(arguments),
        Format::Onnx | Format::Pt2 => imported(arguments, screen),
        Format::DnnPartitioning | Format::Piper => Err(Failure::bug("an instance has no costs of a graph")),
    }
}

fn published(arguments: &Arguments) -> Result<Costs, Failure> {
    let path = &arguments.file;
    if arguments.profile.is_some() {
        return Err(Failure::input("`--profile` does not go with `--from pipedream`: the file has its own costs"));
    }
    if arguments.loss.loss.is_some() {
        return Err(Failure::input("`--loss` does not go with `--from pipedream`: the file has its own costs"));
    }
    let cluster = machines::cluster(&arguments.devices, None)?;
    let micro_batch = arguments.dims.micro_batch.unwrap_or(1);
    let dtype = arguments.question.dtype.as_deref().unwrap_or("f32");
    let costs = published_on(path, cluster, micro_batch, dtype)?;
    Ok(Costs { has_memory: arguments.devices.cluster.is_some(), ..costs })
}

/// A published profile on a cluster.
pub fn published_on(path: &Path, cluster: Cluster, micro_batch: u64, dtype: &str) -> Result<Costs, Failure> {
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
    Ok(Costs {
        untrainable: None,
        graph,
        cluster,
        has_memory: false,
        profile: PlannedProfile { sha256: model.sha256.clone(), method: Method::Imported },
        model,
        micro_batch,
        dtype: dtype.to_string(),
        source: None,
        shareable: None,
    })
}

fn imported(arguments: &Arguments, screen: &Screen) -> Result<Costs, Failure> {
    let told = told(arguments.profile.as_deref())?;
    let cluster = match &told {
        Told::Analytic(kind) => machines::cluster(&arguments.devices, *kind)?,
        Told::File(_, _, profile) => machines::cluster_of(&arguments.devices, profile)?,
    };
    // Speeds relate devices of several classes to those of the costs.
    if let Some(other) = told.other_kind(&cluster).filter(|_| !cluster.is_mixed()) {
        let kind = &cluster.device.kind;
        screen.warn(&format!(
            "the costs are those of {}, the cluster's devices are of kind {}: times hold for the former only \
             (`--profile analytic` takes the data sheet of the latter)",
            shown(&other),
            shown(kind)
        ));
    }
    if let Some(from) = arguments.from {
        is_of(from, &arguments.file)?;
    }
    let loaded = model::load(&arguments.file, &arguments.dims.import, screen)?.asked(arguments.dims.micro_batch);
    let profiled = match &told {
        Told::File(_, _, profile) => Some(profile.settings.micro_batch),
        Told::Analytic(_) => None,
    };
    let micro_batch = loaded.micro_batch(profiled, screen);
    let times = match told {
        Told::Analytic(kind) => {
            let device = kind.map_or_else(|| cluster.device.clone(), Kind::device);
            screen.note(&format!(
                "costs are analytic, from the data sheet of {}: nothing was measured (`pipec profile` measures)",
                device.kind
            ));
            Times::Analytic(device)
        }
        Told::File(path, sha256, profile) => Times::Profile(path, sha256, profile),
    };
    let counted = counted(arguments, &times)?;
    let precision = arguments.question.precision();
    let costs = assemble(&loaded, micro_batch, cluster, times, precision, counted)?;
    if let Some(why) = &costs.untrainable {
        screen.warn(&format!("the model cannot be trained: {}; it is planned by its forward costs alone", shown(why)));
    }
    Ok(costs)
}

/// The loss whose costs are to be counted: that of the profile, whose times have it in them, or else what was said.
fn counted(arguments: &Arguments, times: &Times) -> Result<Counted, Failure> {
    let said = arguments.loss.said();
    let counts = |said: &Counted| !matches!(said, Counted::None);
    if arguments.question.infers() && said.as_ref().is_some_and(counts) {
        return Err(Failure::input("`--loss` does not go with a plan for inference").because("nothing is trained"));
    }
    let Times::Profile(path, _, profile) = times else {
        return Ok(said.unwrap_or(if arguments.question.infers() { Counted::None } else { Counted::Usual }));
    };
    let profiled = Counted::read(profile.settings.loss.as_deref())?;
    match said.filter(|said| *said != profiled) {
        None => Ok(profiled),
        Some(_) => {
            let has = profiled.written().map_or("no loss in it".to_string(), |loss| format!("the loss `{loss}` in it"));
            Err(Failure::input("`--loss` does not go with this profile")
                .because(format!("{} has {has}", path.display()))
                .help("`pipec profile MODEL --loss …` measures with another"))
        }
    }
}

/// Where the times of ops come from.
pub enum Times {
    /// The roofline of a device.
    Analytic(Device),
    /// A profile: its file, the SHA-256 of that, and what it holds.
    Profile(PathBuf, String, Box<Profile>),
}

/// The costs of a model at so many samples, with floats of its own type or of this one.
pub fn assemble(
    loaded: &Loaded,
    micro_batch: u64,
    mut cluster: Cluster,
    times: Times,
    floats: Option<DType>,
    counted: Counted,
) -> Result<Costs, Failure> {
    let mut graph = loaded.at(micro_batch)?;
    if let Some(floats) = floats {
        graph = precision(&graph, floats)
            .map_err(|error| Failure::input(format!("cannot plan {} in {floats}", loaded.model.file)).because(error))?;
    }
    let Attributed { attribution, counted, training, untrainable } = attributed(&graph, counted).map_err(|error| {
        let failure = Failure::input(format!("cannot cost {}", loaded.model.file)).because(&error);
        match error {
            AttributionError::Loss(loss) => failure.help(format!("{}; `--loss none` counts none", advice::loss(&loss))),
            _ => failure,
        }
    })?;
    let mut costs = cost_graph(&graph, &attribution);
    let model = loaded.planned(costs.ops.len(), counted.written());
    let (source, sheet) = match &times {
        Times::Analytic(device) => (device.kind.clone(), device.clone()),
        Times::Profile(_, _, profile) => {
            let name = &profile.device.name;
            (name.clone(), device::find(name).map_or_else(|| cluster.device.clone(), Kind::device))
        }
    };
    let profile = match times {
        Times::Analytic(device) => {
            let subject = Subject { model: loaded.profiled(), micro_batch, loss: counted.written() };
            let profile = analytic::profile(&graph, &attribution, &device, &subject);
            fill(&mut costs, &profile, None).map_err(|error| Failure::bug(&error.to_string()))?;
            // Kernels of other devices are not known here.
            if device.kind == CPU {
                let needed = scratch(&attribution);
                costs.ops.iter_mut().zip(needed).for_each(|(op, bytes)| op.workspace_bytes = bytes);
                let joint = costs.ops.iter_mut().zip(of_joint(&attribution));
                joint.for_each(|(op, joint)| [op.joint_bytes, op.joint_workspace_bytes] = joint);
            }
            PlannedProfile { sha256: String::new(), method: Method::Analytic }
        }
        Times::Profile(path, sha256, profile) => {
            fill(&mut costs, &profile, Some(&model.sha256)).map_err(|error| {
                let help =
                    format!("`pipec profile {}` with the same sizes and flags makes one that fits", loaded.model.file);
                Failure::file("use", &path, error).help(help)
            })?;
            PlannedProfile { sha256, method: profile.method }
        }
    };
    let dtype = dtype(&graph).name().to_string();
    machines::relate(&mut cluster, &source, &dtype);
    Ok(Costs {
        graph: costs,
        cluster,
        has_memory: true,
        model,
        profile,
        untrainable,
        micro_batch,
        dtype,
        source: Some(source),
        shareable: Some(Shareable { graph, training, device: sheet }),
    })
}

/// Refuses a model of another format than the one that was said: importers go by what a file holds.
fn is_of(from: Format, path: &Path) -> Result<(), Failure> {
    let mut start = [0; 2];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    // What cannot be read is told by the importer.
    let is_archive = read.is_ok() && start == *b"PK";
    let other = match (from, is_archive) {
        (Format::Pt2, false) if read.is_ok() => "it is not the zip archive that torch.export.save writes",
        (Format::Onnx, true) => "it is a zip archive: `--from pt2`, if torch.export.save wrote it",
        _ => return Ok(()),
    };
    Err(Failure::file("import", path, other).help("leave out `--from`: a model's format shows in its first bytes"))
}

/// Whether `--profile` asks for the roofline of a data sheet and names no file.
pub fn is_analytic(profile: Option<&str>) -> bool {
    profile.is_none_or(|profile| profile == "analytic" || profile.starts_with("analytic:"))
}

fn told(profile: Option<&str>) -> Result<Told, Failure> {
    match profile {
        None | Some("analytic") => Ok(Told::Analytic(None)),
        Some(text) => match text.strip_prefix("analytic:") {
            Some(kind) => Ok(Told::Analytic(Some(machines::kind(kind)?))),
            None => {
                let path = PathBuf::from(text);
                if !path.exists() && device::find(text).is_some() {
                    return Err(Failure::input(format!("there is no profile `{}`", shown(text)))
                        .help(format!("`--profile analytic:{text}` takes the data sheet of that kind of device")));
                }
                let (sha256, profile) = read_profile(&path)?;
                Ok(Told::File(path, sha256, Box::new(profile)))
            }
        },
    }
}

/// A profile and the SHA-256 of its file.
pub fn read_profile(path: &Path) -> Result<(String, Profile), Failure> {
    let text = text(path, MOST_PLAN_BYTES)?;
    let profile = profile::read::from_json(&text).map_err(|error| {
        let other = other_file(&text, "profile");
        let writes = "`pipec profile MODEL -o profile.json` writes one".to_string();
        let help = match other.as_deref() {
            Some(other) if other.starts_with("it is a cluster") => {
                format!("`--cluster {}` takes it; {writes}", shown(&path.display().to_string()))
            }
            _ => writes,
        };
        let why = other.or_else(|| cut_short(&text)).unwrap_or_else(|| error.to_string());
        Failure::file("read the profile", path, why).help(help)
    })?;
    Ok((sha256(text.as_bytes()), profile))
}

pub(crate) fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
