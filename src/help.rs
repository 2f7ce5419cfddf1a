//! What to do next, for refusals of the rooms below: these say what is wrong and where, and know no command line.

use crate::files::detect;
use crate::loss::Loss;
use compiler::cluster::read::ClusterError;
use compiler::import::fx::error::FxError;
use compiler::import::import::ImportError;
use compiler::import::onnx::error::{DecodeError, FormatError};
use compiler::import::onnx::lower::input::InputError;
use compiler::import::onnx::lower::walk::LowerError;
use compiler::import::onnx::name::shown;
use compiler::import::with_inputs;
use compiler::pass::loss::{LossError, TARGET};
use compiler::plan::problem::ProblemError;
use compiler::schedule::error::ScheduleError;
use compiler::text::suggest::nearest;
use runtime::data::DataError;
use runtime::data::weights::FileError;
use runtime::exec::compile::CompileError;
use runtime::process::run_status::LinkError;
use runtime::train::prepare::PrepareError;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Files that are listed at most.
const LISTED: usize = 4;

/// The line that exports a model of PyTorch.
pub const EXPORT: &str = "`torch.export.save(torch.export.export(model.train(), (x,)), \"model.pt2\")` in Python writes a model, graph and weights";

/// About a file that is not there: the one that was meant, or what is there.
pub fn absent(path: &Path) -> String {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let Ok(entries) = fs::read_dir(folder) else {
        return format!("there is no folder {}", folder.display());
    };
    let mut names: Vec<String> =
        entries.take(10_000).filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    let wanted = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if let Some(near) = nearest(&wanted, names.iter().map(String::as_str)) {
        return format!("did you mean {}?", shown(&folder.join(near).display().to_string()).trim_start_matches("./"));
    }
    if path.extension().is_some_and(|extension| extension == "toml") {
        return "`pipec cluster detect -o cluster.toml` writes the file of this machine".to_string();
    }
    names.retain(|name| Path::new(name).extension() == path.extension());
    let there = match names.is_empty() {
        true => "has no such file".to_string(),
        false => format!("has {}", names.iter().take(LISTED).map(|name| shown(name)).collect::<Vec<_>>().join(", ")),
    };
    let folder = if folder == Path::new(".") { "this folder".to_string() } else { folder.display().to_string() };
    format!("check the path: {folder} {there}")
}

/// About a model that cannot be imported.
pub fn import(path: &Path, error: &ImportError) -> String {
    let names: Vec<String> =
        with_inputs::followed(error).into_iter().map(|name| format!("`{}`", shown(&name))).collect();
    if !names.is_empty() {
        let names = names.join(", ");
        return format!(
            "make {names} an initializer of the model, so that it is a constant; only `pipec eval` takes its value from the data"
        );
    }
    match error {
        ImportError::Decode(DecodeError::Open { source, .. }) if source.kind() == ErrorKind::NotFound => absent(path),
        ImportError::Decode(DecodeError::Open { .. }) => "check its permissions".to_string(),
        ImportError::Decode(DecodeError::NotRegular { .. }) => "name the model file in it".to_string(),
        ImportError::Decode(DecodeError::Format(format)) => match format {
            FormatError::LfsPointer => "`git lfs pull` in its folder fetches the model".to_string(),
            FormatError::Empty | FormatError::Text => "export or download the model again".to_string(),
            FormatError::Hdf5 => "`python -m tf2onnx.convert --keras model.h5 --output model.onnx`".to_string(),
            FormatError::Zip | FormatError::Pickle | FormatError::Safetensors => EXPORT.to_string(),
        },
        ImportError::Decode(DecodeError::Protobuf { .. }) => {
            "export or download the model again; a whole file has the size that its source names".to_string()
        }
        ImportError::NoArchive { .. } => "run these lines where the model is defined".to_string(),
        ImportError::Archive(error) if error.shows_export() => detect::unexported(path).to_string(),
        ImportError::Archive(FxError::Ends { .. } | FxError::Zip(_) | FxError::EntrySize { .. }) => {
            "export the model again, or copy the file again: a whole one has the size that its source names".to_string()
        }
        ImportError::Decode(DecodeError::Faults(_)) => {
            "`onnx.checker.check_model` in Python says the same of the file; export it again".to_string()
        }
        ImportError::Input(InputError::UnknownDim { open, .. }) => {
            format!("`--dim NAME=SIZE` with a name that it has: {open}")
        }
        ImportError::Lower(LowerError::Unsupported(_)) => {
            "export with operators that pipec knows, or add it: docs/extending.md shows how in a few lines".to_string()
        }
        _ => "`pipec inspect FILE --text` prints what imports; docs/from-pytorch.md shows how models are exported"
            .to_string(),
    }
}

/// About weights that cannot be read.
pub fn weights(path: &Path, error: &FileError) -> String {
    let name = shown(&path.display().to_string()).into_owned();
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    match (error, extension) {
        (FileError::Read { fault, .. }, _) if fault.kind() == ErrorKind::NotFound => absent(path),
        (FileError::Read { .. }, _) => "check its permissions".to_string(),
        (FileError::Extension { .. }, "onnx" | "pt2") => {
            format!("a model has its weights in it: `{name}` in place of MODEL trains from them")
        }
        (FileError::Extension { .. }, "pt" | "pth" | "bin" | "ckpt" | "pkl") => format!(
            "a pickle is never read; `safetensors.torch.save_file(torch.load(\"{name}\", weights_only=True), \"{}\")` in Python writes \
             the same weights",
            shown(&path.with_extension("safetensors").display().to_string())
        ),
        (FileError::Extension { .. }, _) => {
            "`safetensors.torch.save_file(model.state_dict(), \"weights.safetensors\")` in Python writes weights"
                .to_string()
        }
        _ => "write or download the file again".to_string(),
    }
}

/// About a cluster that cannot be read.
pub fn cluster(error: &ClusterError) -> &'static str {
    match error {
        ClusterError::Hosts { .. } => {
            "the `devices` of all `[[host]]` tables add up to the product of the levels' counts"
        }
        ClusterError::Classes { .. } => {
            "the `count` of all `[[device]]` tables adds up to the product of the levels' counts"
        }
        ClusterError::Schema { .. } => "the first line is: schema = \"pipec.cluster/1\"",
        ClusterError::Toml(text) if text.contains("missing field `schema`") => {
            "the first line is: schema = \"pipec.cluster/1\""
        }
        _ => {
            "`pipec schema cluster` prints the fields, `pipec cluster detect -o cluster.toml` writes a file to begin with"
        }
    }
}

/// About a question that no plan can answer.
pub fn problem(error: &ProblemError) -> Option<String> {
    Some(match error {
        ProblemError::UnknownName { .. } => {
            "`pipec inspect MODEL` lists the modules, `pipec inspect MODEL --text` the nodes; op ids are numbers"
                .to_string()
        }
        ProblemError::TooManyReplicas { wanted, .. } => {
            format!("fewer replicas, or {wanted} devices: `--gpus {wanted}`, of `pipec train` `--workers {wanted}`")
        }
        ProblemError::EmptyCut { .. } => {
            "each cut has ops before it and behind it that no other cut parts off: `pipec inspect MODEL --text` lists them in order"
                .to_string()
        }
        ProblemError::TooLarge { method: "planning", limit, .. } => {
            format!("at most {limit} devices: `--gpus {limit}`; more are groups that share stages, as of `--tensor 8`")
        }
        ProblemError::TooLarge { method: "exhaustive", .. } => "without `--partitioner` any model is planned".to_string(),
        ProblemError::Setting { what, .. } if what.contains("in-flight") => {
            "`--in-flight 1` is the least, a number for each stage; `auto` chooses".to_string()
        }
        ProblemError::Unmet { what } if what.contains("pin") => "name the op in one `--pin` only".to_string(),
        ProblemError::Unmet { what } if what.contains("all constraints") => {
            "leave one constraint out to see which it is: what an op reads stands in its own stage or an earlier one, as \
             `pipec inspect MODEL --text` has them in order"
                .to_string()
        }
        ProblemError::TooManyStages { ops, .. } => format!("at most {ops} stages"),
        ProblemError::NoStage { most, .. } => {
            format!("stages are counted from 0: {} is the last one here", most.saturating_sub(1))
        }
        ProblemError::Disagree { .. } => {
            "`--stages` has one number for each stage, `--cut-after` one cut fewer".to_string()
        }
        ProblemError::Caps { stages, .. } => {
            format!("`--in-flight` has one number for each of the {stages} stages, or is auto")
        }
        _ => return None,
    })
}

/// About a loss that the model's first output does not have.
pub fn loss(error: &LossError) -> &'static str {
    match error {
        LossError::NotScalar { .. } => {
            "`--loss cross-entropy`, `mse` or `bce` compares it with targets; `--loss output` wants a model with its own loss, a scalar, as its first output or as its only scalar output"
        }
        LossError::Taken { .. } => {
            "`--loss output` trains a model that computes its own loss from it; else export the model with another name for that input"
        }
        LossError::ClassAxis { .. } => "`--class-dim` names another axis, `--loss` another loss",
        LossError::NotFloat { .. } => {
            "export the model so that its first output is what it predicts, before any rounding or choice"
        }
        LossError::NoOutput => "export the model with what it predicts as its first output",
    }
}

/// About data that does not fit the model.
pub fn data(error: &DataError) -> String {
    match error {
        DataError::Missing { .. } => {
            "arrays are named like the model's inputs, labels `target` or `y`; `--synthetic-data` trains on made-up data instead"
                .to_string()
        }
        DataError::Rows { .. } => "give every array the same number of rows: a row is a sample".to_string(),
        DataError::Shape { name, got, expected } if got.len() > 1 && got.get(1..) == expected.get(1..) => format!(
            "if its rows are samples, `--batch-dim {}=0` says so, beside the same for every input that has them: the file has one size there",
            shown(name)
        ),
        DataError::Shape { got, expected, .. } => shape(got, expected),
        DataError::Label { classes, .. } => format!(
            "labels are 0 to {}, and -100 counts for nothing; `--class-dim` names another axis of classes, `--loss` another loss",
            classes - 1
        ),
        DataError::Ignored { .. } => {
            "give some rows a class of their own, from 0 on: -100 marks labels that are left out, such as those of padding".to_string()
        }
        DataError::Index { .. } => "check that data and model have the same vocabulary".to_string(),
        DataError::Fraction { .. } => "cast the array to int64".to_string(),
        DataError::NotFinite { .. } => "clean the array, `numpy.nan_to_num` for example".to_string(),
        DataError::Few { rows, .. } => format!("`--batch {rows}` at most, or more rows"),
        DataError::Empty { .. } => "`pipec inspect MODEL` shows what the model reads".to_string(),
    }
}

/// About targets that another loss compares with.
pub fn targets(error: &DataError, loss: Loss) -> Option<String> {
    let told = |sizes: &[usize]| {
        let rows = ["rows".to_string()].into_iter();
        rows.chain(sizes.iter().skip(1).map(ToString::to_string)).collect::<Vec<_>>().join(", ")
    };
    let name = loss.name();
    match (error, loss) {
        (DataError::Shape { name: array, got, expected }, Loss::Mse | Loss::Bce)
            if array == TARGET && got.len() < expected.len() =>
        {
            Some(format!(
                "`--loss {name}` compares every number that the model predicts with one of [{}]; `--loss cross-entropy` takes class numbers of [{}]",
                told(expected),
                told(got)
            ))
        }
        (DataError::Shape { name: array, got, expected }, Loss::CrossEntropy)
            if array == TARGET && got.len() > expected.len() =>
        {
            Some(format!(
                "`--loss cross-entropy` takes class numbers of [{}]; `--loss mse`, or `bce` from 0 to 1, compares with [{}]",
                told(expected),
                told(got)
            ))
        }
        (DataError::Fraction { name: array, .. }, Loss::CrossEntropy) if array == TARGET => Some(
            "`--loss cross-entropy` takes class numbers: cast the array to int64; `--loss mse` or `bce` compares with fractions".to_string(),
        ),
        _ => None,
    }
}

/// About an array whose rows are not those of the model. Only what keeps every element with its row is proposed.
fn shape(got: &[usize], expected: &[usize]) -> String {
    let rows = |shape: &[usize]| shape.get(1..).unwrap_or_default().to_vec();
    let (have, want) = (rows(got), rows(expected));
    let sorted = |mut sizes: Vec<usize>| {
        sizes.retain(|size| *size != 1);
        sizes.sort_unstable();
        sizes
    };
    let told =
        ["rows".to_string()].into_iter().chain(want.iter().map(ToString::to_string)).collect::<Vec<_>>().join(", ");
    let squeezed = |sizes: &[usize]| sizes.iter().copied().filter(|size| *size != 1).collect::<Vec<_>>();
    let product = |sizes: &[usize]| sizes.iter().fold(1usize, |all, size| all.saturating_mul(*size));
    let what = if squeezed(&have) == squeezed(&want) {
        format!("reshape the array to [{told}]")
    } else if sorted(have.clone()) == sorted(want.clone()) {
        format!("transpose the array's axes to [{told}]")
    } else if product(&have) == product(&want) {
        format!("if each row holds the same numbers in order, reshape the array to [{told}]")
    } else {
        format!("the model reads [{told}]: give it rows of that size")
    };
    format!("{what}; `pipec inspect MODEL` shows the inputs")
}

/// About stages that are not prepared for training.
pub fn prepare(error: &PrepareError) -> Option<&'static str> {
    match error {
        PrepareError::Schedule(error) => Some(schedule(error)),
        PrepareError::Compile(CompileError::Memory { .. } | CompileError::StageMemory { .. }) => Some(SMALLER),
        _ => None,
    }
}

/// About an order of work that a plan or the flags beside it do not have.
pub fn schedule(error: &ScheduleError) -> &'static str {
    match error {
        ScheduleError::BadTime { .. } => SMALLER,
        _ => "`1f1b-rr` takes whole minibatches, `1f1b` and `gpipe` micro-batches",
    }
}

/// What makes less of an item.
const SMALLER: &str = "a smaller `--batch`, or more `--microbatches` under a schedule that takes them";

/// About processes that do not come together.
pub fn link(error: &LinkError) -> Option<&'static str> {
    match error {
        LinkError::Listen { .. } => Some("choose another port in `--address`, or end what uses this one"),
        LinkError::Address { .. } => Some("`--address HOST:PORT`, for example node0:29500"),
        LinkError::Unreachable { .. } | LinkError::Missing { .. } => {
            Some("all processes are started with the same command; `--connect-timeout SECONDS` waits longer")
        }
        LinkError::Another { .. } | LinkError::Refused { .. } => {
            Some("all processes need the same pipec, model, plan, data, weights and flags")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::shape;

    #[test]
    fn a_shape_is_only_changed_where_rows_keep_their_numbers() {
        let begins = |got: &[usize], expected: &[usize], with: &str| {
            let told = shape(got, expected);
            assert!(told.starts_with(with), "{told}");
        };
        begins(&[9, 64], &[9, 8, 8], "if each row holds the same numbers in order, reshape");
        begins(&[9, 8, 1], &[9, 8], "reshape the array to [rows, 8]");
        begins(&[9, 8, 6, 3], &[9, 3, 8, 6], "transpose the array's axes to [rows, 3, 8, 6]");
        begins(&[9, 12], &[9, 16], "the model reads [rows, 16]");
    }
}
