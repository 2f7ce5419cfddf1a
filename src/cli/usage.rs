//! Usage errors: the message of clap, with tips about other commands and flags.

use clap::Command;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use compiler::text::suggest::nearest;
use pipec::error::Error;

/// The command that plans, and the command that trains under a plan.
const PLAN_COMMAND: &str = "partition";
const TRAIN_COMMAND: &str = "train";

/// All values of a flag in arguments that may not parse.
pub fn flag_values(flag: &str, arguments: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut values = Vec::new();
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        values.extend(match argument.strip_prefix(flag) {
            Some("") => arguments.next(),
            Some(suffix) => suffix.strip_prefix('=').map(str::to_string),
            None if argument == "--" => break,
            None => None,
        });
    }
    values
}

/// True if arguments that may not parse contain `--format json`; the usage error is then printed as JSON.
pub fn wants_json(arguments: impl IntoIterator<Item = String>) -> bool {
    flag_values("--format", arguments).last().is_some_and(|form| form == "json")
}

/// Adds a tip: the likely meaning of an unknown command, or the commands that have an unknown flag.
pub fn with_tip(mut error: clap::Error, command: &Command, arguments: &[String]) -> clap::Error {
    let mut verb = command;
    for word in arguments.iter().filter(|word| *word != "help") {
        verb = verb.find_subcommand(word).unwrap_or(verb);
    }
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    match (error.kind(), text(ContextKind::InvalidSubcommand), text(ContextKind::InvalidArg)) {
        (ErrorKind::InvalidSubcommand, Some(argument), _) => {
            let names = || verb.get_subcommands().map(Command::get_name).filter(|name| *name != "help");
            match nearest(&argument, names()) {
                Some(nearest_name) => {
                    error.insert(ContextKind::SuggestedSubcommand, ContextValue::String(nearest_name.to_string()));
                }
                None if verb.get_name() == command.get_name() => {
                    add_tip(&mut error, "`pipec --help` lists the commands")
                }
                None => {
                    let (name, subcommands) = (verb.get_name(), names().collect::<Vec<_>>().join("`, `"));
                    add_tip(&mut error, &format!("`pipec {name}` has the subcommands `{subcommands}`"));
                }
            }
        }
        (ErrorKind::UnknownArgument, _, Some(argument)) => {
            let as_positional = positional_name(verb, &argument).map(|name| {
                format!("pass it as the first argument, without a flag: `pipec {} {name}`", verb.get_name())
            });
            let as_equivalent = || {
                equivalent_flag(verb, &argument)
                    .map(|flag| format!("this command has no flag `{argument}`; did you mean `--{flag}`?"))
            };
            let elsewhere = || argument.strip_prefix("--").and_then(|flag| other_commands(command, verb, flag));
            if let Some(text) = as_positional.or_else(as_equivalent).or_else(elsewhere) {
                // The similar flag that clap suggests would be misleading.
                error = clap::Error::new(ErrorKind::UnknownArgument).with_cmd(command);
                error.insert(ContextKind::InvalidArg, ContextValue::String(argument));
                add_tip(&mut error, &text);
            }
        }
        _ => {}
    }
    error
}

/// Flags of other tools and commands, with the flags of pipec that may be meant, most likely first.
const FOREIGN_FLAGS: [(&str, &[&str]); 30] = [
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
fn positional_name(verb: &Command, argument: &str) -> Option<&'static str> {
    let value_name = verb.get_positionals().next()?.get_value_names()?.first()?.as_str();
    match argument {
        "--plan" if value_name == "PLAN" => Some("PLAN"),
        "--model" if matches!(value_name, "MODEL" | "FILE") => Some("MODEL"),
        _ => None,
    }
}

/// The flag of a command that corresponds to a flag of another tool.
fn equivalent_flag(verb: &Command, argument: &str) -> Option<&'static str> {
    let (_, flags) = FOREIGN_FLAGS.into_iter().find(|(foreign, _)| *foreign == argument)?;
    flags.iter().copied().find(|flag| verb.get_arguments().any(|candidate| candidate.get_long() == Some(*flag)))
}

fn add_tip(error: &mut clap::Error, text: &str) {
    let mut tip = StyledStr::new();
    tip.push_str(text);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
}

/// A sentence that names the other commands with this flag.
fn other_commands(command: &Command, verb: &Command, flag: &str) -> Option<String> {
    let has =
        |other_command: &&Command| other_command.get_arguments().any(|argument| argument.get_long() == Some(flag));
    let others = command.get_subcommands().filter(|other_command| other_command.get_name() != verb.get_name());
    let verbs: Vec<&str> = others.filter(has).map(Command::get_name).collect();
    // Flags that only change the output do not affect the plan.
    let is_planning_flag =
        |argument: &&clap::Arg| argument.get_long() == Some(flag) && argument.get_help_heading() != Some("Results");
    let is_flag_of_planning = command
        .find_subcommand(PLAN_COMMAND)
        .is_some_and(|plans| plans.get_arguments().any(|argument| is_planning_flag(&argument)));
    if verb.get_name() == TRAIN_COMMAND && verbs.contains(&PLAN_COMMAND) && is_flag_of_planning {
        return Some(format!(
            "`--{flag}` is a flag of `pipec {PLAN_COMMAND}`; use it there, then run `pipec {TRAIN_COMMAND} MODEL --plan FILE`"
        ));
    }
    let quoted: Vec<String> = verbs.iter().map(|verb| format!("`pipec {verb}`")).collect();
    let (last, before) = quoted.split_last()?;
    let before = if before.is_empty() { String::new() } else { format!("{} and ", before.join(", ")) };
    Some(format!("`--{flag}` is a flag of {before}{last}"))
}

/// A usage error as an error of the library.
pub fn to_error(error: &clap::Error) -> Error {
    const TIP: &str = "tip: ";
    let text = error.render().to_string();
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let message = lines.next().unwrap_or_default();
    let (help_lines, causes): (Vec<&str>, Vec<&str>) =
        lines.partition(|line| line.starts_with(TIP) || line.contains("--help"));
    let tips: Vec<&str> = help_lines.iter().filter_map(|line| line.strip_prefix(TIP)).collect();
    let failure = Error::input(message.strip_prefix("error: ").unwrap_or(message));
    let failure = causes.into_iter().fold(failure, Error::because);
    failure.with_help(if tips.is_empty() { help_lines.join("; ") } else { tips.join("; ") })
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
        with_tip(error, &command, &words[1..]).render().to_string()
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
        let error_text = to_error(&error).to_string();
        assert!(
            error_text.starts_with("error: invalid value 'crossentropy' for '--loss <NAME>'\n  [possible values: "),
            "{error_text}"
        );
        assert!(error_text.contains("\nhelp: a similar value exists: 'cross-entropy'"), "{error_text}");
    }
}
