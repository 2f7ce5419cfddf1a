//! `pipec zoo`: writes a model of the zoo as an ONNX file.
//!
//! Every model, and every published size of one, is a subcommand whose flags come from the zoo's lists. `pipec zoo gpt --help`
//! lists the options of a GPT; `pipec zoo gpt2 --help` lists them with the settings of GPT-2.

use crate::cli::screen::Screen;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use compiler::text::quantity;
use models::choice::Setting;
use models::zoo::{self, ENTRIES, Entry, Options, ZooError};
use pipec::error::Error;
use pipec::files::output;
use serde_json::json;
use std::path::PathBuf;

/// The requested model with its options; `None` lists the zoo.
#[derive(Debug)]
pub struct Arguments {
    request: Option<ModelRequest>,
}

#[derive(Debug)]
struct ModelRequest {
    name: String,
    output: Option<PathBuf>,
    options: Options,
}

impl Args for Arguments {
    fn augment_args(command: Command) -> Command {
        let subcommands = ENTRIES.iter().flat_map(|entry| {
            let sizes = entry.sizes.iter().map(|size| subcommand(entry, size.name, size.settings).hide(true));
            [subcommand(entry, entry.name, &[])].into_iter().chain(sizes)
        });
        command
            .subcommands(subcommands)
            // Accepts unknown names, so that `run` can report them.
            .allow_external_subcommands(true)
            .subcommand_value_name("MODEL")
            .subcommand_help_heading("Models")
            .disable_help_subcommand(true)
            .after_help(
                "`pipec zoo` lists the models with their published sizes.\n\n\
                 Examples:\n  pipec zoo residual-cnn -o model.onnx\n  pipec zoo gpt2-xl --structure\n  pipec zoo gpt --layers 4 --loss",
            )
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Arguments {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let Some((name, model_matches)) = matches.subcommand() else { return Ok(Self { request: None }) };
        if zoo::find(name).is_none() {
            let unknown = ModelRequest { name: name.to_owned(), output: None, options: Options::default() };
            return Ok(Self { request: Some(unknown) });
        }
        let mut options = Options {
            seed: model_matches.get_one("seed").copied().unwrap_or_default(),
            batch: model_matches.get_one("batch").copied(),
            loss: model_matches.get_flag("loss"),
            structure: model_matches.get_flag("structure"),
            ..Options::default()
        };
        let choices = zoo::find(name).map_or(&[][..], |(entry, _)| entry.choices);
        for choice in choices {
            if let Some(setting) = model_matches.get_one::<Setting>(choice.name) {
                options.settings.insert(choice.name.to_owned(), *setting);
            }
        }
        let output = model_matches.get_one("output").cloned();
        Ok(Self { request: Some(ModelRequest { name: name.to_owned(), output, options }) })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The flags of one model or size: its own options, then the common ones.
fn subcommand(entry: &'static Entry, name: &'static str, settings: &'static [(&'static str, Setting)]) -> Command {
    let flags = entry.choices.iter().map(|choice| {
        let preset = settings.iter().find(|(name, _)| *name == choice.name).map(|(_, setting)| *setting);
        let kind = match choice.usual {
            Setting::Number(_) => "N",
            Setting::Fraction(_) => "X",
            Setting::Truth(_) => "true|false",
        };
        let about = format!("{} [default: {}]", sentence(choice.about), preset.unwrap_or(choice.usual));
        let argument = flag(choice.name, kind, about).value_parser(|text: &str| choice.read(text));
        // A true/false flag without a value means true.
        let argument = match choice.usual {
            Setting::Truth(_) => argument.num_args(0..=1).default_missing_value("true"),
            _ => argument,
        };
        argument.help_heading("Model options")
    });
    let size_parser = value_parser!(usize);
    Command::new(name)
        .about(entry.about)
        .args(flags)
        .arg(flag("output", "FILE", "Output file [default: NAME.onnx]").short('o').value_parser(value_parser!(PathBuf)))
        .arg(flag("seed", "N", "Seed of the initial weights [default: 0]").value_parser(value_parser!(u64)))
        .arg(flag("batch", "N", "Fixed batch size instead of the symbol `batch`").value_parser(size_parser))
        .arg(switch("loss", "Compute the loss in the graph, from an input `labels`"))
        .arg(switch("structure", "Omit the weights; the graph alone can be planned at any size"))
}

fn flag(name: &'static str, value: &'static str, about: impl Into<String>) -> Arg {
    Arg::new(name).long(name).value_name(value).help(about.into())
}

fn switch(name: &'static str, about: &'static str) -> Arg {
    Arg::new(name).long(name).action(ArgAction::SetTrue).help(about)
}

/// Capitalises the first letter, as in all help texts.
fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}

/// Writes the model, or lists the zoo.
pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Error> {
    let Some(ModelRequest { name, output, options }) = arguments.request else { return list(screen) };
    let built = zoo::build(&name, &options).map_err(|error| {
        let failure = Error::input(format!("cannot build `{name}`")).because(&error);
        match error {
            ZooError::Unknown { .. } => failure.with_help("`pipec zoo` lists the models"),
            _ => failure.with_help(format!("`pipec zoo {name} --help` lists its options")),
        }
    })?;
    let bytes = zoo::to_bytes(&built.model);
    let path = match output {
        Some(path) => path,
        None => {
            let path = PathBuf::from(format!("{name}.onnx"));
            if path.exists() {
                return Err(Error::input(format!("{} already exists", path.display())).with_help(format!(
                    "use `-o {}` to overwrite it, or `-o FILE` to write another file",
                    path.display()
                )));
            }
            path
        }
    };
    let wrote = output::verb(&path);
    output::write(&path, &bytes)?;
    let (size, parameters) = (bytes.len() as u64, built.counts.parameters);
    // Models with more parameters than fit in 64 bits are refused earlier.
    let parameters = u64::try_from(parameters).unwrap_or(u64::MAX);
    let without = if options.structure { ", without weights" } else { "" };
    let count = quantity::count(parameters);
    screen.text(&format!("{wrote} {} ({count} parameters{without}, {})", path.display(), quantity::bytes(size)));
    screen.json(&json!({
        "model": name,
        "file": path.display().to_string(),
        "bytes": size,
        "parameters": parameters,
        "structure": options.structure,
    }));
    Ok(())
}

fn list(screen: &Screen) -> Result<(), Error> {
    let mut text = String::new();
    for entry in ENTRIES {
        text += &format!("{:14} {}\n", entry.name, entry.about);
        let options: Vec<String> = entry.choices.iter().map(|choice| format!("--{}", choice.name)).collect();
        text += &format!("{:14} {}\n", "", options.join(" "));
        let sizes: Vec<String> = entry.sizes.iter().map(|size| format!("{} ({})", size.name, size.about)).collect();
        if !sizes.is_empty() {
            text += &format!("{:14} sizes: {}\n", "", sizes.join(", "));
        }
    }
    text += "`pipec zoo NAME` writes a model, `pipec zoo NAME --help` explains its options.\n";
    screen.prose(&text);
    let entries: Vec<_> = ENTRIES
        .iter()
        .map(|entry| {
            let options: Vec<_> = entry
                .choices
                .iter()
                .map(|it| json!({"name": it.name, "about": it.about, "default": default(it.usual)}))
                .collect();
            let sizes: Vec<_> = entry.sizes.iter().map(|it| json!({"name": it.name, "about": it.about})).collect();
            json!({"name": entry.name, "about": entry.about, "options": options, "sizes": sizes})
        })
        .collect();
    screen.json(&json!({"models": entries}));
    Ok(())
}

fn default(setting: Setting) -> serde_json::Value {
    match setting {
        Setting::Number(value) => json!(value),
        Setting::Fraction(value) => json!(value),
        Setting::Truth(value) => json!(value),
    }
}
