//! The model zoo: models by name, with options.
//!
//! Each model's file has an [`Entry`] with its options and published sizes. This module handles the parts that all
//! models share: batch size, loss, file size limit.
//!
//! ```
//! use models::zoo::{Options, build};
//! let built = build("gpt2", &Options { structure: true, ..Options::default() }).unwrap();
//! assert_eq!(built.counts.parameters, 124_439_808);
//! ```

use std::collections::BTreeMap;

use compiler::import::onnx::proto::ModelProto;
use compiler::text::suggest::hint;
use prost::Message;

use crate::builder::{Axis, Builder, Counts};
use crate::choice::{Choice, ChoiceError, Given, Setting};
use crate::prediction::{Prediction, finish};
use crate::{
    alexnet, amoebanet, awd_lm, bert, gnmt, gpt, gpt_oss, llama, mlp, moe, residual_cnn, resnet, s2vt, transformer,
    unet, vgg,
};

/// Maximum bytes of weights: protobuf limits a message to 2 GiB, nodes included.
const MOST_BYTES: u128 = 2_000_000_000;

/// Maximum parameters of a structure: larger than any trained model, and byte offsets still fit 64 bits.
const MOST_PARAMETERS: u128 = 1_000_000_000_000_000;

/// Options of all models, and settings of the model's own options.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Options {
    pub seed: u64,
    /// A fixed batch size instead of the symbol `batch`.
    pub batch: Option<usize>,
    /// Adds an input `labels` and computes the loss in the graph.
    pub loss: bool,
    /// Omits the weights.
    pub structure: bool,
    /// Values of the model's own options by name; the others have their defaults.
    pub settings: BTreeMap<String, Setting>,
}

impl Options {
    pub fn with(mut self, name: &str, setting: Setting) -> Self {
        self.settings.insert(name.to_owned(), setting);
        self
    }

    pub fn number(self, name: &str, value: usize) -> Self {
        self.with(name, Setting::Number(value))
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Entry {
    pub name: &'static str,
    pub about: &'static str,
    pub choices: &'static [Choice],
    pub sizes: &'static [Size],
    /// Settings small enough to train in a test.
    pub small: &'static [(&'static str, Setting)],
    /// Adds the model to the builder; see [`build`].
    pub build: fn(&mut Builder, &Given, Axis) -> Result<Prediction, ChoiceError>,
}

impl Entry {
    pub fn small(&self) -> Options {
        self.small.iter().fold(Options::default(), |options, (name, setting)| options.with(name, *setting))
    }
}

/// A published size of a model: a name for a set of settings.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub name: &'static str,
    pub about: &'static str,
    pub settings: &'static [(&'static str, Setting)],
}

pub const ENTRIES: &[Entry] = &[
    mlp::ENTRY,
    residual_cnn::ENTRY,
    gpt::ENTRY,
    llama::ENTRY,
    moe::ENTRY,
    gpt_oss::ENTRY,
    alexnet::ENTRY,
    amoebanet::ENTRY,
    awd_lm::ENTRY,
    bert::ENTRY,
    gnmt::ENTRY,
    resnet::ENTRY,
    s2vt::ENTRY,
    transformer::ENTRY,
    unet::ENTRY,
    vgg::ENTRY,
];

#[derive(Debug, Clone)]
pub struct Built {
    pub model: ModelProto,
    pub counts: Counts,
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ZooError {
    #[error("the zoo has no model `{}`; it has {}{}", name.escape_default(), names(), meant(name))]
    Unknown { name: String },
    #[error(transparent)]
    Choice(#[from] ChoiceError),
    #[error("a batch must have at least 1 sample")]
    Batch,
    #[error(
        "this `{model}` has {parameters} parameters, which exceeds the 2 GiB limit of one ONNX file; use \
         `--structure` to omit the weights"
    )]
    Large { model: &'static str, parameters: u128 },
    #[error("this `{model}` would have {parameters} parameters")]
    Vast { model: &'static str, parameters: u128 },
}

fn names() -> String {
    ENTRIES.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ")
}

/// The suggestion for an unknown model or size, as a suffix of a message.
pub fn meant(name: &str) -> String {
    hint(name, ENTRIES.iter().flat_map(|entry| entry.sizes.iter().map(|size| size.name).chain([entry.name])))
}

/// Finds a model or published size, with the settings of the size.
pub fn find(name: &str) -> Option<(&'static Entry, &'static [(&'static str, Setting)])> {
    ENTRIES.iter().find_map(|entry| {
        let size = entry.sizes.iter().find(|size| size.name == name).map(|size| size.settings);
        if entry.name == name { Some((entry, [].as_slice())) } else { size.map(|settings| (entry, settings)) }
    })
}

/// Builds the model or published size called `name`. Fails on unknown options and too many parameters.
pub fn build(name: &str, options: &Options) -> Result<Built, ZooError> {
    let (entry, sized) = find(name).ok_or_else(|| ZooError::Unknown { name: name.to_owned() })?;
    let mut settings: BTreeMap<String, Setting> = sized.iter().map(|(name, it)| ((*name).to_owned(), *it)).collect();
    settings.extend(options.settings.clone());
    let given = Given::new(entry.name, entry.choices, &settings)?;
    let batch = match options.batch {
        None => Axis::Named("batch"),
        Some(0) => return Err(ZooError::Batch),
        Some(size) => Axis::Size(size),
    };
    // Build without weights first: this is cheap and gives the parameter count.
    let structure = assemble(Builder::structure(entry.name), entry, &given, batch, options.loss)?;
    let parameters = structure.counts.parameters;
    if parameters > MOST_PARAMETERS {
        return Err(ZooError::Vast { model: entry.name, parameters });
    }
    if options.structure {
        return Ok(structure);
    }
    if 4 * (parameters + structure.counts.statistics) > MOST_BYTES {
        return Err(ZooError::Large { model: entry.name, parameters });
    }
    assemble(Builder::new(entry.name, options.seed), entry, &given, batch, options.loss)
}

fn assemble(mut net: Builder, entry: &Entry, given: &Given, batch: Axis, loss: bool) -> Result<Built, ZooError> {
    let prediction = (entry.build)(&mut net, given, batch)?;
    finish(&mut net, &prediction, loss);
    let counts = net.counts();
    Ok(Built { model: net.finish(), counts })
}

/// Encodes `model` as an ONNX file.
pub fn to_bytes(model: &ModelProto) -> Vec<u8> {
    model.encode_to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::import::onnx::decode::parse;
    use compiler::import::onnx::model::OnnxModel;

    fn decoded(name: &str, options: &Options) -> OnnxModel {
        let bytes = to_bytes(&build(name, options).unwrap().model);
        parse(bytes.into(), None).unwrap()
    }

    /// Elements of all initializers except running statistics.
    fn parameters(name: &str, options: &Options) -> i64 {
        let model = decoded(name, options);
        let trainable = model.initializers.iter().filter(|tensor| !tensor.name.contains("running_"));
        trainable.map(|tensor| tensor.dims.iter().product::<i64>()).sum()
    }

    #[test]
    fn every_model_decodes_without_a_warning_and_is_the_same_each_time() {
        for entry in ENTRIES {
            let options = Options { seed: 3, ..entry.small() };
            let model = decoded(entry.name, &options);
            assert!(model.warnings.is_empty(), "{:?}", model.warnings);
            assert_eq!(model, decoded(entry.name, &options));
            let reseeded = decoded(entry.name, &entry.small());
            assert_ne!(model.initializers, reseeded.initializers);
            assert_eq!(model.sha256, reseeded.sha256);
        }
    }

    #[test]
    fn names_are_unique_and_settings_exist() {
        let names: Vec<&str> =
            ENTRIES.iter().flat_map(|entry| entry.sizes.iter().map(|size| size.name).chain([entry.name])).collect();
        let unique: std::collections::BTreeSet<&str> = names.iter().copied().collect();
        assert_eq!(unique.len(), names.len());
        for entry in ENTRIES {
            for settings in entry.sizes.iter().map(|size| size.settings).chain([entry.small]) {
                let settings = settings.iter().map(|(name, setting)| ((*name).to_owned(), *setting)).collect();
                Given::new(entry.name, entry.choices, &settings).unwrap();
            }
            let defaults = entry.choices.iter().map(|choice| (choice.name.to_owned(), choice.usual)).collect();
            Given::new(entry.name, entry.choices, &defaults).unwrap();
        }
    }

    #[test]
    fn sizes_of_the_models_for_digits() {
        let number = |name, value| Options::default().number(name, value);
        assert_eq!(parameters("mlp", &Options::default()), 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10);
        let three = number("hidden", 32).number("layers", 3).number("inputs", 20);
        assert_eq!(parameters("mlp", &three), 21 * 32 + 2 * 33 * 32 + 33 * 10);
        let cnn = 144 + 32 + (2 * 2304 + 64) + (4608 + 9216 + 512 + 192) + 330;
        assert_eq!(parameters("cnn", &Options::default()), cnn);
        let gpt = (97 + 16 + 2) * 64 + 2 * (12 * 64 * 64 + 13 * 64);
        assert_eq!(parameters("gpt", &Options::default()), gpt);
        let untied = Options::default().with("tied", Setting::Truth(false));
        assert_eq!(parameters("gpt", &untied), gpt + 97 * 64);
    }

    #[test]
    fn nodes_name_their_modules() {
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
        let number = |name, value| Options::default().number(name, value);
        assert!(fails("lenet", Options::default()).to_string().contains("mlp, residual-cnn, gpt"));
        assert!(matches!(fails("mlp", number("heads", 3)), ZooError::Choice(ChoiceError::Unknown { .. })));
        for (name, option, value) in [
            ("gpt", "heads", 3),
            ("mlp", "hidden", 0),
            ("gnmt", "layers", 7),
            ("resnet", "depth", 51),
            ("vgg", "size", 100),
            ("amoebanet", "layers", 4),
            ("unet", "channels", 3),
            ("transformer", "heads", 3),
            ("llama", "kv-heads", 3),
            ("llama", "heads", 64),
            ("gpt-oss", "head-size", 3),
            ("gpt-oss", "chosen", 5),
        ] {
            let error = fails(name, number(option, value));
            assert!(error.to_string().contains(&format!("`{option}` of `{name}` cannot be {value}")), "{error}");
        }
        assert_eq!(fails("mlp", Options { batch: Some(0), ..Options::default() }), ZooError::Batch);
        assert!(fails("gpt2-xl", Options::default()).to_string().contains("`--structure`"));
        let vast = number("hidden", 1_000_000);
        for name in ["mlp", "residual-cnn", "gpt"] {
            assert!(matches!(fails(name, vast.clone()), ZooError::Large { .. }), "{name}");
        }
        let vast = Options { structure: true, ..vast.number("layers", 10_000) };
        assert!(matches!(fails("gpt", vast), ZooError::Vast { .. }));
    }
}
