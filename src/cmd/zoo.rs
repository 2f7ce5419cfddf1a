//! `pipec zoo`: a model of the zoo as an ONNX file.

use crate::failure::Failure;
use crate::quantity;
use crate::screen::Screen;
use crate::source;
use clap::Args;
use models::zoo::{self, ENTRIES, Options, ZooError};
use serde_json::json;
use std::path::PathBuf;

/// Which model, with which options.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Name of the model; without it the zoo is listed
    name: Option<String>,
    /// Where to write it [default: NAME.onnx]
    #[arg(short, long, value_name = "FILE", requires = "name")]
    output: Option<PathBuf>,
    /// Seed of the initial weights
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// A fixed batch size instead of the symbol `batch`
    #[arg(long, value_name = "N")]
    batch: Option<usize>,
    /// Width of the hidden layers, channels of the first group, or width of the residual stream
    #[arg(long, value_name = "N")]
    hidden: Option<usize>,
    /// Hidden layers, or blocks
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Classes
    #[arg(long, value_name = "N")]
    classes: Option<usize>,
    /// Width of the input
    #[arg(long, value_name = "N")]
    inputs: Option<usize>,
    /// Different tokens
    #[arg(long, value_name = "N")]
    vocabulary: Option<usize>,
    /// Tokens in a sequence
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Attention heads
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    /// Whether head and token embedding share weights
    #[arg(long, value_name = "true|false")]
    tied: Option<bool>,
}

/// Writes the model, or lists the zoo.
pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Failure> {
    let Some(name) = &arguments.name else { return list(screen) };
    let options = Options {
        seed: arguments.seed,
        batch: arguments.batch,
        hidden: arguments.hidden,
        layers: arguments.layers,
        classes: arguments.classes,
        inputs: arguments.inputs,
        vocabulary: arguments.vocabulary,
        context: arguments.context,
        heads: arguments.heads,
        tied: arguments.tied,
    };
    let model = zoo::build(name, &options).map_err(|error| {
        let failure = Failure::input(format!("cannot build `{name}`")).because(&error);
        match error {
            ZooError::Unknown { .. } => failure.help("`pipec zoo` lists the models"),
            _ => failure.help("`pipec zoo` lists the options of each model"),
        }
    })?;
    let bytes = zoo::to_bytes(&model);
    let path = match arguments.output {
        Some(path) => path,
        None => {
            let path = PathBuf::from(format!("{name}.onnx"));
            if path.exists() {
                return Err(Failure::input(format!("{} exists already", path.display()))
                    .help(format!("`-o {}` writes over it, `-o FILE` beside it", path.display())));
            }
            path
        }
    };
    source::write(&path, &bytes)?;
    let size = bytes.len() as u64;
    screen.text(&format!("wrote {} ({})", path.display(), quantity::bytes(size)));
    screen.json(&json!({"model": name, "file": path.display().to_string(), "bytes": size}));
    Ok(())
}

fn list(screen: &Screen) -> Result<(), Failure> {
    let mut text = String::new();
    for entry in ENTRIES {
        let options: Vec<String> = entry.options.iter().map(|option| format!("--{option}")).collect();
        text += &format!("{:14} {}\n{:14} {}\n", entry.name, entry.about, "", options.join(" "));
    }
    screen.text(&text);
    let entries: Vec<_> =
        ENTRIES.iter().map(|e| json!({"name": e.name, "about": e.about, "options": e.options})).collect();
    screen.json(&json!({"models": entries}));
    Ok(())
}
