//! The zoo: models by name, with options.
//!
//! Every model's file has an [`Entry`]: its name, its choices with their usual values, its published sizes under names
//! of their own, and what builds it. Here they are gathered, and what all models share is done: the batch, the loss,
//! the limit of one file.
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
    alexnet, amoebanet, awd_lm, bert, gnmt, gpt, mlp, moe, residual_cnn, resnet, s2vt, transformer, unet, vgg,
};

/// The most bytes of weights that are built: protobuf allows a message 2 GiB, and nodes take room too.
const MOST_BYTES: u128 = 2_000_000_000;

/// The most parameters that a structure may have: more than anyone has trained, and their bytes fit an offset.
const MOST_PARAMETERS: u128 = 1_000_000_000_000_000;

/// What can be asked of every model, and the settings of its own choices.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Options {
    /// Seed of the initial weights.
    pub seed: u64,
    /// A fixed batch size instead of the symbol `batch`.
    pub batch: Option<usize>,
    /// Whether the graph works out its loss from an input `labels`.
    pub loss: bool,
    /// Whether the weights are left out.
    pub structure: bool,
    /// The model's own choices, by name; what is not here is usual.
    pub settings: BTreeMap<String, Setting>,
}

impl Options {
    /// These options with one setting more.
    pub fn with(mut self, name: &str, setting: Setting) -> Self {
        self.settings.insert(name.to_owned(), setting);
        self
    }

    /// These options with one number more.
    pub fn number(self, name: &str, value: usize) -> Self {
        self.with(name, Setting::Number(value))
    }
}

/// One model of the zoo.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Its name.
    pub name: &'static str,
    /// What it is, in one line, and who published it.
    pub about: &'static str,
    /// What can be chosen, besides what every model takes.
    pub choices: &'static [Choice],
    /// Published sizes.
    pub sizes: &'static [Size],
    /// Settings with which it is small enough to train in a test.
    pub small: &'static [(&'static str, Setting)],
    /// Builds it; see [`build`].
    pub build: fn(&mut Builder, &Given, Axis) -> Result<Prediction, ChoiceError>,
}

impl Entry {
    /// Options that make it small.
    pub fn small(&self) -> Options {
        self.small.iter().fold(Options::default(), |options, (name, setting)| options.with(name, *setting))
    }
}

/// A published size of a model: a name for some settings.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Its name, as unique as a model's.
    pub name: &'static str,
    /// How large it is.
    pub about: &'static str,
    /// What it sets.
    pub settings: &'static [(&'static str, Setting)],
}

/// All models, in the order in which they are listed.
pub const ENTRIES: &[Entry] = &[
    mlp::ENTRY,
    residual_cnn::ENTRY,
    gpt::ENTRY,
    moe::ENTRY,
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

/// A model that was built.
#[derive(Debug, Clone)]
pub struct Built {
    /// As ONNX.
    pub model: ModelProto,
    /// How much it has.
    pub counts: Counts,
}

/// Why a model cannot be built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ZooError {
    /// No such model.
    #[error("the zoo has no model `{}`; it has {}{}", name.escape_default(), names(), meant(name))]
    Unknown {
        /// The name asked for.
        name: String,
    },
    /// A choice that the model does not have, or a value that makes no model.
    #[error(transparent)]
    Choice(#[from] ChoiceError),
    /// A batch of nothing.
    #[error("a batch must have at least 1 sample")]
    Batch,
    /// Too many parameters for one file.
    #[error(
        "this `{model}` has {parameters} parameters, more than fit the 2 GiB of one ONNX file; `--structure` leaves \
         the weights out"
    )]
    Large {
        /// The model.
        model: &'static str,
        /// How many.
        parameters: u128,
    },
    /// Too many parameters for any file.
    #[error("this `{model}` would have {parameters} parameters")]
    Vast {
        /// The model.
        model: &'static str,
        /// How many.
        parameters: u128,
    },
}

fn names() -> String {
    ENTRIES.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ")
}

/// The model or size that was meant by a name that is none, as the end of a sentence.
pub fn meant(name: &str) -> String {
    hint(name, ENTRIES.iter().flat_map(|entry| entry.sizes.iter().map(|size| size.name).chain([entry.name])))
}

/// The model or published size called `name`, with what a size sets.
pub fn find(name: &str) -> Option<(&'static Entry, &'static [(&'static str, Setting)])> {
    ENTRIES.iter().find_map(|entry| {
        let size = entry.sizes.iter().find(|size| size.name == name).map(|size| size.settings);
        if entry.name == name { Some((entry, [].as_slice())) } else { size.map(|settings| (entry, settings)) }
    })
}

/// Builds the model or published size called `name`.
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
    // Without weights first: that costs next to nothing and tells how many there are.
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

/// The bytes of `model` as an ONNX file.
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

    /// Elements of all initializers but the running statistics.
    fn parameters(name: &str, options: &Options) -> i64 {
        let model = decoded(name, options);
        let trained = model.initializers.iter().filter(|tensor| !tensor.name.contains("running_"));
        trained.map(|tensor| tensor.dims.iter().product::<i64>()).sum()
    }

    #[test]
    fn every_model_decodes_without_a_warning_and_is_the_same_each_time() {
        for entry in ENTRIES {
            let options = Options { seed: 3, ..entry.small() };
            let model = decoded(entry.name, &options);
            assert!(model.warnings.is_empty(), "{:?}", model.warnings);
            assert_eq!(model, decoded(entry.name, &options));
            let other = decoded(entry.name, &entry.small());
            assert_ne!(model.initializers, other.initializers);
            assert_eq!(model.sha256, other.sha256);
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
            let usual = entry.choices.iter().map(|choice| (choice.name.to_owned(), choice.usual)).collect();
            Given::new(entry.name, entry.choices, &usual).unwrap();
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
