//! Importing `.pt2`: `torch.export` programs become graphs that compute the same as PyTorch.

use crate::support::shared::{arrays, cross_entropy, data, first_step, results};
use compiler::import::import::{Batch, Model, Options, Weight, load};
use compiler::op::Op;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn names(model: &Model, name_of: fn(&Op) -> Option<&String>) -> Vec<String> {
    let mut names: Vec<String> =
        model.graph.ids().filter_map(|id| name_of(&model.graph.node(id).op).cloned()).collect();
    names.sort();
    names
}

fn parameters(model: &Model) -> Vec<String> {
    names(model, |op| match op {
        Op::Parameter(p) => Some(&p.name),
        _ => None,
    })
}

#[test]
fn parity_models_give_the_loss_of_pytorch() {
    for name in ["mlp", "cnn_bn", "gpt"] {
        for file in ["model.pt2", "model_dynbatch.pt2", "model_loss.pt2"] {
            let Some(folder) = data("parity").map(|d| d.join(name)) else { return };
            let model = load(&folder.join(file), &Options::default()).unwrap();
            let x = first_step(&arrays(&folder.join("inputs.npz"))["x"]);
            let target = first_step(&arrays(&folder.join("targets.npz"))["target"]);
            let size = x.shape()[0] as i64;
            let inputs = model.graph.ids().filter_map(|id| match &model.graph.node(id).op {
                Op::Input(input) => Some(input.name.clone()),
                _ => None,
            });
            let mut feeds = BTreeMap::new();
            // Data first, then the target.
            for (input, value) in inputs.zip([&x, &target]) {
                feeds.insert(input, value.clone());
            }
            let results = results(&model, size, &feeds);
            let loss = match results[0].shape() {
                [] => results[0].to_f64()[0],
                _ => cross_entropy(&results[0], &target),
            };
            let want = arrays(&folder.join("expected.npz"))["loss_sgd"].to_f64()[0];
            println!("{name}/{file}: {} nodes, loss {loss}, PyTorch {want}, {:?}", model.graph.len(), model.batch);
            assert!((loss - want).abs() < 1e-5, "{name}/{file}: {loss}, PyTorch has {want}");
            let default = (!file.contains("dynbatch")).then_some(size);
            assert_eq!(model.batch, Batch::Symbol { name: "batch".into(), default }, "{name}/{file}");
            assert_eq!(model.graph.averages.len(), if name == "cnn_bn" { 6 } else { 0 });
            let ties = if name == "gpt" { 1 } else { 0 };
            assert_eq!(model.warnings.len(), ties, "{:?}", model.warnings);
            assert!(model.warnings.iter().all(|w| w.contains("tied")));
        }
    }
}

#[test]
fn names_are_those_of_the_module() {
    for name in ["mlp", "cnn_bn", "gpt"] {
        let Some(folder) = data("parity").map(|d| d.join(name)) else { return };
        let initial = arrays(&folder.join("params0.npz"));
        let model = load(&folder.join("model.pt2"), &Options::default()).unwrap();
        let states = names(&model, |op| match op {
            Op::State(s) => Some(&s.name),
            _ => None,
        });
        let trainable: Vec<&String> = initial
            .keys()
            .filter(|n| !n.contains("running_") && !n.contains("num_batches") && !n.ends_with("pos"))
            // The head is tied to the embedding, which comes first.
            .filter(|n| name != "gpt" || *n != "3.w.weight")
            .collect();
        assert_eq!(parameters(&model).iter().collect::<Vec<_>>(), trainable, "{name}");
        assert_eq!(states, initial.keys().filter(|n| n.contains("running_")).cloned().collect::<Vec<_>>());
        for parameter in trainable {
            let Weight::Given(value) = &model.weights[parameter] else { panic!("{parameter} is missing") };
            assert_eq!(value, &initial[parameter], "{parameter}");
        }
    }
}

#[test]
fn nodes_say_which_module_they_come_from() {
    let Some(folder) = data("parity/gpt") else { return };
    let model = load(&folder.join("model.pt2"), &Options::default()).unwrap();
    let origins: Vec<_> = model.graph.ids().map(|id| model.graph.node(id).origin.clone()).collect();
    assert!(origins.iter().any(|o| o.source == "linear" && o.module == "1.a.qkv"), "{origins:?}");
}

/// Hostile files that must still import; the others must be rejected with the manifest's words.
#[test]
fn hostile_archives_are_refused_in_words() {
    // Names that lead out of a folder must have no effect.
    let Some(folder) = data("hostile") else { return };
    let manifest = std::fs::read_to_string(folder.join("MANIFEST.tsv")).unwrap();
    for row in manifest.lines().skip(1).filter(|row| row.starts_with("pt2/")) {
        let columns: Vec<&str> = row.split('\t').collect();
        let (file, exits, words) = (columns[0], columns[2], columns[5]);
        let start = std::time::Instant::now();
        let result = load(&folder.join(file), &Options::default());
        let seconds = start.elapsed().as_secs_f64();
        assert!(seconds < 60.0, "{file} took {seconds} s");
        match result {
            Ok(model) => {
                println!("{file}: {} nodes, {:?}, {:?}", model.graph.len(), model.batch, model.warnings);
                assert!(exits.split('|').any(|e| e == "0"), "{file} was imported");
            }
            Err(error) => {
                let message = error.to_string();
                println!("{file}: {message}");
                assert!(exits.split('|').any(|e| e == "2"), "{file} was refused: {message}");
                let lower = message.to_lowercase();
                let is_expected = words.split('|').any(|word| word == "-" || lower.contains(&word.to_lowercase()));
                assert!(is_expected, "{file}: {message}, expected one of {words}");
            }
        }
    }
    assert!(!Path::new("/tmp/pipec_zip_slip_abs").exists() && !Path::new("/tmp/pipec_zip_slip").exists());
}

/// Real networks. For those with unsupported operators, all of them are named at once.
#[test]
fn networks_import_or_say_what_they_need() {
    let Some(folder) = data("models") else { return };
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    for file in files.iter().filter(|f| f.extension().is_some_and(|e| e == "pt2")) {
        let name = file.file_name().unwrap().to_string_lossy();
        match load(file, &Options::default()) {
            Ok(model) => {
                let elements = |id| match &model.graph.node(id).op {
                    Op::Parameter(p) => p.fact.concrete().unwrap().iter().product::<usize>(),
                    _ => 0,
                };
                let count: usize = model.graph.ids().map(elements).sum();
                println!("{name}: {} nodes, {count} parameters, {:?}", model.graph.len(), model.batch);
                assert!(model.warnings.iter().any(|w| w.contains("has no values")), "{:?}", model.warnings);
                let expected_counts = [("resnet50", 25_557_032), ("densenet121", 7_978_856)];
                for (prefix, want) in expected_counts.into_iter().filter(|(prefix, _)| name.starts_with(prefix)) {
                    assert_eq!(count, want, "{prefix}");
                }
            }
            Err(error) => {
                println!("{name}: {error}");
                assert!(error.to_string().starts_with("unsupported operators: "), "{name}: {error}");
            }
        }
    }
}
