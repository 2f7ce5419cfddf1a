//! Sweeps: a row for every combination, a reason if there is no plan, and figures that match formulas.

use assert_cmd::Command;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Output;

fn pipec(folder: &Path, arguments: &[&str]) -> Output {
    Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap()
}

fn run_sweep(folder: &Path, arguments: &[&str]) -> Value {
    let output = pipec(folder, &[&["sweep", "--format", "json"][..], arguments].concat());
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Eight equal ops of 3 ms, 1 kB activations and 1 MB of parameters each.
fn chain(folder: &Path) {
    let mut text = String::new();
    for at in 0..8 {
        text += &format!(
            "node{at} -- Linear -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=1000.0, parameter_size=1000000\n"
        );
    }
    (1..8).for_each(|at| text += &format!("\tnode{} -- node{at}\n", at - 1));
    fs::write(folder.join("chain.graph.txt"), text).unwrap();
}

#[test]
fn rows_follow_the_formulas() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder);
    let flags =
        ["chain.graph.txt", "--gpus", "2,4", "--bandwidth", "100GB/s", "--depth", "1,2,3", "--microbatches", "4,8"];
    let value = run_sweep(folder, &[&flags[..], &["--svg", "plots"]].concat());
    let rows = value["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 12);
    for row in rows {
        let number = |name: &str| row[name].as_f64().unwrap();
        let (n, d, m) = (number("devices"), number("depth"), number("microbatches"));
        assert_eq!(row["schedule"], "1f1b");
        if d == 3.0 {
            assert!(!row["feasible"].as_bool().unwrap() && row["why"].as_str().unwrap().contains("stages"), "{row}");
            continue;
        }
        let r = n / d;
        assert_eq!(row["replicas"].as_array().unwrap().len() as f64, d);
        // A ring over r replicas of each stage, once per minibatch of m samples, and 1 kB each way over the cut.
        let expected_bytes = 2.0 * (r - 1.0) * 8e6 / m + if d > 1.0 { 2000.0 } else { 0.0 };
        assert!((number("bytes_per_sample") - expected_bytes).abs() < 1e-6, "{row}, not {expected_bytes}");
        let data_parallel = 2.0 * (n - 1.0) * 8e6 / m;
        assert!((number("data_parallel_bytes_per_sample") - data_parallel).abs() < 1e-6, "{row}, not {data_parallel}");
        if r == 1.0 {
            // Straight and balanced: (p - 1) / (m + p - 1), up to microseconds on the link.
            assert!((number("bubble") - (d - 1.0) / (m + d - 1.0)).abs() < 1e-2, "{row}");
        }
    }
    for name in ["throughput", "memory", "communication", "throughput-by-depth", "bubble"] {
        let picture = fs::read_to_string(folder.join(format!("plots/{name}.svg"))).unwrap();
        assert!(picture.starts_with("<?xml") && picture.contains("2 stages") | picture.contains("2 devices"), "{name}");
        assert!(!picture.contains(">3 stages<"), "a curve without points stands in the legend of {name}");
    }
    let bubble = fs::read_to_string(folder.join("plots/bubble.svg")).unwrap();
    assert!(bubble.contains("at least four micro-batches per stage"), "M = 4 K is not marked");
}

#[test]
fn what_does_not_fit_is_a_row() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder);
    let value = run_sweep(folder, &["chain.graph.txt", "--gpus", "1,8", "--memory", "4MB"]);
    let rows = value["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    assert_eq!((rows[0]["feasible"].as_bool(), rows[0]["depth"].as_u64()), (Some(false), None));
    assert!(rows[0]["why"].as_str().unwrap().contains("4.000 MB"), "{}", rows[0]);
    let table = pipec(folder, &["sweep", "chain.graph.txt", "--gpus", "1,8", "--memory", "4MB"]);
    assert_eq!(String::from_utf8_lossy(&table.stdout).lines().count(), 3);
}

#[test]
fn what_cannot_be_asked_is_a_row_among_others() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder);
    let flags = ["chain.graph.txt", "--gpus", "2", "--schedule", "1f1b-rr,1f1b", "--microbatches", "1,4"];
    let value = run_sweep(folder, &flags);
    let rows = value["rows"].as_array().unwrap();
    let settings = |row: &Value| (row["schedule"].as_str().unwrap().to_string(), row["microbatches"].as_u64().unwrap());
    for row in rows {
        let is_refused = settings(row) == ("1f1b-rr".to_string(), 4);
        assert_eq!(row["feasible"].as_bool(), Some(!is_refused), "{row}");
        if is_refused {
            assert!(
                row["why"]
                    .as_str()
                    .unwrap()
                    .contains("`--microbatches 4` cannot be combined with `--schedule 1f1b-rr`")
            );
        }
    }
    assert_eq!(rows.len(), 4);
    // A sweep without valid rows is rejected.
    let output = pipec(folder, &["sweep", "chain.graph.txt", "--gpus", "2,4", "--memory", "much"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot read `--memory`"));
}

#[test]
fn a_curve_is_of_one_schedule_and_one_size() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder);
    let flags = ["chain.graph.txt", "--gpus", "2,4", "--depth", "2", "--bandwidth", "100GB/s", "--svg", "plots"];
    run_sweep(
        folder,
        &[&flags[..], &["--schedule", "gpipe,1f1b", "--microbatches", "4,8", "--micro-batch", "1,2"]].concat(),
    );
    let picture = |name: &str| fs::read_to_string(folder.join(format!("plots/{name}.svg"))).unwrap();
    for schedule in ["gpipe", "1f1b"] {
        for items in [4, 8] {
            for samples in ["1 sample", "2 samples"] {
                let label = format!("2 stages, {schedule}, {items} micro-batches, {samples}");
                for name in ["throughput", "memory", "communication"] {
                    assert!(picture(name).contains(&label), "{name}: no curve `{label}`");
                }
            }
        }
        let label = format!("2 stages, 4 devices, {schedule}, 1 sample");
        assert!(picture("bubble").contains(&label), "no curve `{label}`");
    }
    // Settings common to all rows are not labelled.
    run_sweep(folder, &[&flags[..], &["--schedule", "gpipe", "--microbatches", "4"]].concat());
    assert!(!picture("throughput").contains("2 stages, "));
}

#[test]
fn more_memory_holds_a_larger_model() {
    let folder = tempfile::tempdir().unwrap();
    let largest = |gpus: &str, memory: &str| {
        let value = run_sweep(folder.path(), &["--family", "gpt", "--gpus", gpus, "--memory", memory, "--svg", "."]);
        let results = value["family"]["largest"].as_array().unwrap().clone();
        [true, false].map(|recompute| {
            let entry = results.iter().find(|entry| entry["recompute"] == recompute).unwrap();
            (entry["layers"].as_u64().unwrap(), entry["parameters"].as_u64().unwrap())
        })
    };
    let [recomputed, not_recomputed] = largest("2", "2MB");
    assert!(recomputed >= not_recomputed && not_recomputed.0 >= 2, "{recomputed:?} {not_recomputed:?}");
    // For width w, l layers, vocabulary v and context c: (v + c + 2) w + l (12 w² + 13 w).
    assert_eq!(recomputed.1, (97 + 16 + 2) * 64 + recomputed.0 * (12 * 64 * 64 + 13 * 64));
    assert!(largest("2", "3MB")[1].0 > not_recomputed.0);
    assert!(fs::read_to_string(folder.path().join("largest.svg")).unwrap().contains("with recomputation"));
}

#[test]
fn cuts_are_kept_for_fewer_microbatches() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder);
    let flags = ["chain.graph.txt", "--gpus", "4", "--depth", "2,4", "--microbatches", "2,16,4"];
    let value = run_sweep(folder, &flags);
    let rows = value["rows"].as_array().unwrap();
    // In the requested order, each close to a plan with these stages. The plan's cuts are improved by simulation.
    let settings: Vec<(u64, u64)> =
        rows.iter().map(|row| (row["depth"].as_u64().unwrap(), row["microbatches"].as_u64().unwrap())).collect();
    assert_eq!(settings, [(2, 2), (2, 16), (2, 4), (4, 2), (4, 16), (4, 4)]);
    for row in rows {
        let (depth, m) = (row["depth"].as_u64().unwrap(), row["microbatches"].to_string());
        let stages = vec![(4 / depth).to_string(); depth as usize].join(",");
        let flags = ["partition", "chain.graph.txt", "--gpus", "4", "--schedule", "1f1b", "--microbatches", &m];
        let output = pipec(folder, &[&flags[..], &["--stages", &stages, "-o", "-"]].concat());
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        let [ours, planned] =
            [&row["throughput_per_s"], &plan["predicted"]["throughput_per_s"]].map(|n| n.as_f64().unwrap());
        assert!(ours <= planned * 1.005 && ours >= 0.9 * planned, "{row}");
    }
}

#[test]
fn families_say_what_was_found_so_far() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["sweep", "--family", "gpt", "--gpus", "2", "--memory", "2MB"];
    let output = pipec(folder.path(), &flags);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let lines = stderr.lines().filter(|line| line.contains("layers, ") && line.contains("parameters"));
    assert_eq!(lines.count(), 2, "{stderr}");
    let quiet = pipec(folder.path(), &[&flags[..], &["-q"]].concat());
    assert!(quiet.stderr.is_empty() && quiet.stdout == output.stdout);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder);
    for arguments in [
        &["sweep", "--gpus", "2"][..],
        &["sweep", "chain.graph.txt"],
        &["sweep", "chain.graph.txt", "--gpus", "0"],
        &["sweep", "--family", "nonsense", "--gpus", "2"],
        &["sweep", "--family", "vgg", "--gpus", "2"],
        &["sweep", "nowhere.onnx", "--gpus", "2"],
    ] {
        let output = pipec(folder, arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
