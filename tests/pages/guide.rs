//! The guide's and README's commands print and draw what the pages show, and quoted code matches the sources.

use crate::support::console::{pages, play};
use compiler::tensor::{DType, Tensor};
use runtime::data::weights;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[test]
fn the_guide_is_true() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pages = pages("docs");
    assert!(pages.len() > 4);
    for path in pages {
        let folder = tempfile::tempdir().unwrap();
        write_digits(&folder.path().join("digits.npz"));
        let page = play(&path, folder.path(), &[]);
        check_links(&page, path.parent().unwrap());
        check_quotes(&page, root);
    }
    let folder = tempfile::tempdir().unwrap();
    let page = play(&root.join("README.md"), folder.path(), &[]);
    // The pictures are those that the commands draw.
    for name in ["graph.svg", "gantt.svg"] {
        let (drawn, committed) = (folder.path().join("pictures").join(name), root.join("docs/pictures").join(name));
        if std::env::var_os("PIPEC_BLESS").is_some() {
            fs::copy(&drawn, &committed).unwrap();
        }
        assert_eq!(fs::read_to_string(drawn).unwrap(), fs::read_to_string(committed).unwrap(), "{name}");
    }
    check_links(&page, root);
}

/// The commands of one session, run in order in a clean folder with the data of `digits`.
#[test]
fn the_commands_of_one_session_run_in_order() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/commands.md")).unwrap();
    let block = page.split("## One session").nth(1).and_then(|rest| rest.split("```sh\n").nth(1)).unwrap();
    let block = block.split("```").next().unwrap().replace("\\\n", " ");
    let folder = tempfile::tempdir().unwrap();
    write_digits(&folder.path().join("train.npz"));
    write_digits(&folder.path().join("x.npz"));
    let mut commands = 0;
    for line in block.lines() {
        let words = line.split(" #").next().unwrap().split_whitespace().collect::<Vec<_>>();
        let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("pipec"));
        command.current_dir(folder.path()).args(&words[1..]).env("XDG_CACHE_HOME", folder.path().join(".cache"));
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        commands += 1;
    }
    assert!(commands >= 12, "{commands} lines");
}

/// The file that the guide's Python code writes.
fn write_digits(path: &Path) {
    let (x, y) = models::digits::raw();
    let x: Vec<f32> = x.iter().map(|pixel| f32::from(*pixel) / 16.0).collect();
    let x = Tensor::from_f32(&[y.len(), 1, 8, 8], &x);
    let y = Tensor::new(DType::U8, vec![y.len()], y.to_vec().into()).unwrap();
    let arrays = BTreeMap::from([("x".to_string(), x), ("y".to_string(), y)]);
    weights::write(path, &arrays).unwrap();
}

fn check_links(page: &str, folder: &Path) {
    for target in page.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        let target = target.split('#').next().unwrap_or_default();
        let is_ours = !target.contains("://") && !target.is_empty();
        assert!(!is_ours || folder.join(target).exists(), "{target}");
    }
}

/// The lines of a block ```` ```LANGUAGE from=FILE ```` are in that file; `…` skips lines.
fn check_quotes(page: &str, root: &Path) {
    let blocks = page.split("```").skip(1).step_by(2).filter_map(|block| block.split_once('\n'));
    for (info, text) in blocks {
        let Some((_, name)) = info.split_once("from=") else { continue };
        let file = fs::read_to_string(root.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut remaining = file.as_str();
        for part in text.trim_end().split("\n…\n") {
            let at = remaining.find(part).unwrap_or_else(|| panic!("{name} has no\n{part}"));
            remaining = &remaining[at + part.len()..];
        }
    }
}
