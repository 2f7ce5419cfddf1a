//! Output streams of all subcommands: closed pipes, `-q`, and colour.
#![cfg(unix)]

use compiler::tensor::Tensor;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Calls of every subcommand with results; true if the output is reproducible.
const CALLS: [(&str, bool); 26] = [
    ("--help", true),
    ("--version", true),
    ("zoo", true),
    ("zoo mlp -o z.onnx", true),
    ("inspect m.onnx", true),
    ("inspect m.onnx --text", true),
    ("profile m.onnx --device analytic:t4 -o p.json", true),
    ("partition m.onnx --gpus 3 --compare -o q.json", true),
    ("partition m.onnx --gpus 3 -o -", true),
    ("plan show plan.json", true),
    ("plan check plan.json --model m.onnx", true),
    ("plan diff plan.json plan.json", true),
    ("simulate plan.json --chart", true),
    ("simulate plan.json --format json", true),
    ("report plan.json --html r.html", true),
    ("sweep m.onnx --gpus 1,2,4", true),
    ("export plan.json --to dot -o -", true),
    ("train m.onnx --plan plan.json --data d.npz --batch 4", false),
    ("eval m.onnx --inputs d.npz -o y.npz", true),
    ("quickstart --model mlp --epochs 1 --dir tour", false),
    ("cluster detect --cpu", true),
    ("cluster bench", false),
    ("cluster show --gpus 4", true),
    ("doctor", false),
    ("schema plan", true),
    ("completions zsh", true),
];

fn command(folder: &Path, line: &str) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin("pipec"));
    command.current_dir(folder).args(line.split_whitespace());
    command.env_remove("NO_COLOR").env_remove("FORCE_COLOR").env("XDG_CACHE_HOME", folder.join(".cache"));
    command
}

fn run(folder: &Path, line: &str) -> Output {
    command(folder, line).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn prepare_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for line in
        ["zoo mlp --inputs 6 --classes 3 --hidden 8 -o m.onnx", "partition m.onnx --gpus 3 --stages 2,1 -o plan.json"]
    {
        assert!(run(root, line).status.success(), "{line}");
    }
    let arrays = [("x", Tensor::from_f32(&[8, 6], &[0.5; 48])), ("y", Tensor::from_i64(&[8], &[1; 8]))];
    let arrays = arrays.map(|(name, tensor)| (name.to_string(), tensor));
    runtime::data::weights::write(&root.join("d.npz"), &arrays.into()).unwrap();
    folder
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let folder = prepare_folder();
    for (line, _) in CALLS {
        let mut child = command(folder.path(), line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{line}: {message}");
        assert!(!message.contains("panicked") && !message.contains("error"), "{line}: {message}");
    }
}

#[test]
fn a_full_disk_is_reported() {
    let folder = prepare_folder();
    if !Path::new("/dev/full").exists() {
        return println!("skipped: no /dev/full");
    }
    for line in ["zoo", "plan show plan.json", "schema plan", "simulate plan.json --format json"] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = command(folder.path(), line).stdout(full).output().unwrap();
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {message}");
        assert!(message.contains("cannot write the result to standard output"), "{line}: {message}");
    }
}

#[test]
fn quiet_keeps_all_results() {
    let folder = prepare_folder();
    for (line, is_same) in CALLS {
        let (loud, quiet) = (run(folder.path(), line), run(folder.path(), &format!("{line} -qq")));
        assert_eq!(loud.status.code(), quiet.status.code(), "{line}");
        assert!(!quiet.stdout.is_empty(), "{line} prints nothing");
        assert!(quiet.stderr.is_empty(), "{line}: {}", text(&quiet.stderr));
        if is_same {
            // The second call finds the file of the first.
            let loud = ["q.json", "z.onnx"].iter().fold(text(&loud.stdout), |output, file| {
                output.replace(&format!("wrote {file}"), &format!("replaced {file}"))
            });
            // Suggestions of a next step are not results.
            let loud = loud.split_once("\nnext: ").map_or(loud.clone(), |(results, _)| format!("{results}\n"));
            assert_eq!(loud, text(&quiet.stdout), "{line}");
        }
    }
    // `-q` keeps warnings, `-qq` drops them; errors stay.
    fs::write(
        folder.path().join("c.toml"),
        "schema = \"pipec.cluster/1\"\n[device]\nkind = \"t4\"\n[[level]]\ncount = 2\nbandwidth = \"1GB/s\"\n",
    )
    .unwrap();
    let command_line = "partition m.onnx --cluster c.toml --profile analytic:h100 -o o.json";
    let message = |flags: &str| text(&run(folder.path(), &format!("{command_line} {flags}")).stderr);
    assert!(message("").contains("warning:") && message("").contains("not measured"));
    assert!(message("-q").contains("warning:") && !message("-q").contains("not measured"));
    assert_eq!(message("-qq"), "");
    assert!(text(&run(folder.path(), "inspect no.onnx -qq").stderr).starts_with("error: "));
}

/// Strips colour codes.
fn strip_colours(text: &str) -> String {
    let mut parts = text.split('\u{1b}');
    let first = parts.next().unwrap_or_default().to_string();
    first + &parts.map(|part| part.split_once('m').expect("a code that colours").1).collect::<String>()
}

#[test]
fn colour_is_as_it_is_said() {
    let folder = prepare_folder();
    let root = folder.path();
    for line in ["--help", "plan show plan.json", "inspect no.onnx", "partiton x", "simulate plan.json --chart"] {
        let uncoloured = run(root, line);
        let coloured = run(root, &format!("{line} --color always"));
        for (uncoloured, coloured) in [(&uncoloured.stdout, &coloured.stdout), (&uncoloured.stderr, &coloured.stderr)] {
            let (uncoloured, coloured) = (text(uncoloured), text(coloured));
            assert!(!uncoloured.contains('\u{1b}'), "{line}: {uncoloured}");
            assert_eq!(strip_colours(&coloured), uncoloured, "{line}");
        }
        let is_coloured = |output: &Output| [&output.stdout, &output.stderr].iter().any(|bytes| bytes.contains(&0x1b));
        assert_eq!(is_coloured(&coloured), !line.starts_with("simulate"), "{line}");
        let is_coloured_with = |line: &str, variables: &[(&str, &str)]| {
            is_coloured(&command(root, line).envs(variables.iter().copied()).output().unwrap())
        };
        if is_coloured(&coloured) {
            assert!(is_coloured_with(line, &[("FORCE_COLOR", "1")]), "{line}");
            assert!(!is_coloured_with(line, &[("FORCE_COLOR", "1"), ("NO_COLOR", "1")]), "{line}");
            assert!(is_coloured_with(&format!("{line} --color=always"), &[("NO_COLOR", "1")]), "{line}");
            assert!(!is_coloured_with(&format!("{line} --color never"), &[("FORCE_COLOR", "1")]), "{line}");
            assert!(!is_coloured_with(line, &[("FORCE_COLOR", "")]), "{line}");
        }
    }
    // File names cannot colour the output.
    fs::write(root.join("n\u{1b}[31m.json"), "{}").unwrap();
    let message = text(&command(root, "plan show --color always").arg("n\u{1b}[31m.json").output().unwrap().stderr);
    assert!(!message.contains("\u{1b}[31m"), "{message:?}");
}

#[test]
fn json_stays_json() {
    let folder = prepare_folder();
    let output = run(folder.path(), "plan show plan.json --format json --color always");
    serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap();
}
