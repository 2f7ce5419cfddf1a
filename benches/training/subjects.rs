//! The trained zoo models. `peer.py` has the same models under the same names.

use compiler::import::import::{Model, Options as Import, load};
use models::choice::Setting;
use models::zoo::{Options, build, to_bytes};

/// A model with its training settings.
#[derive(Debug)]
pub struct Subject {
    /// Name here and in `peer.py`.
    pub name: &'static str,
    pub about: &'static str,
    pub entry: &'static str,
    settings: &'static [(&'static str, Setting)],
    pub batch: usize,
    /// Minibatches per round, a few seconds' worth.
    pub steps: u32,
    /// Goal: speedup over PyTorch on one thread.
    pub goal: f64,
}

const MLP: &[(&str, Setting)] =
    &[("hidden", Setting::Number(1024)), ("layers", Setting::Number(8)), ("inputs", Setting::Number(1024))];

pub const SUBJECTS: &[Subject] = &[
    Subject {
        name: "gpt",
        about: "GPT, 4 layers, 256 wide, 128 tokens, vocabulary 8192",
        entry: "gpt",
        settings: &[
            ("layers", Setting::Number(4)),
            ("hidden", Setting::Number(256)),
            ("heads", Setting::Number(4)),
            ("context", Setting::Number(128)),
            ("vocabulary", Setting::Number(8192)),
        ],
        batch: 8,
        steps: 6,
        goal: 1.2,
    },
    Subject {
        name: "resnet18",
        about: "ResNet-18 for CIFAR",
        entry: "resnet18",
        settings: &[
            ("small-images", Setting::Truth(true)),
            ("size", Setting::Number(32)),
            ("classes", Setting::Number(10)),
        ],
        batch: 16,
        steps: 4,
        goal: 1.2,
    },
    Subject {
        name: "vgg11bn",
        about: "VGG-11-BN for CIFAR, hidden layers 512 wide",
        entry: "vgg11",
        settings: &[
            ("normalised", Setting::Truth(true)),
            ("size", Setting::Number(32)),
            ("hidden", Setting::Number(512)),
            ("classes", Setting::Number(10)),
            ("dropout", Setting::Fraction(0.0)),
        ],
        batch: 16,
        steps: 12,
        goal: 1.2,
    },
    Subject {
        name: "lstm",
        about: "LSTM, 2 layers, 512 wide, 32 tokens, vocabulary 4096",
        entry: "awd-lm",
        settings: &[
            ("layers", Setting::Number(2)),
            ("hidden", Setting::Number(512)),
            ("embedding", Setting::Number(512)),
            ("vocabulary", Setting::Number(4096)),
            ("context", Setting::Number(32)),
            ("dropout", Setting::Fraction(0.0)),
            ("hidden-dropout", Setting::Fraction(0.0)),
            ("weight-drop", Setting::Fraction(0.0)),
            ("word-dropout", Setting::Fraction(0.0)),
        ],
        batch: 16,
        steps: 10,
        goal: 1.2,
    },
    Subject {
        name: "mlp-512",
        about: "perceptron, 8 layers, 1024 wide",
        entry: "mlp",
        settings: MLP,
        batch: 512,
        steps: 10,
        goal: 1.1,
    },
    Subject {
        name: "mlp-64",
        about: "perceptron, 8 layers, 1024 wide",
        entry: "mlp",
        settings: MLP,
        batch: 64,
        steps: 20,
        goal: 1.2,
    },
];

impl Subject {
    /// The model imported from a file, and its parameter count.
    pub fn import(&self) -> (Model, u64) {
        let options =
            self.settings.iter().fold(Options::default(), |options, (name, setting)| options.with(name, *setting));
        let built = build(self.entry, &options).expect("the zoo builds its models");
        let folder = tempfile::tempdir().expect("there is a place for temporary files");
        let path = folder.path().join(format!("{}.onnx", self.name));
        std::fs::write(&path, to_bytes(&built.model)).expect("the folder can be written to");
        let model = load(&path, &Import::default()).expect("what the zoo writes can be read");
        (model, built.counts.parameters as u64)
    }
}
