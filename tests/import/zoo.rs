//! The model zoo: published parameter counts, and every small model from its file to a training step.

use assert_cmd::Command;
use compiler::graph::bind::{bind, symbols};
use compiler::graph::hash::hash;
use compiler::graph::order;
use compiler::graph::verify::verify;
use compiler::import::import::{Batch, Model, Options as Import, Weight, from_onnx, load};
use compiler::import::onnx::decode::parse;
use compiler::op::Op;
use compiler::pass::loss::Loss;
use compiler::plan::schedule::Schedule;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Pipeline, StageSpec};
use compiler::tensor::Tensor;
use compiler::tensor::dim::Bindings;
use models::choice::Setting;
use models::zoo::{ENTRIES, Entry, Options, build, to_bytes};
use runtime::data::synthetic::synthetic;
use runtime::data::{Batches, Dataset, RowOrder};
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::Policy;
use runtime::train::job::{TrainJob, Trained};
use runtime::train::prepare::{Settings, prepare};
use runtime::train::run::{feeds, train};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// Parameter counts of every published size, and the published figure, to which the count must round. Sources are in
/// the models' files.
const PUBLISHED: &[(&str, u128, &str)] = &[
    ("gpt2", 124_439_808, "124 M"),
    ("gpt2-medium", 354_823_168, "355 M"),
    ("gpt2-large", 774_030_080, "774 M"),
    ("gpt2-xl", 1_557_611_200, "1.6 B"),
    ("gpt3", 174_604_259_328, "175 B"),
    ("gpt-100b", 102_131_884_032, "102.1 B"),
    ("megatron-145b", 145_622_261_760, "145.6 B"),
    ("megatron-1t", 1_008_038_758_400, "1008.0 B"),
    ("llama3-8b", 8_030_261_248, "8.03 B"),
    ("llama3-70b", 70_553_706_496, "70.6 B"),
    ("llama3-405b", 405_853_388_800, "405.9 B"),
    ("moe-13b", 13_150_451_712, "13 B"),
    ("moe-52b", 52_473_360_384, "52 B"),
    ("gpt-oss-20b", 20_914_754_880, "20.91 B"),
    ("gpt-oss-120b", 116_829_149_760, "116.83 B"),
    ("alexnet", 61_100_840, "61.10 M"),
    ("amoebanet-18-208", 81_505_540, "81.5 M"),
    ("amoebanet-18-416", 319_024_120, "319.0 M"),
    ("amoebanet-18-544", 542_734_840, "542.7 M"),
    ("amoebanet-36-544", 1_055_832_376, "1.06 B"),
    ("amoebanet-72-512", 1_844_858_344, "1.84 B"),
    ("awd-lm", 24_221_600, "24 M"),
    ("awd-lm-wt2", 33_556_078, "34 M"),
    ("awdlm6", 65_323_678, "65.3 M"),
    ("bert-base", 109_514_298, "110 M"),
    ("bert-large", 335_174_458, "335 M"),
    ("gnmt8", 193_766_977, "193.8 M"),
    ("gnmt16", 277_718_593, "277.7 M"),
    ("gnmt-mlperf", 160_671_297, "161 M"),
    ("resnet18", 11_689_512, "11.69 M"),
    ("resnet34", 21_797_672, "21.80 M"),
    ("resnet50", 25_557_032, "25.56 M"),
    ("resnet101", 44_549_160, "44.55 M"),
    ("resnet152", 60_192_808, "60.19 M"),
    ("s2vt", 36_968_094, "37.0 M"),
    ("transformer-3", 282_182_912, "282.2 M"),
    ("transformer-13", 785_765_632, "785.8 M"),
    ("transformer-39", 2_095_080_704, "2.1 B"),
    ("transformer-103", 5_318_010_112, "5.3 B"),
    ("unet-6-72", 362_157_516, "362.2 M"),
    ("unet-11-128", 2_213_834_176, "2.21 B"),
    ("unet-24-128", 4_993_859_008, "4.99 B"),
    ("unet-24-160", 7_802_903_600, "7.80 B"),
    ("unet-48-160", 15_822_206_000, "15.82 B"),
    ("vgg11", 132_863_336, "132.9 M"),
    ("vgg13", 133_047_848, "133.0 M"),
    ("vgg16", 138_357_544, "138.36 M"),
    ("vgg19", 143_667_240, "143.7 M"),
];

const BATCH: usize = 4;

fn structure(name: &str) -> Options {
    let digits = ENTRIES.iter().any(|entry| entry.name == name && entry.small.is_empty());
    assert!(!digits, "{name} is small anyway");
    Options { structure: true, ..Options::default() }
}

fn imported(name: &str, options: &Options) -> Model {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, to_bytes(&build(name, options).unwrap().model)).unwrap();
    load(&path, &Import::default()).unwrap()
}

fn parameter_count(model: &Model) -> u128 {
    let parameters = model.graph.ids().filter_map(|id| match &model.graph.node(id).op {
        Op::Parameter(parameter) => Some(parameter.fact.concrete().unwrap()),
        _ => None,
    });
    parameters.map(|shape| shape.iter().map(|dim| *dim as u128).product::<u128>()).sum()
}

#[test]
fn published_sizes_have_the_published_counts() {
    for (name, parameters, message) in PUBLISHED {
        let built = build(name, &Options { structure: true, ..Options::default() }).unwrap();
        assert_eq!(built.counts.parameters, *parameters, "{name}");
        let (number, unit) = message.split_once(' ').unwrap();
        let unit = if unit == "B" { 1e9 } else { 1e6 };
        let digits = number.split_once('.').map_or(0, |(_, digits)| digits.len());
        assert_eq!(format!("{:.digits$}", *parameters as f64 / unit), number, "{name}");
    }
    for size in ENTRIES.iter().flat_map(|entry| entry.sizes).filter(|size| size.name != "cnn") {
        assert!(PUBLISHED.iter().any(|(name, ..)| *name == size.name), "{} is not in the list", size.name);
    }
}

#[test]
fn structures_import_quickly_with_all_their_parameters() {
    for name in
        ["resnet50", "awdlm6", "gnmt16", "bert-large", "amoebanet-72-512", "transformer-103", "gpt3", "llama3-8b"]
    {
        let built = build(name, &structure(name)).unwrap();
        let bytes = to_bytes(&built.model);
        assert!(bytes.len() < 3_000_000, "{name}: {} bytes", bytes.len());
        let start = Instant::now();
        let model = imported(name, &structure(name));
        assert!(start.elapsed().as_secs() < 20, "{name}: {:?}", start.elapsed());
        assert_eq!(parameter_count(&model), built.counts.parameters, "{name}");
        assert!(model.weights.values().all(|weight| matches!(weight, Weight::Missing { .. })), "{name}");
        assert!(matches!(&model.batch, Batch::Symbol { name, .. } if name == "batch"), "{name}: {:?}", model.batch);
        assert_eq!(model.warnings.len(), 1, "{name}: {:?}", model.warnings);
    }
}

#[test]
fn files_grow_with_the_number_of_layers_alone() {
    let bytes = |layers: usize, width: usize| {
        let options = structure("bert").number("layers", layers).number("hidden", width).number("heads", 1);
        to_bytes(&build("bert", &options).unwrap().model).len() as f64
    };
    let (first, second) = (bytes(20, 768) - bytes(10, 768), bytes(30, 768) - bytes(20, 768));
    assert!((second / first - 1.0).abs() < 0.02, "{first} {second}");
    assert!((bytes(10, 12_288) / bytes(10, 768) - 1.0).abs() < 0.02);
}

#[test]
fn with_and_without_weights_the_graph_is_the_same() {
    for entry in ENTRIES {
        for loss in [false, true] {
            let options = Options { loss, ..entry.small() };
            let with_weights = imported(entry.name, &options);
            let without_weights = imported(entry.name, &Options { structure: true, ..options });
            assert_eq!(hash(&with_weights.graph), hash(&without_weights.graph), "{}", entry.name);
        }
    }
}

/// One step of the small `entry` over `stages` stages.
fn step(entry: &Entry, model: &Model, stages: usize) -> Trained {
    steps(entry, model, stages, 1)
}

/// Steps on the same batch.
fn steps(entry: &Entry, model: &Model, stages: usize, steps: u32) -> Trained {
    let ops = order::numbered(&model.graph).len();
    let stage_of: Vec<usize> = (0..ops).map(|op| op * stages / ops).collect();
    let dims = Bindings::from([("batch".to_string(), BATCH as i64)]);
    let count = StepCount { minibatches: steps, microbatches: 1 };
    let settings = Settings::new(dims, Loss::Output, Schedule::Gpipe, count);
    let pipeline = Pipeline::chain(vec![StageSpec::new(1, 1.0, 2.0); stages]);
    let prepared =
        prepare(&model.graph, &stage_of, pipeline, &settings).unwrap_or_else(|e| panic!("{}: {e}", entry.name));
    let mut feeds = feeds(&prepared.codes);
    // Feeds are sorted so that every partition draws the same numbers.
    feeds.sort_by(|a, b| a.name.cmp(&b.name));
    let arrays = synthetic(&prepared.graph, &feeds, BATCH, BATCH, 1);
    let data = Dataset::new(arrays, &feeds, BATCH).unwrap_or_else(|e| panic!("{}: {e}", entry.name));
    let weights: BTreeMap<String, Tensor> = model
        .weights
        .iter()
        .map(|(name, weight)| match weight {
            Weight::Given(tensor) => (name.clone(), tensor.clone()),
            Weight::Missing { path } => panic!("{name} should be in {path}"),
        })
        .collect();
    let batches = Batches::new(data, BATCH, 1, steps as usize, RowOrder::InOrder).unwrap();
    let optimizer =
        Optimizer::from(Rule::Sgd { learning_rate: 0.1, momentum: 0.0, nesterov: false, weight_decay: 0.0 });
    let training = TrainJob {
        codes: &prepared.codes,
        program: &prepared.program,
        weights: &weights,
        batches: &batches,
        optimizer: &optimizer,
        policy: Policy::default(),
        keep_gradients: true,
    };
    train(&training, &mut |_| {}).unwrap_or_else(|e| panic!("{}: {e}", entry.name))
}

#[test]
fn every_model_trains_a_step_with_gradients_for_all_parameters() {
    for entry in ENTRIES {
        let name = entry.name;
        let options = Options { loss: true, seed: 1, ..entry.small() };
        let model = imported(name, &options);
        let sizes: Bindings = symbols(&model.graph).into_iter().map(|symbol| (symbol, BATCH as i64)).collect();
        verify(&bind(&model.graph, &sizes).unwrap()).unwrap();

        let single_stage = step(entry, &model, 1);
        assert!(
            single_stage.losses[0].is_finite() && single_stage.losses[0] > 0.0,
            "{name}: {:?}",
            single_stage.losses
        );
        let trainable: Vec<&String> = model.weights.keys().filter(|name| !name.contains("running_")).collect();
        for parameter in &trainable {
            let gradient =
                single_stage.gradients.get(*parameter).unwrap_or_else(|| panic!("{name}: no gradient of {parameter}"));
            let values = gradient.to_f64();
            assert!(values.iter().all(|value| value.is_finite()), "{name}: {parameter}");
            // Adding a constant vector to all keys does not change the softmax, so the key bias has no gradient.
            let has_gradient = gradient.shape().len() > 1;
            assert!(!has_gradient || values.iter().any(|value| *value != 0.0), "{name}: nothing moves {parameter}");
        }
        assert_eq!(single_stage.gradients.len(), trainable.len(), "{name}");

        let three_stages = step(entry, &model, 3);
        assert_eq!(three_stages.losses, single_stage.losses, "{name} in three stages");
        assert!(three_stages.gradients == single_stage.gradients, "{name} in three stages has other gradients");
    }
}

#[test]
fn decoders_with_grouped_heads_fit_a_batch() {
    for name in ["llama", "gpt-oss"] {
        let entry = ENTRIES.iter().find(|entry| entry.name == name).unwrap();
        let model = imported(name, &Options { loss: true, seed: 1, ..entry.small() });
        let trained = steps(entry, &model, 2, 40);
        let (first, last) = (trained.losses[0], trained.losses[39]);
        assert!((4.0..5.5).contains(&first), "{name} starts at {first}, not near ln 97");
        assert!(last < 0.7 * first, "{name}: {first} to {last}");
    }
}

/// Keys and values reach the attention op with their own number of heads, and its mask is known to be causal.
#[test]
fn heads_of_the_zoo_stay_grouped() {
    for (name, layers) in [("llama3-8b", 32), ("llama3-405b", 126), ("gpt-oss-120b", 36)] {
        let graph = imported(name, &structure(name)).graph;
        let mut attentions = 0;
        for id in graph.ids() {
            if let Op::Attention(attention) = &graph.node(id).op {
                let inputs = graph.inputs(id);
                let key_heads = inputs[1..].iter().map(|value| graph.fact(*value).shape[1].known());
                assert_eq!(key_heads.collect::<Vec<_>>(), [Some(8); 2], "{name}");
                assert!(attention.causal, "{name}");
                attentions += 1;
            }
        }
        assert_eq!(attentions, layers, "{name}");
    }
}

#[test]
fn choices_for_small_images_train() {
    let number = Setting::Number;
    for (name, settings) in [
        ("resnet", [("depth", number(18)), ("hidden", number(4)), ("small-images", Setting::Truth(true))]),
        ("vgg", [("depth", number(11)), ("width", number(4)), ("normalised", Setting::Truth(true))]),
    ] {
        let entry = ENTRIES.iter().find(|entry| entry.name == name).unwrap();
        let options = Options { loss: true, ..entry.small() };
        let options = settings.into_iter().fold(options, |options, (name, setting)| options.with(name, setting));
        let trained = step(entry, &imported(name, &options), 2);
        assert!(trained.losses[0].is_finite() && trained.losses[0] > 0.0, "{name}: {:?}", trained.losses);
    }
}

#[test]
fn plans_speak_of_layers() {
    for (name, module) in [
        ("resnet50", "layer3.5.conv2"),
        ("bert-base", "bert.encoder.layer.11.output.dense"),
        ("gnmt16", "decoder.rnn_layers.6"),
        ("amoebanet-18-208", "cell3_normal6.operations.3.4"),
        ("unet-6-72", "decoder.4.decode.0.conv"),
        ("vgg16", "classifier.6"),
        ("awdlm6", "rnns.5"),
    ] {
        let model = imported(name, &structure(name));
        let has_module = model.graph.ids().any(|id| model.graph.node(id).origin.module == module);
        assert!(has_module, "no op of {name} is in {module}");
    }
}

#[test]
fn options_change_what_they_say() {
    let parameters =
        |name: &str, options: Options| build(name, &Options { structure: true, ..options }).unwrap().counts.parameters;
    let default_count = |name| parameters(name, Options::default());
    let with_option = |name, option, value| parameters(name, Options::default().number(option, value));
    assert_eq!(with_option("gpt2", "layers", 13) - default_count("gpt2"), 12 * 768 * 768 + 13 * 768);
    assert_eq!(with_option("vgg16", "classes", 1001) - default_count("vgg16"), 4097);
    assert_eq!(with_option("unet", "classes", 2) - default_count("unet"), 36);
    assert_eq!(with_option("awd-lm", "vocabulary", 10_001) - default_count("awd-lm"), 401);
    // torchvision's vgg11_bn, vgg13_bn, vgg16_bn and vgg19_bn.
    let normalised = |name: &str| parameters(name, Options::default().with("normalised", Setting::Truth(true)));
    let counts = ["vgg11", "vgg13", "vgg16", "vgg19"].map(normalised);
    assert_eq!(counts, [132_868_840, 133_053_736, 138_365_992, 143_678_248]);
    // The usual ResNet-18 for CIFAR-10.
    let small = Options::default().with("small-images", Setting::Truth(true)).number("size", 32).number("classes", 10);
    assert_eq!(parameters("resnet18", small), 11_173_962);
    let shared = parameters("transformer", Options::default().with("tied", Setting::Truth(true)));
    assert_eq!(default_count("transformer") - shared, 32_000 * 2048);
    let tied = parameters("llama3-8b", Options::default().with("tied", Setting::Truth(true)));
    assert_eq!(default_count("llama3-8b") - tied, 128_256 * 4096);
    assert_eq!(
        with_option("gpt-oss-20b", "experts", 33) - default_count("gpt-oss-20b"),
        24 * (3 * 2880 * 2880 + 4 * 2880)
    );
    // A fixed batch is stored in the file.
    let fixed = Options { batch: Some(3), ..Options::default() };
    let bytes = to_bytes(&build("mlp", &fixed).unwrap().model);
    let model = from_onnx(&parse(bytes.into(), None).unwrap(), "mlp", &Import::default()).unwrap();
    assert!(matches!(model.batch, Batch::Fixed { .. } | Batch::Symbol { default: Some(3), .. }), "{:?}", model.batch);
}

fn pipec(folder: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn every_model_has_help_and_a_line_in_the_list() {
    let folder = tempfile::tempdir().unwrap();
    let (_, list, _) = pipec(folder.path(), &["zoo"]);
    for entry in ENTRIES {
        assert!(list.contains(entry.about), "{}", entry.name);
        for size in entry.sizes {
            assert!(list.contains(&format!("{} ({})", size.name, size.about)), "{}", size.name);
        }
    }
    let (code, help, _) = pipec(folder.path(), &["zoo", "gpt2", "--help"]);
    assert_eq!(code, Some(0));
    assert!(
        help.contains("--vocabulary <N>") && help.contains("[default: 50257]") && !help.contains("--depth"),
        "{help}"
    );
}

#[test]
fn a_model_of_a_hundred_billion_parameters_is_planned() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let (code, _, message) = pipec(at, &["zoo", "gpt3", "-o", "gpt3.onnx"]);
    assert_eq!(code, Some(2));
    assert!(message.contains("174604259328 parameters") && message.contains("`--structure`"), "{message}");
    let (code, message, _) = pipec(at, &["zoo", "gpt3", "--structure", "-o", "gpt3.onnx"]);
    assert_eq!(code, Some(0));
    assert!(message.contains("without weights"), "{message}");
    let (code, message, _) = pipec(at, &["inspect", "gpt3.onnx", "--micro-batch", "1"]);
    assert_eq!(code, Some(0));
    assert!(message.contains("174,604,259,328"), "{message}");
    assert_eq!(pipec(at, &["zoo", "gpt2", "--depth", "3"]).0, Some(2));
    assert_eq!(pipec(at, &["zoo", "gpt2", "--tied", "perhaps"]).0, Some(2));
    assert_eq!(pipec(at, &["zoo", "gpt2", "--heads", "7"]).0, Some(2));
}
