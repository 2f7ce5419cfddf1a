//! Runs the commands of Markdown pages and compares their output.
//!
//! A block ```` ```LANGUAGE file=NAME ```` is written to a file. A ```` ```console ```` block has commands and output.
//! Each page has its own folder and `pipec` on the path. The output after a `$` command is standard output, and
//! standard error if the command fails. `$?` is the previous exit code. `…` matches any lines. For a command ending in
//! `# measured`, numbers compare as `#` and bars are ignored, since they differ by machine and run.
//!
//! `PIPEC_BLESS` rewrites blocks without `…`.

use assert_cmd::cargo::cargo_bin;
use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

fn run(folder: &Path, line: &str, exit_code: i32, variables: &[(&str, String)]) -> (String, i32) {
    let bin = cargo_bin("pipec").parent().unwrap().display().to_string();
    let path = format!("{bin}:{}", env::var("PATH").unwrap_or_default());
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("(exit {exit_code}); {line}")).current_dir(folder);
    shell.env("PATH", path).env("COLUMNS", "120").env("XDG_CACHE_HOME", folder.join(".cache"));
    shell.env_remove("NO_COLOR").env_remove("FORCE_COLOR").env_remove("TERM");
    let output = shell.envs(variables.iter().cloned()).output().unwrap();
    let mut actual = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        actual += &String::from_utf8_lossy(&output.stderr);
    }
    assert!(!actual.contains("panicked at") && !actual.contains("bug in pipec"), "{line}: {actual}");
    // Hide the build folder and free port numbers.
    let mut actual = actual.replace(&folder.display().to_string(), "FOLDER");
    for (name, value) in variables {
        actual = actual.replace(value, &format!("${name}"));
    }
    if line.ends_with(MEASURED) {
        actual = mask(&actual);
    }
    let lines: Vec<&str> = actual.lines().map(str::trim_end).collect();
    (lines.join("\n").trim_matches('\n').to_string(), output.status.code().unwrap_or(-1))
}

const MEASURED: &str = "# measured";

/// Units of masked numbers.
const UNITS: [&str; 15] =
    ["ns", "us", "ms", "s", "min", "B", "kB", "MB", "GB", "kB/s", "MB/s", "GB/s", "TB/s", "Gflop/s", "Tflop/s"];

/// Masks what differs from run to run: numbers with units, bars, column widths.
fn mask(text: &str) -> String {
    let line = |line: &str| {
        let mut masked = String::new();
        if line.starts_with("{\"") {
            return digits(line);
        }
        let indent = line.len() - line.trim_start().len();
        let mut is_after_number = false;
        for word in line.split_whitespace() {
            let bare = word.trim_end_matches([',', ';', ':', ')', '%']);
            if is_after_number && UNITS.contains(&bare) || word.chars().all(|c| matches!(c, '█' | '░')) {
                masked += &word[bare.len().min(word.len())..].replace(['█', '░'], "");
                continue;
            }
            let is_number = bare.trim_start_matches(['(', '-', '+']).starts_with(|c: char| c.is_ascii_digit());
            masked += if masked.is_empty() { "" } else { " " };
            masked += &if is_number { digits(word) } else { word.to_string() };
            is_after_number = is_number;
        }
        format!("{}{masked}", &line[..indent])
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// Replaces every number in the word by one `#`.
fn digits(word: &str) -> String {
    let mut out = String::new();
    let mut in_number = false;
    for c in word.chars() {
        let is_part = c.is_ascii_digit() || in_number && matches!(c, '.' | ',' | 'e' | '-');
        if !is_part {
            out.push(c);
        } else if !in_number {
            out.push('#');
        }
        in_number = is_part;
    }
    // A comma after a number ends it.
    if in_number && word.ends_with(',') { out + "," } else { out }
}

/// True if the output matches `expected`, in which `…` matches any number of lines.
fn matches(actual: &[&str], expected: &[&str]) -> bool {
    match expected.split_first() {
        None => actual.is_empty(),
        Some((&"…", rest)) => (0..=actual.len()).any(|from| matches(&actual[from..], rest)),
        Some((first, rest)) => actual.first() == Some(first) && matches(&actual[1..], rest),
    }
}

/// The page with its blocks rewritten, and the differences from the original.
fn replay(page: &str, folder: &Path, variables: &[(&str, String)]) -> (String, Vec<String>) {
    let (mut rewritten, mut differences) = (String::new(), Vec::new());
    let mut lines = page.lines().peekable();
    let mut code = 0;
    while let Some(line) = lines.next() {
        rewritten += &format!("{line}\n");
        let Some(info) = line.strip_prefix("```").filter(|info| !info.is_empty()) else { continue };
        let block: Vec<&str> = std::iter::from_fn(|| lines.next_if(|line| !line.starts_with("```"))).collect();
        if let Some(name) = info.split_once("file=").and_then(|(_, rest)| rest.split(' ').next()) {
            fs::write(folder.join(name), block.join("\n") + "\n").unwrap();
        }
        if info != "console" {
            rewritten.extend(block.iter().map(|line| format!("{line}\n")));
        } else {
            let block = format!("\n{}", block.join("\n"));
            for part in block.split("\n$ ").filter(|part| !part.trim().is_empty()) {
                let (command, expected) = part.split_once('\n').unwrap_or((part, ""));
                let (actual, new_code) = run(folder, command, code, variables);
                code = new_code;
                let expected = expected.trim_matches('\n');
                let shown = if expected.lines().any(|line| line == "…") { expected } else { &actual };
                rewritten += &format!("$ {command}\n{shown}{}", if shown.is_empty() { "" } else { "\n" });
                if !matches(&actual.lines().collect::<Vec<_>>(), &expected.lines().collect::<Vec<_>>()) {
                    differences.push(format!("$ {command}\n{actual}\nThe page says:\n{expected}\n"));
                }
            }
        }
        rewritten += &format!("{}\n", lines.next().expect("blocks end"));
    }
    (rewritten, differences)
}

/// Runs a page in `folder` and fails on differences, or rewrites the page under `PIPEC_BLESS`. Returns the page.
pub fn play(path: &Path, folder: &Path, variables: &[(&str, String)]) -> String {
    let page = fs::read_to_string(path).unwrap();
    let (blessed, mut differences) = replay(&page, folder, variables);
    if env::var_os("PIPEC_BLESS").is_some() {
        fs::write(path, blessed).unwrap();
        differences.retain(|part| part.lines().any(|line| line == "…"));
    }
    // A part with `…` is not rewritten: only a person knows which lines vary.
    assert!(differences.is_empty(), "{}:\n{}", path.display(), differences.join("\n"));
    page
}

/// The Markdown pages of a repository folder.
pub fn pages(folder: &str) -> Vec<std::path::PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let paths = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let mut pages: Vec<_> = paths.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect();
    pages.sort();
    pages
}

#[test]
fn any_lines_are_any_lines() {
    assert!(matches(&["a", "b", "c"], &["a", "…", "c"]) && matches(&["a", "c"], &["a", "…", "c"]));
    assert!(!matches(&["a", "b"], &["a", "…", "c"]) && !matches(&["a", "b"], &["a"]));
}

#[test]
fn only_what_is_measured_is_masked() {
    for (text, actual) in [
        ("trained 7 steps in 12.3 ms: loss 2.3 to 1,200, ok", "trained # steps in #: loss # to #, ok"),
        ("stage  a.0  ████░  50 %", "stage a.0 # %"),
        ("  \"fwd_us\": 1.5e-7,", "  \"fwd_us\": #,"),
        ("a 1-2-1 b 3 MB/s", "a # b #"),
    ] {
        assert_eq!(mask(text), actual);
    }
}

#[test]
fn a_page_that_lies_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let page = "```console\n$ echo a; exit 3\na\n$ echo $?\n3\n$ echo b\nc\n```\n";
    let (blessed, differences) = replay(page, folder.path(), &[]);
    assert_eq!((blessed, differences.len()), (page.replace("\nc\n", "\nb\n"), 1));
}
