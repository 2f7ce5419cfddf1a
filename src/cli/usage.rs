//! Usage errors: the message of clap, with tips about other commands and flags.

use clap::Command;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use compiler::text::suggest::nearest;
use pipec::error::Error;

/// The command that plans, and the command that trains under a plan.
const PLANS: &str = "partition";
const TRAINS: &str = "train";

/// All values of a flag in arguments that may not parse.
pub fn said(flag: &str, arguments: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut said = Vec::new();
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        said.extend(match argument.strip_prefix(flag) {
            Some("") => arguments.next(),
            Some(rest) => rest.strip_prefix('=').map(str::to_string),
            None if argument == "--" => break,
            None => None,
        });
    }
    said
}

/// True if arguments that may not parse contain `--format json`; the usage error is then printed as JSON.
pub fn wants_json(arguments: impl IntoIterator<Item = String>) -> bool {
    said("--format", arguments).last().is_some_and(|form| form == "json")
}

/// Adds a tip: the likely meaning of an unknown command, or the commands that have an unknown flag.
pub fn advised(mut error: clap::Error, command: &Command, arguments: &[String]) -> clap::Error {
    let mut verb = command;
    for word in arguments.iter().filter(|word| *word != "help") {
        verb = verb.find_subcommand(word).unwrap_or(verb);
    }
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    match (error.kind(), text(ContextKind::InvalidSubcommand), text(ContextKind::InvalidArg)) {
        (ErrorKind::InvalidSubcommand, Some(said), _) => {
            let names = || verb.get_subcommands().map(Command::get_name).filter(|name| *name != "help");
            match nearest(&said, names()) {
                Some(near) => {
                    error.insert(ContextKind::SuggestedSubcommand, ContextValue::String(near.to_string()));
                }
                None if verb.get_name() == command.get_name() => tip(&mut error, "`pipec --help` lists the commands"),
                None => {
                    let (name, all) = (verb.get_name(), names().collect::<Vec<_>>().join("`, `"));
                    tip(&mut error, &format!("`pipec {name}` has the subcommands `{all}`"));
                }
            }
        }
        (ErrorKind::UnknownArgument, _, Some(said)) => {
            let first = positional(verb, &said).map(|name| {
                format!("pass it as the first argument, without a flag: `pipec {} {name}`", verb.get_name())
            });
            let similar = || {
                meant(verb, &said).map(|flag| format!("this command has no flag `{said}`; did you mean `--{flag}`?"))
            };
            let other = || said.strip_prefix("--").and_then(|flag| elsewhere(command, verb, flag));
            if let Some(text) = first.or_else(similar).or_else(other) {
                // The similar flag that clap suggests would be misleading.
                error = clap::Error::new(ErrorKind::UnknownArgument).with_cmd(command);
                error.insert(ContextKind::InvalidArg, ContextValue::String(said));
                tip(&mut error, &text);
            }
        }
        _ => {}
    }
    error
}

/// Flags of other tools and commands, with the flags of pipec that may be meant, most likely first.
const ELSEWHERE: [(&str, &[&str]); 30] = [
    ("--json", &["format"]),
    ("-n", &["gpus", "steps", "minibatches"]),
    ("-g", &["gpus"]),
    ("-b", &["batch", "micro-batch"]),
    ("-e", &["epochs"]),
    ("-l", &["lr", "levels"]),
    ("-p", &["plan", "profile"]),
    ("-m", &["memory", "microbatches"]),
    ("-s", &["stages", "schedule"]),
    ("--tp", &["tensor"]),
    ("--tp-size", &["tensor"]),
    ("--tensor-parallel-size", &["tensor"]),
    ("--tensor-model-parallel-size", &["tensor"]),
    ("--pp", &["max-stages", "stages"]),
    ("--pp-size", &["max-stages", "stages"]),
    ("--pipeline-parallel-size", &["max-stages", "stages"]),
    ("--pipeline-model-parallel-size", &["max-stages", "stages"]),
    ("--num-stages", &["max-stages", "stages"]),
    ("--num-gpus", &["gpus", "workers"]),
    ("--ngpus", &["gpus", "workers"]),
    ("--world-size", &["gpus", "workers"]),
    ("--nproc-per-node", &["gpus", "workers"]),
    ("--nodes", &["levels", "hosts"]),
    ("--nnodes", &["levels", "hosts"]),
    ("--batch-size", &["batch", "micro-batch"]),
    ("--micro-batch-size", &["micro-batch", "batch"]),
    ("--gradient-accumulation-steps", &["microbatches"]),
    ("--learning-rate", &["lr"]),
    ("--num-epochs", &["epochs"]),
    ("--data", &["inputs"]),
];

/// The first positional argument of a command, if the unknown flag names it: a plan or a model.
fn positional(verb: &Command, said: &str) -> Option<&'static str> {
    let first = verb.get_positionals().next()?.get_value_names()?.first()?.as_str();
    match said {
        "--plan" if first == "PLAN" => Some("PLAN"),
        "--model" if matches!(first, "MODEL" | "FILE") => Some("MODEL"),
        _ => None,
    }
}

/// The flag of a command that corresponds to a flag of another tool.
fn meant(verb: &Command, said: &str) -> Option<&'static str> {
    let (_, flags) = ELSEWHERE.into_iter().find(|(other, _)| *other == said)?;
    flags.iter().copied().find(|flag| verb.get_arguments().any(|own| own.get_long() == Some(*flag)))
}

/// Adds a tip to a usage error.
fn tip(error: &mut clap::Error, text: &str) {
    let mut tip = StyledStr::new();
    tip.push_str(text);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
}

/// A sentence that names the other commands with this flag.
fn elsewhere(command: &Command, verb: &Command, flag: &str) -> Option<String> {
    let has = |of: &&Command| of.get_arguments().any(|own| own.get_long() == Some(flag));
    let all = command.get_subcommands().filter(|of| of.get_name() != verb.get_name());
    let verbs: Vec<&str> = all.filter(has).map(Command::get_name).collect();
    // Flags that only change the output do not affect the plan.
    let is_asked = |own: &&clap::Arg| own.get_long() == Some(flag) && own.get_help_heading() != Some("Results");
    let asks = command.find_subcommand(PLANS).is_some_and(|plans| plans.get_arguments().any(|own| is_asked(&own)));
    if verb.get_name() == TRAINS && verbs.contains(&PLANS) && asks {
        return Some(format!(
            "`--{flag}` is a flag of `pipec {PLANS}`; use it there, then run `pipec {TRAINS} MODEL --plan FILE`"
        ));
    }
    let named: Vec<String> = verbs.iter().map(|verb| format!("`pipec {verb}`")).collect();
    let (last, before) = named.split_last()?;
    let before = if before.is_empty() { String::new() } else { format!("{} and ", before.join(", ")) };
    Some(format!("`--{flag}` is a flag of {before}{last}"))
}

/// A usage error as an error of the library.
pub fn failure(error: &clap::Error) -> Error {
    const TIP: &str = "tip: ";
    let text = error.render().to_string();
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let what = lines.next().unwrap_or_default();
    let (last, why): (Vec<&str>, Vec<&str>) = lines.partition(|line| line.starts_with(TIP) || line.contains("--help"));
    let tips: Vec<&str> = last.iter().filter_map(|line| line.strip_prefix(TIP)).collect();
    let failure = Error::input(what.strip_prefix("error: ").unwrap_or(what));
    let failure = why.into_iter().fold(failure, Error::because);
    failure.with_help(if tips.is_empty() { last.join("; ") } else { tips.join("; ") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::Cli;
    use clap::CommandFactory;

    fn text(line: &str) -> String {
        let words: Vec<String> = line.split(' ').map(str::to_string).collect();
        let mut command = Cli::command();
        let error = command.try_get_matches_from_mut(&words).unwrap_err();
        advised(error, &command, &words[1..]).render().to_string()
    }

    #[test]
    fn an_unknown_command_suggests_the_nearest() {
        assert!(text("pipec partiton m.onnx").contains("tip: a similar subcommand exists: 'partition'"));
        assert!(text("pipec plan chekc p.json").contains("'check'"));
    }

    #[test]
    fn a_flag_of_another_command_gets_a_tip() {
        let plans = "tip: `--zero` is a flag of `pipec partition`; use it there";
        assert!(text("pipec train m.onnx --zero 2").contains(plans));
        assert!(text("pipec train m.onnx --zero=2").contains(plans));
        // clap would suggest `--verbose`.
        assert!(!text("pipec train m.onnx --zero 2").contains("a similar"));
        assert!(text("pipec report p.json --lr 2").contains("tip: `--lr` is a flag of `pipec train`"));
        assert!(!text("pipec train m.onnx --flux 2").contains("is a flag of"));
    }

    #[test]
    fn flags_of_other_tools_are_known() {
        for (line, tip) in [
            ("pipec partition m.onnx --tp 2", "did you mean `--tensor`?"),
            ("pipec partition m.onnx --nodes 2", "did you mean `--levels`?"),
            ("pipec train m.onnx --num-gpus 2", "did you mean `--workers`?"),
            ("pipec train m.onnx --pipeline-parallel-size 2", "did you mean `--stages`?"),
            ("pipec eval m.onnx --data x.npz", "did you mean `--inputs`?"),
            ("pipec simulate --plan p.json", "without a flag: `pipec simulate PLAN`"),
            ("pipec report p.json --plan p.json", "without a flag: `pipec report PLAN`"),
            ("pipec partition --model m.onnx", "without a flag: `pipec partition MODEL`"),
        ] {
            let text = text(line);
            assert!(text.contains(tip) && !text.contains("similar") && !text.contains("as a value"), "{text}");
        }
    }

    #[test]
    fn the_format_is_known_without_a_command() {
        let wants = |line: &str| wants_json(line.split(' ').map(str::to_string));
        assert!(wants("pipec trian --format json") && wants("pipec --format=json x"));
        assert!(
            !wants("pipec x --format json --format text") && !wants("pipec x -- --format json") && !wants("pipec x")
        );
    }

    #[test]
    fn a_usage_error_has_all_parts() {
        let error =
            Cli::command().try_get_matches_from(["pipec", "train", "m.onnx", "--loss", "crossentropy"]).unwrap_err();
        let failure = failure(&error).to_string();
        assert!(
            failure.starts_with("error: invalid value 'crossentropy' for '--loss <NAME>'\n  [possible values: "),
            "{failure}"
        );
        assert!(failure.contains("\nhelp: a similar value exists: 'cross-entropy'"), "{failure}");
    }
}
