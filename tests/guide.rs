//! The guide's commands print what the guide says.
//!
//! In a page of `docs/`, a block ```` ```LANGUAGE file=NAME ```` is written to a file, and the `$ pipec …` lines of a ```` ```console ```` block are
//! run, page by page in a folder of its own. What follows a command is what it prints on standard output, and on standard error where it
//! fails; `…` stands for any lines at all. With `PIPEC_BLESS` set, blocks without such lines are written anew.

use assert_cmd::Command;
use std::fs;
use std::path::Path;

/// What a command prints.
fn run(folder: &Path, line: &str) -> String {
    let mut words = line.split_whitespace();
    assert_eq!(words.next(), Some("pipec"), "{line}");
    let output =
        Command::cargo_bin("pipec").unwrap().current_dir(folder).env("COLUMNS", "120").args(words).output().unwrap();
    let mut told = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        told += &String::from_utf8_lossy(&output.stderr);
    }
    let lines: Vec<&str> = told.lines().map(str::trim_end).collect();
    lines.join("\n").trim_matches('\n').to_string()
}

/// Whether what is told is what is expected, in which `…` is any number of lines.
fn matches(told: &[&str], expected: &[&str]) -> bool {
    match expected.split_first() {
        None => told.is_empty(),
        Some((&"…", rest)) => (0..=told.len()).any(|from| matches(&told[from..], rest)),
        Some((first, rest)) => told.first() == Some(first) && matches(&told[1..], rest),
    }
}

/// The page with its blocks written anew, and how they differ from what stands there.
fn played(page: &str, folder: &Path) -> (String, Vec<String>) {
    let (mut out, mut wrong) = (String::new(), Vec::new());
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        out += &format!("{line}\n");
        let Some(info) = line.strip_prefix("```").filter(|info| !info.is_empty()) else { continue };
        let block: Vec<&str> = std::iter::from_fn(|| lines.next_if(|line| !line.starts_with("```"))).collect();
        if let Some((_, name)) = info.split_once("file=") {
            fs::write(folder.join(name), block.join("\n") + "\n").unwrap();
        }
        if info != "console" {
            out.extend(block.iter().map(|line| format!("{line}\n")));
        } else {
            for part in block.join("\n").split("$ ").filter(|part| !part.is_empty()) {
                let (command, expected) = part.split_once('\n').unwrap_or((part, ""));
                let told = run(folder, command);
                let expected = expected.trim_matches('\n');
                let kept = if expected.lines().any(|line| line == "…") { expected } else { &told };
                out += &format!("$ {command}\n{kept}{}", if kept.is_empty() { "" } else { "\n" });
                if !matches(&told.lines().collect::<Vec<_>>(), &expected.lines().collect::<Vec<_>>()) {
                    wrong.push(format!("$ {command}\n{told}\nThe page says:\n{expected}\n"));
                }
            }
        }
        out += &format!("{}\n", lines.next().expect("blocks end"));
    }
    (out, wrong)
}

#[test]
fn the_guide_is_true() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let mut pages: Vec<_> = fs::read_dir(&docs).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.sort();
    assert!(pages.len() > 4);
    for path in pages {
        let page = fs::read_to_string(&path).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let (blessed, wrong) = played(&page, folder.path());
        if std::env::var_os("PIPEC_BLESS").is_some() {
            fs::write(&path, blessed).unwrap();
        } else {
            assert!(wrong.is_empty(), "{}:\n{}", path.display(), wrong.join("\n"));
        }
        // Every link to a file of the repository leads somewhere.
        for target in page.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = target.split('#').next().unwrap_or_default();
            let is_ours = !target.contains("://") && !target.is_empty();
            assert!(!is_ours || docs.join(target).exists(), "{}: {target}", path.display());
        }
    }
}

#[test]
fn any_lines_are_any_lines() {
    assert!(matches(&["a", "b", "c"], &["a", "…", "c"]) && matches(&["a", "c"], &["a", "…", "c"]));
    assert!(!matches(&["a", "b"], &["a", "…", "c"]) && !matches(&["a", "b"], &["a"]));
}
