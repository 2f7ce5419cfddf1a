//! The ONNX decoder against a second one (onnx-protobuf, on rust-protobuf) on real and generated models, and against
//! hostile files.
//!
//! Shared data is in `$PIPEC_DATA`, by default `../shared/data`.

use crate::support::shared::data;
use std::path::{Path, PathBuf};

use compiler::import::onnx::decode::{parse, read};
use compiler::import::onnx::model::{Dim, OnnxModel, Payload, Tensor, ValueInfo};
use compiler::import::onnx::payload::tensor;
use compiler::import::onnx::proto;
use compiler::import::onnx::warning::Warning;
use models::zoo::{ENTRIES, Options, build, to_bytes};
use onnx_protobuf as other;
use onnx_protobuf::Message;

#[test]
fn both_decoders_agree_on_the_zoo() {
    for entry in ENTRIES {
        let bytes = to_bytes(&build(entry.name, &entry.small()).unwrap().model);
        let ours = parse(bytes.clone().into(), None).unwrap();
        agree(entry.name, &ours, &other::ModelProto::parse_from_bytes(&bytes).unwrap());
    }
}

#[test]
fn both_decoders_agree_on_real_models() {
    let Some(data) = data("") else { return };
    let mut paths = onnx_files(&data.join("models"));
    for folder in std::fs::read_dir(data.join("parity")).unwrap().flatten().filter(|entry| entry.path().is_dir()) {
        paths.extend(onnx_files(&folder.path()));
    }
    paths.extend(onnx_files(&data.join("hostile/onnx")).into_iter().filter(|path| file_name(path).starts_with("ok_")));
    assert!(paths.len() > 50, "only {} models", paths.len());
    for path in paths {
        let name = path.display().to_string();
        let ours = read(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        agree(&name, &ours, &other::ModelProto::parse_from_bytes(&std::fs::read(&path).unwrap()).unwrap());
    }
}

/// Manifest rows with invalid bytes or wiring, which the decoder must reject.
const REFUSED: &[&str] = &[
    "empty",
    "truncated",
    "varint_bomb",
    "len_u64max",
    "group_nesting",
    "nested_if_30",
    "cycle",
    "dup_outputs",
    "missing_input",
    "no_nodes",
    "opset_missing",
    "function_recursive",
    "dims_negative",
    "dims_overflow_i64",
    "raw_short",
    "dtype_999",
    "two_data_fields",
    "input_no_type",
    "ext/trav_nested",
    "ext/trav_backslash",
    "ext/trav_nul",
    "ext/loc_dir",
    "ext/off_past_end",
    "ext/len_huge",
];

#[test]
fn hostile_files_are_refused_with_a_reason_and_odd_ones_are_read() {
    let Some(data) = data("") else { return };
    let manifest = std::fs::read_to_string(data.join("hostile/MANIFEST.tsv")).unwrap();
    let mut refused = 0;
    for line in manifest.lines().filter(|line| line.starts_with("onnx/")) {
        let row: Vec<&str> = line.split('\t').collect();
        let (file, exit, words) = (row[0], row[2], row[5]);
        let name = file.trim_start_matches("onnx/").trim_end_matches(".onnx");
        match read(&data.join("hostile").join(file)) {
            Ok(model) => {
                assert!(!REFUSED.contains(&name), "{name} was read");
                assert_printable(name, &model.warnings.iter().map(ToString::to_string).collect::<String>());
            }
            Err(error) => {
                let text = error.to_string();
                assert!(exit.split('|').any(|code| code == "2"), "{name} was refused: {text}");
                assert_printable(name, &text);
                // Expressions in the manifest are plain alternatives.
                let low = text.to_lowercase();
                assert!(
                    words == "-" || words.to_lowercase().split('|').any(|word| low.contains(word)),
                    "{name}: {text}"
                );
                refused += 1;
            }
        }
    }
    assert_eq!(refused, REFUSED.len());
    let missing = read(&data.join("hostile/onnx/ext/loc_missing.onnx")).unwrap();
    assert_eq!(missing.warnings, [Warning::MissingFile { path: "missing.bin".into(), tensors: 1 }]);
    assert_eq!(missing.initializers[0].payload, Payload::Missing { path: "missing.bin".into() });
    let unsorted = read(&data.join("hostile/onnx/unsorted.onnx")).unwrap();
    assert_eq!(unsorted.nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>(), ["A", "B"]);
}

/// Every truncation and every flipped byte gives a model or an error, never a panic.
#[test]
fn damaged_models_never_panic() {
    let tiny = Options::default().number("hidden", 3).number("inputs", 2);
    let bytes = to_bytes(&build("mlp", &tiny).unwrap().model);
    for cut in 0..bytes.len() {
        let _ = parse(bytes[..cut].to_vec().into(), None);
    }
    for at in 0..bytes.len() {
        for flip in [0x01, 0x08, 0x80, 0xff] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            if let Err(error) = parse(damaged.into(), None) {
                assert_printable("damaged", &error.to_string());
            }
        }
    }
}

#[cfg(unix)]
#[test]
fn a_pipe_is_refused_and_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("model.onnx");
    if !std::process::Command::new("mkfifo").arg(&pipe).status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: no mkfifo");
        return;
    }
    assert!(read(&pipe).unwrap_err().to_string().contains("is a pipe"));
    let mut model = external_model("model.onnx", 4);
    std::fs::write(folder.path().join("reader.onnx"), to_bytes(&model)).unwrap();
    let text = read(&folder.path().join("reader.onnx")).unwrap_err().to_string();
    assert!(text.contains("external data") && text.contains("is a pipe"), "{text}");
    model.graph = None;
    std::fs::write(folder.path().join("reader.onnx"), to_bytes(&model)).unwrap();
    assert!(read(&folder.path().join("reader.onnx")).unwrap_err().to_string().contains("no graph"));
}

/// Weights are memory-mapped: an 8 GB file takes no memory and no time.
#[test]
fn weights_are_mapped_and_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let size = 8_u64 << 30;
    let file = std::fs::File::create(folder.path().join("w.bin")).unwrap();
    if file.set_len(size).is_err() {
        eprintln!("skipped: the temporary folder has no sparse files");
        return;
    }
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, to_bytes(&external_model("w.bin", size / 4))).unwrap();
    let start = std::time::Instant::now();
    let model = read(&path).unwrap();
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
    let Payload::Bytes(bytes) = &model.initializers[0].payload else { panic!("{:?}", model.warnings) };
    assert_eq!(bytes.len() as u64, size);
}

/// y = x + w, with w of `elements` f32 in the file at `location`.
fn external_model(location: &str, elements: u64) -> proto::ModelProto {
    let tiny = Options::default().number("hidden", 1).number("inputs", 1);
    let mut model = build("mlp", &tiny).unwrap().model;
    let graph = model.graph.as_mut().unwrap();
    let w = &mut graph.initializer[0];
    w.dims = vec![elements as i64];
    w.raw_data = None;
    w.data_location = Some(proto::tensor_proto::DataLocation::External as i32);
    let entry = proto::StringStringEntryProto { key: Some("location".into()), value: Some(location.into()) };
    w.external_data = vec![entry];
    model
}

fn agree(name: &str, ours: &OnnxModel, theirs: &other::ModelProto) {
    let graph = theirs.graph.as_ref().unwrap();
    assert_eq!(ours.ir_version, theirs.ir_version, "{name}");
    assert_eq!(ours.producer, format!("{} {}", theirs.producer_name, theirs.producer_version).trim(), "{name}");
    let opsets: Vec<_> = ours.opsets.iter().map(|set| (set.domain.as_str(), set.version)).collect();
    assert_eq!(opsets, theirs.opset_import.iter().map(|set| (set.domain.as_str(), set.version)).collect::<Vec<_>>());

    let has_initializer =
        |input: &&other::ValueInfoProto| graph.initializer.iter().any(|tensor| tensor.name == input.name);
    let fed: Vec<&other::ValueInfoProto> = graph.input.iter().filter(|input| !has_initializer(input)).collect();
    same_infos(name, &ours.inputs, &fed);
    same_infos(name, &ours.outputs, &graph.output.iter().collect::<Vec<_>>());
    same_infos(name, &ours.value_infos, &graph.value_info.iter().collect::<Vec<_>>());

    assert_eq!(ours.initializers.len(), graph.initializer.len(), "{name}");
    for (ours, theirs) in ours.initializers.iter().zip(&graph.initializer) {
        same_tensor(name, ours, theirs);
    }
    assert_eq!(ours.nodes.len(), graph.node.len(), "{name}");
    for (ours, theirs) in ours.nodes.iter().zip(&graph.node) {
        let context = format!("{name}: {}", ours.name);
        assert!(theirs.name.is_empty() || ours.name.starts_with(&theirs.name), "{context}");
        assert_eq!((&ours.op_type, &ours.domain), (&theirs.op_type, &theirs.domain), "{context}");
        assert_eq!((&ours.inputs, &ours.outputs), (&theirs.input, &theirs.output), "{context}");
        let pairs = |p: &proto::StringStringEntryProto| (p.key().to_owned(), p.value().to_owned());
        let metadata: Vec<_> = ours.metadata.iter().map(pairs).collect();
        let expected: Vec<_> = theirs.metadata_props.iter().map(|p| (p.key.clone(), p.value.clone())).collect();
        assert_eq!(metadata, expected, "{context}");
        assert_eq!(ours.attributes.len(), theirs.attribute.len(), "{context}");
        for (ours, theirs) in ours.attributes.iter().zip(&theirs.attribute) {
            same_attribute(&context, ours, theirs);
        }
    }
}

fn same_infos(name: &str, ours: &[ValueInfo], theirs: &[&other::ValueInfoProto]) {
    assert_eq!(ours.len(), theirs.len(), "{name}");
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert_eq!(ours.name, theirs.name, "{name}");
        let kind = theirs.type_.as_ref().and_then(|kind| kind.value.as_ref());
        let Some(other::type_proto::Value::TensorType(kind)) = kind else {
            assert_eq!((ours.elem_type, &ours.dims), (0, &None), "{name}");
            continue;
        };
        assert_eq!(ours.elem_type, kind.elem_type, "{name}");
        let dims = kind.shape.as_ref().map(|shape| {
            let dim = |dim: &other::tensor_shape_proto::Dimension| match &dim.value {
                Some(other::tensor_shape_proto::dimension::Value::DimValue(size)) => Dim::Known(*size),
                Some(other::tensor_shape_proto::dimension::Value::DimParam(name)) => Dim::Param(name.clone()),
                _ => Dim::Unknown,
            };
            shape.dim.iter().map(dim).collect::<Vec<_>>()
        });
        assert_eq!(ours.dims, dims, "{name}: {}", theirs.name);
    }
}

fn same_tensor(context: &str, ours: &Tensor, theirs: &other::TensorProto) {
    assert_eq!((&ours.name, ours.elem_type, &ours.dims), (&theirs.name, theirs.data_type, &theirs.dims), "{context}");
    match &ours.payload {
        Payload::Missing { path } => {
            let location = theirs.external_data.iter().find(|entry| entry.key == "location").unwrap();
            assert_eq!(path, &location.value, "{context}");
        }
        Payload::Strings(strings) => {
            assert!(strings.iter().map(|s| s.to_vec()).eq(theirs.string_data.iter().cloned()), "{context}");
        }
        Payload::Bytes(bytes) => {
            let mut expected = theirs.raw_data.clone();
            expected.extend(theirs.float_data.iter().flat_map(|v| v.to_le_bytes()));
            expected.extend(theirs.double_data.iter().flat_map(|v| v.to_le_bytes()));
            expected.extend(theirs.int64_data.iter().flat_map(|v| v.to_le_bytes()));
            let width = if theirs.int32_data.is_empty() { 0 } else { bytes.len() / theirs.int32_data.len() };
            expected.extend(theirs.int32_data.iter().flat_map(|v| v.to_le_bytes()[..width].to_vec()));
            assert!(**bytes == *expected, "{context}: values of `{}` differ", theirs.name);
        }
    }
}

fn same_attribute(context: &str, ours: &proto::AttributeProto, theirs: &other::AttributeProto) {
    let context = format!("{context}: {}", theirs.name);
    assert_eq!(ours.name(), theirs.name, "{context}");
    assert_eq!(ours.r#type() as i32, theirs.type_.value(), "{context}");
    assert_eq!((ours.i(), ours.s()), (theirs.i, &theirs.s[..]), "{context}");
    assert_eq!(ours.f().to_bits(), theirs.f.to_bits(), "{context}");
    assert_eq!((&ours.ints, &ours.floats), (&theirs.ints, &theirs.floats), "{context}");
    assert!(ours.strings.iter().map(|s| s.to_vec()).eq(theirs.strings.iter().cloned()), "{context}");
    assert_eq!(ours.t.is_some(), theirs.t.is_some(), "{context}");
    if let (Some(ours), Some(theirs)) = (&ours.t, theirs.t.as_ref()) {
        same_tensor(&context, &tensor(ours), theirs);
    }
    let nodes = |graph: &proto::GraphProto| graph.node.iter().map(|node| node.op_type().to_owned()).collect::<Vec<_>>();
    let expected = theirs.g.as_ref().map(|graph| graph.node.iter().map(|node| node.op_type.clone()).collect());
    assert_eq!(ours.g.as_ref().map(nodes), expected, "{context}");
}

fn assert_printable(name: &str, text: &str) {
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{name}: {text:?}");
}

fn file_name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

fn onnx_files(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|kind| kind == "onnx")).collect();
    files.sort();
    files
}
