//! Text and JSON output of every subcommand: pages in `tests/golden/`, rewritten by `PIPEC_BLESS=1`.

use crate::support::console::{pages, play};
use compiler::tensor::Tensor;
use std::collections::BTreeSet;
use std::path::Path;

/// Files that no shell can write: rows of six numbers with labels.
fn write_arrays(folder: &Path) {
    let values: Vec<f32> = (0..48).map(|at| (at % 7) as f32 / 7.0).collect();
    let labels: Vec<i64> = (0..8).map(|at| at % 3).collect();
    let arrays = [("x", Tensor::from_f32(&[8, 6], &values)), ("y", Tensor::from_i64(&[8], &labels))];
    let arrays = arrays.map(|(name, tensor)| (name.to_string(), tensor));
    runtime::data::weights::write(&folder.join("rows.npz"), &arrays.into()).unwrap();
}

#[test]
fn every_verb_prints_what_it_printed() {
    let mut called = BTreeSet::new();
    for path in pages("tests/golden") {
        let folder = tempfile::tempdir().unwrap();
        write_arrays(folder.path());
        let page = play(&path, folder.path(), &[]);
        for line in page.lines().filter_map(|line| line.strip_prefix("$ pipec ")) {
            let verb = line.split_whitespace().next().unwrap().to_string();
            called.insert((verb, line.contains("--format json")));
        }
    }
    let with_json = [
        "inspect",
        "profile",
        "partition",
        "plan",
        "simulate",
        "report",
        "sweep",
        "export",
        "train",
        "eval",
        "quickstart",
        "cluster",
        "doctor",
        "zoo",
    ];
    for verb in with_json {
        for json in [false, true] {
            assert!(called.contains(&(verb.to_string(), json)), "{verb}, JSON {json}, is on no page");
        }
    }
    for verb in ["schema", "completions", "--version"] {
        assert!(called.contains(&(verb.to_string(), false)), "{verb} is on no page");
    }
}
