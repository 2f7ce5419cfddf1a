//! The HTML report of a plan: complete, reproducible, and safe for any model names.

use assert_cmd::Command;
use compiler::export::colour::COLOURS;
use serde_json::Value;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

fn pipec(folder: &Path, arguments: &[&str]) -> Output {
    Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap()
}

fn run(folder: &Path, arguments: &[&str]) {
    let output = pipec(folder, arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A published profile: a chain of ops with these names and milliseconds, 1 kB activations and 1 MB of parameters each.
fn chain(folder: &Path, ops: &[(&str, f64)]) {
    let mut text = String::new();
    for (at, (name, time)) in ops.iter().enumerate() {
        let (forward, backward) = (time / 3.0, time * 2.0 / 3.0);
        text += &format!(
            "node{at} -- {name} -- forward_compute_time={forward}, backward_compute_time={backward}, activation_size=1000.0, \
             parameter_size=1000000\n"
        );
    }
    for at in 1..ops.len() {
        text += &format!("\tnode{} -- node{at}\n", at - 1);
    }
    fs::write(folder.join("chain.graph.txt"), text).unwrap();
}

fn write_plan(folder: &Path, flags: &[&str]) {
    let base_flags = ["partition", "chain.graph.txt", "--bandwidth", "100GB/s", "-o", "plan.json"];
    run(folder, &[&base_flags[..], flags].concat());
}

fn page(folder: &Path, flags: &[&str]) -> String {
    run(folder, &[&["report", "plan.json", "--html", "page.html"][..], flags].concat());
    fs::read_to_string(folder.join("page.html")).unwrap()
}

fn four_ops() -> [(&'static str, f64); 4] {
    [("Conv", 4.0), ("Relu", 2.0), ("Linear", 2.0), ("Softmax", 4.0)]
}

#[test]
fn the_page_says_everything_in_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder, &four_ops());
    write_plan(folder, &["--gpus", "2", "--stages", "1,1", "--memory", "40MB", "--optimizer", "adam"]);
    let model = ["--model", "chain.graph.txt"];
    let text = page(folder, &model);
    assert_eq!(text, page(folder, &model));
    for id in ["stages", "time", "memory", "held", "else", "costs", "if", "source"] {
        assert!(text.contains(&format!("<section id=\"{id}\">")), "no section {id}");
    }
    for label in ["Stage 0", "Stage 1", "warm-up", "steady", "drain", "limit 40.00 MB", "bound"] {
        assert!(text.contains(&format!(">{label}</text>")), "`{label}` is missing");
    }
    // Every computation of both workers has a hint with its weight version.
    assert!(text.contains("<title>stage 1, backward of micro-batch 3, weight version "), "no hint");
    // 6 | 6 ms becomes 8 | 4 when either middle op changes sides.
    assert_eq!(text.matches("<td class=\"n\">+33.33 %</td>").count(), 2, "what moving the cut costs");
    assert!(!text.contains("http:") && !text.contains("https:"), "the page names an address");
    // Without the model the report is shorter, and says so.
    assert!(page(folder, &[]).contains("pipec report PLAN --model FILE"));
}

#[test]
fn names_can_do_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let bad = "x\"'><script>alert(1)</script><img src=y onerror=z>&amp;\u{202e}\u{1b}[31m\u{7}]]>";
    chain(folder, &[(bad, 4.0), ("</title></svg></style>", 4.0), (bad, 4.0)]);
    write_plan(folder, &["--gpus", "3", "--stages", "1,1,1"]);
    // A handwritten plan may contain anything.
    let mut plan: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(folder.join("plan.json")).unwrap()).unwrap();
    for stage in plan["stages"].as_array_mut().unwrap() {
        stage["modules"] = serde_json::json!([bad, "</style><script>"]);
    }
    plan["model"]["file"] = serde_json::json!(bad);
    plan["warnings"] = serde_json::json!([bad]);
    plan["predicted"]["bottleneck"] = serde_json::json!(bad);
    plan["options"]["costs"] = serde_json::json!(bad);
    plan.as_object_mut().unwrap().remove("digest");
    fs::write(folder.join("plan.json"), plan.to_string()).unwrap();
    let text = page(folder, &["--model", "chain.graph.txt", "--svg", "."]);
    assert_eq!(text.matches("<script").count(), 1, "a script that is not ours");
    assert_eq!((text.matches("<img").count(), text.matches("</style").count()), (0, 1));
    assert!(text.contains("&lt;script&gt;alert(1)"), "the name is shown, escaped");
    assert!(text.chars().all(|c| c == '\n' || !(c.is_control() || c == '\u{202e}')), "a character that acts");
    for name in ["graph.svg", "gantt.svg", "memory.svg", "memory-over-time.svg"] {
        let picture = fs::read_to_string(folder.join(name)).unwrap();
        assert!(picture.starts_with("<?xml") && picture.ends_with("</svg>\n"));
        assert!(!picture.contains("<script") && !picture.contains("var(") && !picture.contains('\u{1b}'), "{name}");
        assert_eq!(picture.matches("</style>").count(), 1, "{name}");
    }
}

#[test]
fn long_runs_are_drawn_in_slices() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let ops: Vec<(&str, f64)> = (0..24).map(|_| ("Linear", 1.0)).collect();
    chain(folder, &ops);
    let stages = vec!["1"; 24].join(",");
    write_plan(folder, &["--gpus", "24", "--stages", &stages, "--schedule", "gpipe", "--microbatches", "300"]);
    let text = page(folder, &[]);
    assert!(text.contains("time slices"), "the page does not say that it leaves something out");
    assert!(text.len() < 2_000_000 && text.matches("<rect").count() < 8_000, "{} bytes", text.len());
}

#[test]
fn every_stage_of_a_long_pipeline_is_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let ops: Vec<(&str, f64)> = (0..64).map(|_| ("Linear", 1.0)).collect();
    chain(folder, &ops);
    let stages = vec!["1"; 64].join(",");
    write_plan(folder, &["--gpus", "64", "--stages", &stages, "--schedule", "1f1b", "--microbatches", "64"]);
    let text = page(folder, &[]);
    for stage in 0..64 {
        // A box, a bar, a timeline row and a curve each.
        assert_eq!(text.matches(&format!(">Stage {stage}</text>")).count(), 2, "stage {stage}");
        assert_eq!(text.matches(&format!(">{stage}.0</text>")).count(), 2, "worker {stage}.0");
    }
    assert!(text.len() < 1_000_000, "{} bytes", text.len());
    // Boxes wrap within the page width.
    let widths = text.split("<svg width=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
    assert!(widths.map(|width| width.parse::<f64>().unwrap()).all(|width| width <= 1060.0));
}

#[test]
fn a_device_with_several_stages_holds_them_all() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let ops: Vec<(&str, f64)> = (0..8).map(|_| ("Linear", 1.0)).collect();
    chain(folder, &ops);
    write_plan(folder, &["--gpus", "4", "--schedule", "interleaved", "--microbatches", "8", "--no-replication"]);
    let plan: serde_json::Value = serde_json::from_str(&fs::read_to_string(folder.join("plan.json")).unwrap()).unwrap();
    assert_eq!((plan["stages"].as_array().unwrap().len(), &plan["schedule"]["chunks"]), (8, &2.into()));
    let text = page(folder, &[]);
    assert!(text.contains("4 of 4 devices") && text.contains(">Stages 0, 4</text>"), "one bar a device");
    let total = |at: usize| plan["stages"][at]["memory"]["total"].as_u64().unwrap();
    let fullest = (0..4).map(|at| total(at) + total(at + 4)).max().unwrap();
    let fullest_device = compiler::text::quantity::bytes(fullest);
    assert!(text.contains(&format!("<dt>Peak memory per device</dt><dd>{fullest_device}<small>")), "{fullest_device}");
}

#[test]
fn a_run_stands_beside_its_prediction() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder, &four_ops());
    write_plan(folder, &["--gpus", "2", "--stages", "1,1"]);
    let mut metrics = String::new();
    for step in 0..20 {
        let seconds = 0.012 * f64::from(step + 1);
        metrics += &format!(
            "{{\"step\":{step},\"loss\":{},\"seconds\":{seconds},\"samples_per_s\":80}}\n",
            1.0 / f64::from(step + 1)
        );
    }
    metrics += "{\"total\":{\"steps\":20,\"step_us\":9000,\"stages\":[{\"stage\":1,\"fwd_us\":4000,\"bwd_us\":8000,\"peak_memory_bytes\":5000000}]}}\n";
    fs::write(folder.join("m.jsonl"), &metrics).unwrap();
    let text = page(folder, &["--metrics", "m.jsonl"]);
    // 12 ms on average, 9 ms in the steady state, 6 ms predicted; stage 1 takes twice the planned time.
    assert!(text.contains("1.500 times the prediction") && text.contains("stage 1, backward"), "no measurement");
    assert!(text.contains("9.000 ms in the steady state") && !text.contains("no totals"), "{text}");
    // A run of other settings, and one that did not end.
    let other_settings = metrics.replace("\"step_us\":9000", "\"differs_from_plan\":[\"batch\",\"gradient clipping\"]");
    fs::write(folder.join("m.jsonl"), other_settings).unwrap();
    let text = page(folder, &["--metrics", "m.jsonl"]);
    assert!(text.contains("differs from the plan (batch, gradient clipping)"), "{text}");
    assert!(!text.contains("times the prediction"), "{text}");
    fs::write(folder.join("m.jsonl"), metrics.split("{\"total").next().unwrap()).unwrap();
    let text = page(folder, &["--metrics", "m.jsonl"]);
    assert!(
        text.contains("The file has no totals") && text.contains("with the time in which the pipeline fills"),
        "{text}"
    );
    assert!(text.contains("2.000 times the prediction"), "{text}");
    let foreign_total =
        "{\"total\":{\"stages\":[{\"stage\":2,\"fwd_us\":4000,\"bwd_us\":8000,\"peak_memory_bytes\":5000000}]}}\n";
    fs::write(folder.join("m.jsonl"), format!("{{\"loss\":1,\"seconds\":1}}\n{foreign_total}")).unwrap();
    let output = pipec(folder, &["report", "plan.json", "--metrics", "m.jsonl"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("it has a stage 2, the plan has 2 stages"));
    fs::write(folder.join("m.jsonl"), "{\"loss\": 1}\n").unwrap();
    let output = pipec(folder, &["report", "plan.json", "--metrics", "m.jsonl"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("line 1: `seconds` is not a number"));
}

/// Metrics contain plan, machine and memory per worker; the report compares by worker.
#[test]
fn a_run_is_compared_with_its_own_plan() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let run_pipec = |arguments: &[&str]| run(folder, arguments);
    run_pipec(&["zoo", "mlp", "--layers", "8", "-o", "m.onnx"]);
    let plan = ["partition", "m.onnx", "--schedule", "interleaved", "--microbatches", "4", "--micro-batch", "4"];
    run_pipec(&[&plan[..], &["--gpus", "2", "-o", "plan.json"]].concat());
    let train = ["train", "m.onnx", "--synthetic-data", "--steps", "3", "-q"];
    run_pipec(&[&train[..], &["--plan", "plan.json", "--metrics", "m.jsonl"]].concat());
    let plan_json: Value = serde_json::from_str(&fs::read_to_string(folder.join("plan.json")).unwrap()).unwrap();
    assert_eq!(plan_json["stages"].as_array().unwrap().len(), 4);
    let text = page(folder, &["--metrics", "m.jsonl"]);
    assert!(
        text.contains("stages 0, 2 together, peak memory") && text.contains("stages 1, 3 together, peak memory"),
        "{text}"
    );
    assert!(!text.contains("stage 2, held"));
    // More or fewer workers than cores.
    let metrics = fs::read_to_string(folder.join("m.jsonl")).unwrap();
    let (steps, total) = metrics.trim_end().rsplit_once('\n').unwrap();
    let mut value: Value = serde_json::from_str(total).unwrap();
    assert_eq!(value["total"]["workers"], 2);
    for (cores, is_shared) in [(2, false), (1, true)] {
        value["total"]["cores"] = cores.into();
        fs::write(folder.join("m.jsonl"), format!("{steps}\n{value}\n")).unwrap();
        let says_shared =
            page(folder, &["--metrics", "m.jsonl"]).contains("The 2 workers of the run shared 1 core and");
        assert_eq!(says_shared, is_shared);
    }
    // Other stages, another model.
    let assert_refused = |why: &str| {
        let output = pipec(folder, &["report", "plan.json", "--metrics", "m.jsonl"]);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains("the run used another plan") && stderr.contains(why), "{stderr}");
    };
    let other_plan = ["partition", "m.onnx", "--schedule", "1f1b", "--microbatches", "4", "--micro-batch", "4"];
    run_pipec(&[&other_plan[..], &["--gpus", "2", "--stages", "1,1", "-o", "plan.json"]].concat());
    assert_refused("it has 4 stages, the plan 2 stages");
    run_pipec(&["zoo", "mlp", "--layers", "9", "-o", "m.onnx"]);
    run_pipec(&[&plan[..], &["--gpus", "2", "-o", "plan.json"]].concat());
    assert_refused("its model differs");
}

#[test]
fn another_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder, &four_ops());
    write_plan(folder, &["--gpus", "2"]);
    chain(folder, &[("Conv", 1.0)]);
    let output = pipec(folder, &["report", "plan.json", "--model", "chain.graph.txt"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("is not the model of the plan"));
}

/// The contrast of all text with its background, by the WCAG formula.
#[test]
fn texts_can_be_read() {
    let value = |name: &str, dark: bool| {
        let (_, light, black) = COLOURS.iter().find(|(colour_name, ..)| *colour_name == name).unwrap();
        let colour = if dark { black } else { light };
        let channel = |at: usize| f64::from(u8::from_str_radix(&colour[at..at + 2], 16).unwrap()) / 255.0;
        let linear = |c: f64| if c <= 0.03928 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) };
        0.2126 * linear(channel(1)) + 0.7152 * linear(channel(3)) + 0.0722 * linear(channel(5))
    };
    let pairs = [
        ("ink", "page"),
        ("quiet", "page"),
        ("quiet", "card"),
        ("quiet", "grid"),
        ("link", "page"),
        ("bad", "page"),
        ("on-forward", "forward"),
        ("on-backward", "backward"),
    ];
    for (text, background) in pairs {
        for dark in [false, true] {
            let (a, b) = (value(text, dark), value(background, dark));
            let contrast = (a.max(b) + 0.05) / (a.min(b) + 0.05);
            assert!(contrast >= 4.5, "{text} on {background}, dark {dark}: {contrast:.2}");
        }
    }
}

fn browser() -> Option<PathBuf> {
    let folders: Vec<PathBuf> = env::split_paths(&env::var_os("PATH")?).collect();
    let names = ["chromium", "chromium-browser", "google-chrome"];
    names.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name))).find(|path| path.is_file())
}

#[test]
fn a_browser_opens_it_in_peace() {
    let Some(browser) = browser() else {
        println!("skipped: no browser");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder, &four_ops());
    write_plan(folder, &["--gpus", "4", "--stages", "2,1,1"]);
    page(folder, &["--model", "chain.graph.txt"]);
    let address = format!("file://{}", folder.join("page.html").display());
    let profile = format!("--user-data-dir={}", folder.join("profile").display());
    let output = std::process::Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--dump-dom",
            &profile,
            &address,
        ])
        .output()
        .unwrap();
    let (dom, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !dom.contains("<html") {
        println!("skipped: the browser does not start here: {}", log.lines().last().unwrap_or_default());
        return;
    }
    for stage in 0..3 {
        assert!(dom.contains(&format!("Stage {stage}</text>")), "stage {stage} is missing");
    }
    assert!(!log.contains("CONSOLE"), "{log}");
}
