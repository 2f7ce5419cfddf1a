//! `pipec export`: writes a plan for other tools.

use crate::cli::args::schedule as schedule_flag;
use crate::cli::path_conflicts;
use crate::cli::screen::Screen;
use clap::Args;
use compiler::export::target::refusal::Refusal;
use compiler::export::target::{self, Bundle, Entry, ExportInput, File, Need, TARGETS};
use compiler::plan::Plan;
use compiler::profile::cost_graph::CostGraph;
use compiler::schedule::formats::csv::{ComputeTable, csv};
use compiler::text::name::short_name;
use compiler::text::quantity;
use compiler::text::suggest::hint;
use pipec::costs::cost_source::CostSource;
use pipec::costs::{CostInput, ModelFormat, model_match};
use pipec::error::Error;
use pipec::files::{output, overwrite};
use pipec::model::{self, ImportRequest, LoadedModel};
use pipec::plan::custom_schedule::{self, CustomSchedule};
use pipec::plan::read::read_checked;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::{fs, iter};

/// Arguments of `pipec export`.
#[derive(Debug, Args)]
#[command(after_help = help_text())]
pub struct Arguments {
    /// The plan
    #[arg(value_name = "PLAN")]
    file: PathBuf,
    /// Target tool
    #[arg(long, value_name = "TARGET", value_parser = read_target)]
    to: &'static Entry,
    /// The plan's model or published profile, for targets that need it
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// The plan's costs: a file of `pipec profile`, or analytic[:KIND] [default: as in the plan]
    #[arg(long, value_name = "FILE|analytic[:KIND]", requires = "model")]
    profile: Option<CostInput>,
    /// Schedule of a plan made for a custom schedule: a table FILE.csv, or programs FILE.json
    #[arg(long, value_name = "FILE", value_parser = schedule_flag::file)]
    schedule: Option<PathBuf>,
    /// Output folder, created if missing, or output file if there is only one; - is standard output
    /// [default: PLAN.TARGET in the current folder]
    #[arg(short, long, value_name = "FOLDER|FILE")]
    output: Option<PathBuf>,
}

fn read_target(text: &str) -> Result<&'static Entry, String> {
    let names: Vec<&str> = TARGETS.iter().map(|entry| entry.name).collect();
    target::find(text).ok_or_else(|| format!("write one of {}{}", names.join(", "), hint(text, names.iter().copied())))
}

/// Help text: the targets, one per line, and examples.
fn help_text() -> String {
    let width = TARGETS.iter().map(|entry| entry.name.len()).max().unwrap_or(0);
    let lines = TARGETS.iter().map(|entry| format!("  {:width$}  {}\n", entry.name, entry.about));
    format!(
        "Targets:\n{}\nExamples:\n  pipec export model.plan.json --to torch --model model.pt2 -o bundle\n  pipec export model.plan.json --to dot -o -",
        lines.collect::<String>()
    )
}

/// Exports the plan, writes the files and prints their paths.
pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Error> {
    let plan = read_checked(&arguments.file)?;
    let target = arguments.to;
    let table = custom_schedule::open(arguments.schedule.as_deref(), screen)?.map(compute_table).transpose()?;
    let costs = match target.need {
        Need::Costs => Some(costs(&arguments, &plan, screen)?),
        Need::Plan | Need::Model => None,
    };
    let loaded = match target.need {
        Need::Model => Some(load_model(&arguments, &plan, screen)?),
        // The target does not need the model, but a model of another plan is an error.
        Need::Plan if arguments.model.as_deref().is_some_and(is_model) => Some(load_model(&arguments, &plan, screen)?),
        Need::Plan | Need::Costs => None,
    };
    let imported = loaded.as_ref().map(LoadedModel::imported);
    let input = ExportInput { plan: &plan, costs: costs.as_ref(), model: imported.as_ref(), table: table.as_ref() };
    let bundle = (target.write)(&input).map_err(|refusal| explain_refusal(&arguments, &refusal))?;
    let output = arguments.output.clone().unwrap_or_else(|| default_output(&arguments, &bundle));
    let bundle =
        Bundle { notes: bundle.notes.iter().map(|note| with_output_path(note, &output, &bundle)).collect(), ..bundle };
    bundle.notes.iter().for_each(|note| screen.note(note));
    let freeze = &plan.model.import.freeze;
    if !freeze.is_empty() {
        screen.warn(&format!(
            "the plan freezes `{}`, which its memory depends on: freeze them in the framework, too",
            short_name(&freeze.join(","))
        ));
    }
    write(&arguments, &bundle, output, screen)
}

/// The rows of a custom schedule.
fn compute_table(schedule: CustomSchedule) -> Result<ComputeTable, Error> {
    match schedule {
        CustomSchedule::Table(table) => Ok(table),
        CustomSchedule::Program(program) => {
            csv(&program).parse().map_err(|error| Error::input("cannot use the schedule").because(error))
        }
    }
}

/// The model that the target needs.
fn model_path(arguments: &Arguments) -> Result<&Path, Error> {
    arguments.model.as_deref().ok_or_else(|| {
        Error::input(format!("`--to {}` requires the plan's model", arguments.to.name))
            .with_help("pass it with `--model FILE`")
    })
}

fn costs(arguments: &Arguments, plan: &Plan, screen: &Screen) -> Result<CostGraph, Error> {
    let path = model_path(arguments)?;
    let source = CostSource::of_plan(path, arguments.profile.as_ref(), plan, screen)?;
    Ok(source.costs(plan, plan.schedule.micro_batch)?.graph)
}

fn is_model(path: &Path) -> bool {
    matches!(ModelFormat::of(path), ModelFormat::Onnx | ModelFormat::Pt2)
}

/// The plan's model, imported with the plan's settings.
fn load_model(arguments: &Arguments, plan: &Plan, screen: &Screen) -> Result<LoadedModel, Error> {
    let path = model_path(arguments)?;
    if ModelFormat::of(path) == ModelFormat::Pipedream {
        let message = format!("`--to {}` requires a model, but {} is a profile", arguments.to.name, path.display());
        return Err(Error::input(message));
    }
    if arguments.to.need == Need::Model && ModelFormat::of(path) == ModelFormat::Pt2 {
        let message = format!("`--to {}` requires an ONNX file, but {} is not one", arguments.to.name, path.display());
        return Err(Error::input(message)
            .with_help("export the model with `torch.onnx.export`, plan that file, and export that plan"));
    }
    let loaded = model::read(path, &ImportRequest::of(plan), screen)?;
    model_match::check_loaded(plan, &loaded)?;
    if arguments.to.name == "torch" {
        loaded.runs_in_torch(plan.schedule.micro_batch)?;
    }
    Ok(loaded)
}

fn explain_refusal(arguments: &Arguments, refusal: &Refusal) -> Error {
    let name = arguments.to.name;
    let failure =
        Error::negative(format!("{} cannot be exported to {name}", arguments.file.display())).because(refusal);
    match refusal.remedy(name) {
        Some(remedy) => failure.with_help(remedy),
        None => failure,
    }
}

/// Writes a single file to the given path, or several files into a folder.
fn write(arguments: &Arguments, bundle: &Bundle, output: PathBuf, screen: &Screen) -> Result<(), Error> {
    if let ([file], true) = (bundle.files.as_slice(), output::is_stdout(&output)) {
        match String::from_utf8(file.bytes.clone()) {
            Ok(text) => screen.document(&text),
            Err(_) => {
                return Err(
                    Error::input("`-o -` cannot be combined with this target").because("its output is not text")
                );
            }
        }
        return Ok(());
    }
    let paths: Vec<PathBuf> = match bundle.files.as_slice() {
        [_] if !is_folder(&output) => vec![output],
        files => {
            if output::is_stdout(&output) {
                return Err(
                    Error::input("`-o -` cannot be combined with this target").because("it writes several files")
                );
            }
            fs::create_dir_all(&output).map_err(|error| Error::file("create the folder", &output, error))?;
            files.iter().map(|file| output.join(&file.name)).collect()
        }
    };
    let inputs: Vec<&Path> = iter::once(&arguments.file).chain(&arguments.model).map(PathBuf::as_path).collect();
    for (path, File { bytes, .. }) in paths.iter().zip(&bundle.files) {
        path_conflicts::check_output(&inputs, path)?;
        overwrite::check_bytes(path, bytes)?;
    }
    let mut files = Vec::new();
    for (path, File { bytes, .. }) in paths.iter().zip(&bundle.files) {
        output::write(path, bytes)?;
        let remark = if paths.len() == 1 { ": a single file" } else { "" };
        screen.text(&format!("wrote {} ({}){remark}", path.display(), quantity::bytes(bytes.len() as u64)));
        files.push(json!({"file": path.display().to_string(), "bytes": bytes.len()}));
    }
    screen.json(&json!({"target": arguments.to.name, "files": files, "notes": bundle.notes}));
    Ok(())
}

/// A note with the output path in place of `FOLDER` or `FILE`, as a shell reads it. Standard output has no path.
fn with_output_path(note: &str, output: &Path, bundle: &Bundle) -> String {
    let folder = output.display().to_string();
    let folder = folder.trim_end_matches('/');
    let file = match bundle.files.as_slice() {
        [only] if is_folder(output) => format!("{folder}/{}", only.name),
        _ => folder.to_string(),
    };
    match output.as_os_str() == "-" {
        true => note.to_string(),
        false if note.contains("FOLDER") => note.replace("FOLDER", &in_shell(folder)),
        false => note.replace("FILE", &in_shell(&file)),
    }
}

/// A path as a word of a shell command.
fn in_shell(path: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/+:,@%".contains(&byte);
    match path.bytes().all(|byte| is_plain(byte) || !byte.is_ascii()) {
        true => path.to_string(),
        false => format!("'{}'", path.replace('\'', "'\\''")),
    }
}

fn is_folder(path: &Path) -> bool {
    path.is_dir() || path.as_os_str().to_string_lossy().ends_with('/')
}

/// `model.plan.json` becomes the folder `model.TARGET` or, for a single file, `model.` and the name of that file.
fn default_output(arguments: &Arguments, bundle: &Bundle) -> PathBuf {
    let stem = arguments.file.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let stem = stem.strip_suffix(".plan").unwrap_or(&stem);
    let stem = if stem.is_empty() { "plan" } else { stem };
    match bundle.files.as_slice() {
        [file] => PathBuf::from(format!("{stem}.{}", file.name.trim_start_matches("plan."))),
        _ => PathBuf::from(format!("{stem}.{}", arguments.to.name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_in_notes_are_words_of_a_shell() {
        let bundle = Bundle::of("a.args", String::new());
        let note = |output: &str| with_output_path("run $(cat FILE)", Path::new(output), &bundle);
        assert_eq!(note("plans/FOLDER.args"), "run $(cat plans/FOLDER.args)");
        assert_eq!(note("it's.args"), "run $(cat 'it'\\''s.args')");
        assert_eq!(note("-"), "run $(cat FILE)");
        assert_eq!(with_output_path("cd FOLDER", Path::new("a FILE/"), &bundle), "cd 'a FILE'");
    }
}
