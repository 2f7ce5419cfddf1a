//! The zoo: models by name, with options.

use compiler::import::onnx::proto::ModelProto;
use prost::Message;

use crate::builder::Axis;
use crate::gpt::Gpt;
use crate::mlp::Mlp;
use crate::residual_cnn::ResidualCnn;

/// The largest model that is built, in parameters: 1.6 GB as f32, below the 2 GiB that protobuf allows a message.
const MOST_PARAMETERS: u128 = 400_000_000;

/// What can be asked of a model. `None` is the model's own choice; asking for what a model does not have is an error.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// Seed of the initial weights.
    pub seed: u64,
    /// A fixed batch size instead of the symbol `batch`.
    pub batch: Option<usize>,
    /// mlp: width of every hidden layer (with `layers`), or the first width. residual-cnn: channels of the first
    /// group. gpt: width of the residual stream.
    pub hidden: Option<usize>,
    /// mlp: number of hidden layers. residual-cnn: blocks in each group. gpt: number of blocks.
    pub layers: Option<usize>,
    /// mlp, residual-cnn: number of classes.
    pub classes: Option<usize>,
    /// mlp: width of the input, which then has one dimension instead of a digit's three.
    pub inputs: Option<usize>,
    /// gpt: number of different tokens.
    pub vocabulary: Option<usize>,
    /// gpt: tokens in a sequence.
    pub context: Option<usize>,
    /// gpt: attention heads.
    pub heads: Option<usize>,
    /// gpt: whether head and token embedding share weights.
    pub tied: Option<bool>,
}

/// One model of the zoo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: &'static str,
    /// What it is, in one line.
    pub about: &'static str,
    /// The options it takes besides `seed` and `batch`.
    pub options: &'static [&'static str],
}

/// All models, in the order in which they are listed.
pub const ENTRIES: &[Entry] = &[
    Entry {
        name: "mlp",
        about: "perceptron for 8x8 digits, 64-128-64-10",
        options: &["hidden", "layers", "classes", "inputs"],
    },
    Entry {
        name: "residual-cnn",
        about: "residual network with batch normalisation for 8x8 digits",
        options: &["hidden", "layers", "classes"],
    },
    Entry {
        name: "gpt",
        about: "small GPT: 2 layers, 64 wide, 16 tokens, tied embedding",
        options: &["hidden", "layers", "vocabulary", "context", "heads", "tied"],
    },
];

/// Why a model cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ZooError {
    /// No such model.
    #[error("the zoo has no model `{}`; it has {}", name.escape_default(), ENTRIES.iter().map(|e| e.name).collect::<Vec<_>>().join(", "))]
    Unknown {
        /// The name asked for.
        name: String,
    },
    /// The model does not have this option.
    #[error("`{model}` has no option `{option}`")]
    Option {
        /// The model.
        model: &'static str,
        /// The option.
        option: &'static str,
    },
    /// A value that makes no model.
    #[error("`{option}` of `{model}` cannot be {value}: {why}")]
    Value {
        /// The model.
        model: &'static str,
        /// The option.
        option: &'static str,
        /// The value.
        value: usize,
        /// Why not.
        why: &'static str,
    },
    /// Too many parameters for one file.
    #[error("this `{model}` has {parameters} parameters, more than the {MOST_PARAMETERS} that fit one ONNX file")]
    Large {
        /// The model.
        model: &'static str,
        /// How many.
        parameters: u128,
    },
}

/// Builds the model called `name`. `cnn` is short for `residual-cnn`.
pub fn build(name: &str, options: &Options) -> Result<ModelProto, ZooError> {
    let name = if name == "cnn" { "residual-cnn" } else { name };
    let entry = ENTRIES.iter().find(|entry| entry.name == name);
    let entry = entry.ok_or_else(|| ZooError::Unknown { name: name.to_owned() })?;
    check_options(entry, options)?;
    let batch = options.batch.map_or(Axis::Named("batch"), Axis::Size);
    let large = |parameters: u128| match parameters {
        0..=MOST_PARAMETERS => Ok(()),
        _ => Err(ZooError::Large { model: entry.name, parameters }),
    };
    match entry.name {
        "mlp" => {
            let model = mlp(options);
            large(parameters_of_mlp(&model))?;
            Ok(model.build(batch, options.seed))
        }
        "residual-cnn" => {
            let model = residual_cnn(options);
            large(parameters_of_residual_cnn(&model))?;
            Ok(model.build(batch, options.seed))
        }
        _ => {
            let model = gpt(options);
            if !model.width.is_multiple_of(model.heads) {
                let why = "the width must be a multiple of it";
                return Err(ZooError::Value { model: "gpt", option: "heads", value: model.heads, why });
            }
            large(parameters_of_gpt(&model))?;
            Ok(model.build(batch, options.seed))
        }
    }
}

/// The bytes of `model` as an ONNX file.
pub fn to_bytes(model: &ModelProto) -> Vec<u8> {
    model.encode_to_vec()
}

fn check_options(entry: &Entry, options: &Options) -> Result<(), ZooError> {
    let numbers = [
        ("hidden", options.hidden),
        ("layers", options.layers),
        ("classes", options.classes),
        ("inputs", options.inputs),
        ("vocabulary", options.vocabulary),
        ("context", options.context),
        ("heads", options.heads),
        ("tied", options.tied.map(|_| 1)),
    ];
    let model = entry.name;
    for (option, value) in numbers.into_iter().filter_map(|(option, value)| Some((option, value?))) {
        if !entry.options.contains(&option) {
            return Err(ZooError::Option { model, option });
        }
        // More than this of anything is a slip of the keyboard, and keeps every product below within u128.
        match value {
            0 => return Err(ZooError::Value { model, option, value, why: "it must be at least 1" }),
            1..=1_000_000 => {}
            _ => return Err(ZooError::Value { model, option, value, why: "it must be at most 1000000" }),
        }
    }
    match (options.batch, options.layers, options.context) {
        (Some(0), ..) => Err(ZooError::Value { model, option: "batch", value: 0, why: "it must be at least 1" }),
        (_, Some(value @ 10_001..), _) => {
            Err(ZooError::Value { model, option: "layers", value, why: "it must be at most 10000" })
        }
        // The mask is a constant of context × context in every layer.
        (.., Some(value @ 2049..)) => {
            Err(ZooError::Value { model, option: "context", value, why: "it must be at most 2048" })
        }
        _ => Ok(()),
    }
}

fn mlp(options: &Options) -> Mlp {
    let own = Mlp::digits();
    let hidden = match (options.hidden, options.layers) {
        (None, None) => own.hidden,
        (width, layers) => vec![width.unwrap_or(own.hidden[0]); layers.unwrap_or(own.hidden.len())],
    };
    Mlp {
        sample: options.inputs.map_or(own.sample, |width| vec![width]),
        hidden,
        classes: options.classes.unwrap_or(own.classes),
    }
}

fn residual_cnn(options: &Options) -> ResidualCnn {
    let own = ResidualCnn::digits();
    ResidualCnn {
        widths: options.hidden.map_or(own.widths, |width| vec![width, 2 * width]),
        blocks: options.layers.unwrap_or(own.blocks),
        classes: options.classes.unwrap_or(own.classes),
        ..own
    }
}

fn gpt(options: &Options) -> Gpt {
    let own = Gpt::small();
    Gpt {
        vocabulary: options.vocabulary.unwrap_or(own.vocabulary),
        context: options.context.unwrap_or(own.context),
        width: options.hidden.unwrap_or(own.width),
        heads: options.heads.unwrap_or(own.heads),
        layers: options.layers.unwrap_or(own.layers),
        tied: options.tied.unwrap_or(own.tied),
    }
}

fn parameters_of_mlp(model: &Mlp) -> u128 {
    let mut width: u128 = model.sample.iter().map(|dim| *dim as u128).product();
    let mut count = 0;
    for next in model.hidden.iter().chain([&model.classes]) {
        count += (width + 1) * *next as u128;
        width = *next as u128;
    }
    count
}

/// An upper bound: every block is counted as if it changed the width.
fn parameters_of_residual_cnn(model: &ResidualCnn) -> u128 {
    let widest = model.widths.iter().copied().max().unwrap_or(1) as u128;
    let blocks = (model.blocks * model.widths.len()) as u128;
    blocks * (19 * widest * widest + 12 * widest) + widest * (9 + 4 + model.classes as u128) + model.classes as u128
}

/// Parameters and the masks, which take as much room.
fn parameters_of_gpt(model: &Gpt) -> u128 {
    let (width, context, vocabulary) = (model.width as u128, model.context as u128, model.vocabulary as u128);
    let block = 12 * width * width + 13 * width + context * context;
    let tables = if model.tied { vocabulary } else { 2 * vocabulary };
    model.layers as u128 * block + (tables + context + 2) * width
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::import::onnx::decode::parse;

    fn decoded(name: &str, options: &Options) -> compiler::import::onnx::model::OnnxModel {
        let bytes = to_bytes(&build(name, options).unwrap());
        parse(bytes.into(), None).unwrap()
    }

    /// Elements of all initializers but the running statistics.
    fn parameters(name: &str, options: &Options) -> i64 {
        let model = decoded(name, options);
        let trained = model.initializers.iter().filter(|tensor| !tensor.name.contains("running_"));
        trained.map(|tensor| tensor.dims.iter().product::<i64>()).sum()
    }

    #[test]
    fn every_model_decodes_without_a_warning_and_is_the_same_each_time() {
        for entry in ENTRIES {
            let options = Options { seed: 3, ..Options::default() };
            let model = decoded(entry.name, &options);
            assert!(model.warnings.is_empty(), "{:?}", model.warnings);
            assert_eq!(model, decoded(entry.name, &options));
            let other = decoded(entry.name, &Options::default());
            assert_ne!(model.initializers, other.initializers);
            assert_eq!(model.sha256, other.sha256);
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(parameters("mlp", &Options::default()), 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10);
        let three = Options { hidden: Some(32), layers: Some(3), inputs: Some(20), ..Options::default() };
        assert_eq!(parameters("mlp", &three), 21 * 32 + 2 * 33 * 32 + 33 * 10);
        let cnn = 144 + 32 + (2 * 2304 + 64) + (4608 + 9216 + 512 + 192) + 330;
        assert_eq!(parameters("cnn", &Options::default()), cnn);
        let gpt = (97 + 16 + 2) * 64 + 2 * (12 * 64 * 64 + 13 * 64);
        assert_eq!(parameters("gpt", &Options::default()), gpt);
        let untied = Options { tied: Some(false), ..Options::default() };
        assert_eq!(parameters("gpt", &untied), gpt + 97 * 64);
    }

    #[test]
    fn modules_are_told() {
        let model = decoded("residual-cnn", &Options::default());
        let of = |op: &str, nth| model.nodes.iter().filter(|node| node.op_type == op).nth(nth).unwrap().module.clone();
        assert_eq!(of("Conv", 0), "conv1");
        assert_eq!(of("Conv", 5), "layer2.0.downsample.0");
        assert_eq!(of("Add", 1), "layer2.0");
        let model = decoded("gpt", &Options::default());
        assert_eq!(model.nodes.iter().find(|node| node.op_type == "Gelu").unwrap().module, "blocks.0.mlp.act");
    }

    #[test]
    fn what_makes_no_model_is_refused() {
        let fails = |name: &str, options: Options| build(name, &options).unwrap_err();
        assert!(fails("vgg", Options::default()).to_string().contains("mlp, residual-cnn, gpt"));
        let heads = Options { heads: Some(3), ..Options::default() };
        assert!(matches!(fails("mlp", heads.clone()), ZooError::Option { option: "heads", .. }));
        assert!(matches!(fails("gpt", heads), ZooError::Value { option: "heads", value: 3, .. }));
        let none = Options { hidden: Some(0), ..Options::default() };
        assert!(matches!(fails("mlp", none), ZooError::Value { value: 0, .. }));
        let vast = Options { hidden: Some(1_000_000), ..Options::default() };
        for entry in ENTRIES {
            assert!(matches!(fails(entry.name, vast.clone()), ZooError::Large { .. }), "{}", entry.name);
        }
    }
}
