//! Help texts for errors of the compiler and the runtime, which do not know the command line.

use crate::files::detect::{self, EXPORT};
use crate::files::missing;
use compiler::cluster::read::ClusterError;
use compiler::import::fx::error::FxError;
use compiler::import::import::ImportError;
use compiler::import::onnx::error::{DecodeError, FormatError};
use compiler::import::onnx::lower::error::LowerError;
use compiler::import::onnx::lower::input::InputError;
use compiler::import::with_inputs;
use compiler::pass::loss::{Loss, LossError, TARGET};
use compiler::plan::problem::ProblemError;
use compiler::schedule::error::ScheduleError;
use compiler::text::name::short_name;
use runtime::data::DataError;
use runtime::data::weights::FileError;
use runtime::exec::compile_error::CompileError;
use runtime::process::run_status::LinkError;
use runtime::train::prepare::PrepareError;
use std::io::ErrorKind;
use std::path::Path;

/// Help for a model that cannot be imported.
pub fn import(path: &Path, error: &ImportError) -> String {
    let names: Vec<String> =
        with_inputs::required_inputs(error).into_iter().map(|name| format!("`{}`", short_name(&name))).collect();
    if !names.is_empty() {
        let names = names.join(", ");
        return format!(
            "make {names} an initializer (a constant) of the model; only `pipec eval` reads its value from the data"
        );
    }
    match error {
        ImportError::Decode(DecodeError::Open { source, .. }) if source.kind() == ErrorKind::NotFound => {
            missing::help(path)
        }
        ImportError::Decode(DecodeError::Open { .. }) => "check its permissions".to_string(),
        ImportError::Decode(DecodeError::NotRegular { .. }) => "pass the model file in it".to_string(),
        ImportError::Decode(DecodeError::Format(format)) => match format {
            FormatError::LfsPointer => "fetch the model with `git lfs pull` in its folder".to_string(),
            FormatError::Empty | FormatError::Text => "export or download the model again".to_string(),
            FormatError::Hdf5 => "`python -m tf2onnx.convert --keras model.h5 --output model.onnx`".to_string(),
            FormatError::Zip | FormatError::Pickle | FormatError::Safetensors => EXPORT.to_string(),
        },
        ImportError::Decode(DecodeError::Protobuf { .. }) => {
            "export or download the model again, and compare its size with the source".to_string()
        }
        ImportError::NoArchive { .. } => "run these lines where the model is defined".to_string(),
        ImportError::Archive(error) if error.shows_export() => detect::export_help(path).to_string(),
        ImportError::Archive(FxError::Ends { .. } | FxError::Zip(_) | FxError::EntrySize { .. }) => {
            "export or copy the model again, and compare its size with the source".to_string()
        }
        ImportError::Decode(DecodeError::Faults(_)) => {
            "export the model again; `onnx.checker.check_model` in Python reports the same faults".to_string()
        }
        ImportError::Input(InputError::UnknownDim { open, .. }) => {
            format!("use `--dim NAME=SIZE` with one of its names: {open}")
        }
        ImportError::Lower(LowerError::Unsupported(_)) if path.extension().is_some_and(|kind| kind == "pt2") => {
            "save `exported.run_decompositions()`, which replaces many operators by simpler ones, or add the operator as \
             in docs/extending.md"
                .to_string()
        }
        ImportError::Lower(LowerError::Unsupported(_)) => {
            "export with supported operators, or add the operator as in docs/extending.md".to_string()
        }
        _ => "see docs/from-pytorch.md for exporting models; `pipec inspect FILE --text` prints an imported graph"
            .to_string(),
    }
}

/// Help for weights that cannot be read.
pub fn weights(path: &Path, error: &FileError) -> String {
    let name = short_name(&path.display().to_string());
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    match (error, extension) {
        (FileError::Read { fault, .. }, _) if fault.kind() == ErrorKind::NotFound => missing::help(path),
        (FileError::Read { .. }, _) => "check its permissions".to_string(),
        (FileError::Extension { .. }, "onnx" | "pt2") => {
            format!("a model contains its weights: pass `{name}` as MODEL to train from them")
        }
        (FileError::Extension { .. }, "pt" | "pth" | "bin" | "ckpt" | "pkl") => format!(
            "pipec never reads pickles; convert the weights in Python with \
             `safetensors.torch.save_file(torch.load(\"{name}\", weights_only=True), \"{}\")`",
            short_name(&path.with_extension("safetensors").display().to_string())
        ),
        (FileError::Extension { .. }, _) => {
            "`safetensors.torch.save_file(model.state_dict(), \"weights.safetensors\")` in Python writes weights"
                .to_string()
        }
        _ => "write or download the file again".to_string(),
    }
}

/// Help for a cluster that cannot be read.
pub fn cluster(error: &ClusterError) -> &'static str {
    match error {
        ClusterError::Hosts { .. } => {
            "the `devices` of all `[[host]]` tables must add up to the product of the levels' counts"
        }
        ClusterError::Classes { .. } => {
            "the `count` of all `[[device]]` tables must add up to the product of the levels' counts"
        }
        ClusterError::Schema { .. } => "the first line must be: schema = \"pipec.cluster/1\"",
        ClusterError::Toml(text) if text.contains("missing field `schema`") => {
            "the first line must be: schema = \"pipec.cluster/1\""
        }
        _ => "`pipec schema cluster` prints the fields, `pipec cluster detect -o cluster.toml` writes an example",
    }
}

/// Help for a planning problem that is not valid.
pub fn problem(error: &ProblemError) -> Option<String> {
    Some(match error {
        ProblemError::UnknownName { .. } => {
            "`pipec inspect MODEL` lists the modules, `pipec inspect MODEL --text` the nodes; op ids are numbers"
                .to_string()
        }
        ProblemError::TooManyReplicas { wanted, .. } => {
            format!("use fewer replicas, or {wanted} devices: `--gpus {wanted}`, or `--workers {wanted}` with `pipec train`")
        }
        ProblemError::TooManyGroups { wanted, degree, .. } => {
            let devices = wanted.saturating_mul(u64::from(*degree));
            format!("use fewer stages or replicas, a smaller `--tensor`, or {devices} devices: `--gpus {devices}`")
        }
        ProblemError::EmptyCut { .. } => {
            "every stage between two cuts needs an op: `pipec inspect MODEL --text` lists the ops in order"
                .to_string()
        }
        ProblemError::TooLarge { method: "planning", limit, .. } => {
            format!("use at most {limit} devices (`--gpus {limit}`), or tensor parallelism for more, for example `--tensor 8`")
        }
        ProblemError::TooLarge { method: "exhaustive", .. } => "omit `--partitioner`: the default plans models of any size".to_string(),
        ProblemError::Setting { what, .. } if what.contains("in-flight") => {
            "`--in-flight` takes one number of at least 1 per stage, or auto".to_string()
        }
        ProblemError::Unmet { what } if what.contains("pin") => "use the op in only one `--pin`".to_string(),
        ProblemError::Unmet { what } if what.contains("all constraints") => {
            "omit one constraint at a time to find the conflict: the inputs of an op must be in its stage or an earlier one; \
             `pipec inspect MODEL --text` lists the ops in order"
                .to_string()
        }
        ProblemError::TooManyStages { ops, .. } => format!("use at most {ops} stages"),
        ProblemError::NoStage { most, .. } => {
            format!("stages are counted from 0: the last one is {}", most.saturating_sub(1))
        }
        ProblemError::Disagree { .. } => {
            "`--stages` takes one number per stage, `--cut-after` one name fewer".to_string()
        }
        ProblemError::Caps { stages, .. } => {
            format!("`--in-flight` takes one number for each of the {stages} stages, or auto")
        }
        _ => return None,
    })
}

/// Help for a loss that does not match the model's outputs.
pub fn loss(error: &LossError) -> &'static str {
    match error {
        LossError::NotScalar { .. } => {
            "`--loss cross-entropy`, `mse` or `bce` compares it with targets; `--loss output` requires a model with a scalar output named `loss`, or whose first or only scalar output is its loss"
        }
        LossError::Taken { .. } => {
            "use `--loss output` if the model computes its loss from that input, or export it with another input name"
        }
        LossError::ClassAxis { .. } => "choose another axis with `--class-dim`, or another loss with `--loss`",
        LossError::NotFloat { .. } => {
            "export the model with its predictions as the first output, before any rounding or argmax"
        }
        LossError::NoOutput => "export the model with its predictions as the first output",
    }
}

/// Help for data that does not match the model.
pub fn data(error: &DataError) -> String {
    match error {
        DataError::Missing { .. } => {
            "name arrays after the model's inputs, and labels `target` or `y`; `--synthetic-data` trains on synthetic data"
                .to_string()
        }
        DataError::Rows { .. } => "all arrays need the same number of rows, one per sample".to_string(),
        DataError::Shape { name, got, expected } if got.len() > 1 && got.get(1..) == expected.get(1..) => format!(
            "the file has a fixed size there; if the rows are samples, pass `--batch-dim {}=0`, and the same for every other such input",
            short_name(name)
        ),
        DataError::Shape { got, expected, .. } => shape(got, expected),
        DataError::Label { classes, .. } => format!(
            "labels are 0 to {}, or -100 to be ignored; `--class-dim` sets another class axis, `--loss` another loss",
            classes - 1
        ),
        DataError::Ignored { .. } => {
            "some labels must be classes, from 0 on: -100 marks labels to ignore, for example those of padding".to_string()
        }
        DataError::Index { .. } => "check that data and model use the same vocabulary".to_string(),
        DataError::Fraction { .. } => "cast the array to int64".to_string(),
        DataError::NotFinite { .. } => "clean the array, for example with `numpy.nan_to_num`".to_string(),
        DataError::Few { rows, .. } => format!("use `--batch {rows}` at most, or more rows"),
        DataError::Empty { .. } => "`pipec inspect MODEL` shows the inputs of the model".to_string(),
    }
}

/// Help for targets that match another loss.
pub fn targets(error: &DataError, loss: Loss) -> Option<String> {
    let list = |sizes: &[usize]| {
        let rows = ["rows".to_string()].into_iter();
        rows.chain(sizes.iter().skip(1).map(ToString::to_string)).collect::<Vec<_>>().join(", ")
    };
    let name = loss.name();
    match (error, loss) {
        (DataError::Shape { name: array, got, expected }, Loss::Mse | Loss::Bce)
            if array == TARGET && got.len() < expected.len() =>
        {
            Some(format!(
                "`--loss {name}` needs one target per prediction, of shape [{}]; `--loss cross-entropy` takes class indices of shape [{}]",
                list(expected),
                list(got)
            ))
        }
        (DataError::Shape { name: array, got, expected }, Loss::CrossEntropy)
            if array == TARGET && got.len() > expected.len() =>
        {
            Some(format!(
                "`--loss cross-entropy` takes class indices of shape [{}]; `--loss mse`, or `bce` from 0 to 1, takes targets of shape [{}]",
                list(expected),
                list(got)
            ))
        }
        (DataError::Fraction { name: array, .. }, Loss::CrossEntropy) if array == TARGET => Some(
            "`--loss cross-entropy` takes class indices: cast the array to int64; `--loss mse` or `bce` takes real numbers".to_string(),
        ),
        _ => None,
    }
}

/// Help for an array whose rows do not match the model. It suggests only changes that keep every element in its row.
fn shape(got: &[usize], expected: &[usize]) -> String {
    let rows = |shape: &[usize]| shape.get(1..).unwrap_or_default().to_vec();
    let (got_sizes, expected_sizes) = (rows(got), rows(expected));
    let sorted = |mut sizes: Vec<usize>| {
        sizes.retain(|size| *size != 1);
        sizes.sort_unstable();
        sizes
    };
    let expected_text = ["rows".to_string()]
        .into_iter()
        .chain(expected_sizes.iter().map(ToString::to_string))
        .collect::<Vec<_>>()
        .join(", ");
    let squeeze = |sizes: &[usize]| sizes.iter().copied().filter(|size| *size != 1).collect::<Vec<_>>();
    let product = |sizes: &[usize]| sizes.iter().fold(1usize, |all, size| all.saturating_mul(*size));
    let advice = if squeeze(&got_sizes) == squeeze(&expected_sizes) {
        format!("reshape the array to [{expected_text}]")
    } else if sorted(got_sizes.clone()) == sorted(expected_sizes.clone()) {
        format!("transpose the array's axes to [{expected_text}]")
    } else if product(&got_sizes) == product(&expected_sizes) {
        format!("if each row has the same numbers in order, reshape the array to [{expected_text}]")
    } else {
        format!("the model needs an array of shape [{expected_text}]")
    };
    format!("{advice}; `pipec inspect MODEL` shows the inputs")
}

/// Help for stages that cannot be prepared for training.
pub fn prepare(error: &PrepareError) -> Option<&'static str> {
    match error {
        PrepareError::Schedule(error) => Some(schedule(error)),
        PrepareError::Compile(CompileError::Memory { .. } | CompileError::StageMemory { .. }) => Some(MICRO_BATCH_HELP),
        _ => None,
    }
}

/// Help for a schedule that does not match the plan or the flags.
pub fn schedule(error: &ScheduleError) -> &'static str {
    match error {
        ScheduleError::BadTime { .. } => MICRO_BATCH_HELP,
        _ => "`1f1b-rr` does not split minibatches, `1f1b` and `gpipe` use micro-batches",
    }
}

/// Help to reduce the size of a micro-batch.
const MICRO_BATCH_HELP: &str = "use a smaller `--batch`, or more `--microbatches` with a schedule that supports them";

/// Help for processes that cannot connect.
pub fn link(error: &LinkError) -> Option<&'static str> {
    match error {
        LinkError::Listen { .. } => Some("choose another port in `--address`, or stop the process that uses this one"),
        LinkError::Address { .. } => {
            Some("write HOST:PORT, with an IP address or a name that this machine can resolve")
        }
        LinkError::Unreachable { .. } | LinkError::Missing { .. } => Some(
            "start all processes, with the same flags except `--rank` and `--host`, or wait longer with `--connect-timeout SECONDS`; a run that has started takes no other processes",
        ),
        LinkError::NotStarted { .. } => {
            Some("start all processes again, with the same flags except `--rank` and `--host`")
        }
        LinkError::Exposed { .. } => Some(
            "make a token with `(umask 077; openssl rand -hex 32 > run.token)`, copy it to every host, and pass `--token-file run.token` to every process, or set PIPEC_RUN_TOKEN",
        ),
        LinkError::Unproved { .. } => Some(
            "all processes need the same run token (`--token-file` or PIPEC_RUN_TOKEN), pipec version and number of processes",
        ),
        LinkError::Unlinked { .. } => Some("wait longer with `--connect-timeout SECONDS`, or omit `--nccl`"),
        LinkError::Another { .. } | LinkError::Refused { .. } => Some(
            "all processes need a `--rank` of their own, and the same pipec version, model, plan, data, weights and other flags",
        ),
        LinkError::Lost { .. } | LinkError::Silent { .. } | LinkError::Reported { process: Some(_), .. } => Some(
            "start all processes again; if the run wrote checkpoints, `--resume auto` continues from the newest one",
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::shape;

    #[test]
    fn a_shape_is_only_changed_where_rows_keep_their_numbers() {
        let begins = |got: &[usize], expected: &[usize], prefix: &str| {
            let help = shape(got, expected);
            assert!(help.starts_with(prefix), "{help}");
        };
        begins(&[9, 64], &[9, 8, 8], "if each row has the same numbers in order, reshape");
        begins(&[9, 8, 1], &[9, 8], "reshape the array to [rows, 8]");
        begins(&[9, 8, 6, 3], &[9, 3, 8, 6], "transpose the array's axes to [rows, 3, 8, 6]");
        begins(&[9, 12], &[9, 16], "the model needs an array of shape [rows, 16]");
    }
}
