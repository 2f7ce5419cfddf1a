//! Profiles and links of simulated GPUs.

use crate::support::simulated_gpus::{driver, on_simulated_gpus};
use compiler::tensor::{DType, Tensor};
use runtime::data::weights::{read, write};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

/// What a command on simulated GPUs prints, in `folder`.
fn run(folder: &Path, driver: &Path, arguments: &[&str]) -> String {
    let mut command = match arguments[0] {
        "zoo" => Command::new(env!("CARGO_BIN_EXE_pipec")),
        _ => on_simulated_gpus(env!("CARGO_BIN_EXE_pipec"), driver),
    };
    let output = command.current_dir(folder).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn a_profile_of_a_gpu_is_complete_and_plans_are_made_with_it() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    run(at, driver, &["zoo", "gpt", "-o", "gpt.onnx"]);
    let quick_flags = ["--runs", "3", "--warmup", "1", "--micro-batch", "4", "--no-cache"];
    for (precision, file) in [("fp32", "f32.json"), ("bf16", "bf16.json"), ("tf32", "tf32.json")] {
        let text = run(
            at,
            driver,
            &[&["profile", "gpt.onnx", "--device", "cuda:1", "--precision", precision, "-o", file], &quick_flags[..]]
                .concat(),
        );
        assert!(text.contains("on Simulated GPU"), "{text}");
        let profile = json(&at.join(file));
        assert_eq!(profile["device"]["name"], "Simulated GPU");
        assert!(profile["device"]["driver"].as_str().unwrap().starts_with("CUDA "), "{}", profile["device"]);
        assert_eq!(profile["device"]["memory_bytes"], 4_294_967_296u64);
        let whole = |name: &str| profile["whole"][name].as_f64().unwrap();
        let ops = profile["ops"].as_array().unwrap();
        let sum = |name: &str| ops.iter().map(|op| op[name].as_f64().unwrap_or(0.0)).sum::<f64>();
        for name in ["fwd_us", "bwd_us"] {
            let (whole, sum) = (whole(name), sum(name));
            assert!(whole > 0.0 && sum < 1.1 * whole, "{name}: {sum} of {whole}");
            assert!(ops.iter().filter(|op| op[name].as_f64().unwrap() > 0.0).count() > 20, "{name}");
        }
        assert!(sum("weight_grad_us") > 0.0 && sum("update_us") > 0.0 && sum("workspace_bytes") > 0.0);
        let plan = format!("plan-{file}");
        run(at, driver, &["partition", "gpt.onnx", "--profile", file, "--gpus", "2", "--batch", "8", "-o", &plan]);
        let planned = json(&at.join(&plan));
        assert_eq!(planned["cluster"]["device"]["kind"], "Simulated GPU");
        assert_eq!(planned["cluster"]["device"]["memory"], 4_294_967_296u64);
        assert!(run(at, driver, &["simulate", &plan]).contains("samples/s"));
        let types = &planned["element_types"];
        assert!(types.is_null() && precision == "fp32" || types["precision"] == precision, "{types}");
    }
}

#[test]
fn links_between_gpus_are_measured() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let text = "schema = \"pipec.cluster/1\"\n[device]\nkind = \"simulated\"\nmemory = \"4GB\"\n\
                memory_bandwidth = \"1TB/s\"\npeak_flops = { f32 = 1e13 }\n\
                [[level]]\nname = \"link\"\ncount = 2\nbandwidth = \"1GB/s\"\n";
    fs::write(at.join("cluster.toml"), text).unwrap();
    let bench = ["cluster", "bench", "cluster.toml", "-o", "measured.toml", "--format", "json"];
    let result: Value = serde_json::from_str(&run(at, driver, &bench)).unwrap();
    let [before, after] = ["stated", "measured"].map(|key| result[key]["levels"][0].clone());
    assert_eq!(before["bandwidth"], 1e9);
    for name in ["bandwidth", "latency"] {
        assert!(after[name].as_f64().unwrap() > 0.0 && after[name] != before[name], "{name}: {after}");
    }
    let show = run(at, driver, &["cluster", "show", "measured.toml"]);
    assert!(show.contains("2 x simulated"), "{show}");
}

#[test]
fn auto_takes_gpus_that_can_hold_the_workers() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    run(at, driver, &["zoo", "mlp", "-o", "m.onnx"]);
    let train = |flags: &[&str], variables: &[(&str, &str)]| {
        let mut command = on_simulated_gpus(env!("CARGO_BIN_EXE_pipec"), driver);
        let common = ["train", "m.onnx", "--batch", "8", "--synthetic-data", "--steps", "2"];
        let output = command.current_dir(at).args(common).args(flags).envs(variables.iter().copied()).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for (flags, variables, expected) in [
        (&["--stages", "1"][..], &[][..], "takes cuda:0: it can hold the worker, which needs "),
        (&["--stages", "1,1"], &[], "takes cuda:0,1: each can hold one of the 2 workers, which need up to "),
        (&["--stages", "1", "--tensor", "2", "--device", "auto"], &[], "takes cuda:0,1: each can hold one of the 2 "),
        (&["--stages", "1,1,1"], &[], "takes the CPU: 3 workers need a GPU each, and this machine has 2 GPUs"),
        (&["--stages", "2"], &[("PIPEC_SIM_DEVICES", "1")], "takes the CPU: 2 workers need a GPU each, and this"),
        (&["--stages", "1"], &[("PIPEC_SIM_MEMORY", "65536")], "takes the CPU: a worker needs "),
        (&["--stages", "1", "-v"], &[("PIPEC_SIM_DEVICES", "0")], "takes the CPU: no NVIDIA GPU was found"),
        (&["--stages", "1,1", "--processes"], &[], "takes the CPU: in runs of several processes, only `--device cuda`"),
    ] {
        let (is_success, stderr) = train(flags, variables);
        let lines: Vec<&str> = stderr.lines().filter(|line| line.contains("--device auto takes")).collect();
        assert!(is_success && lines.len() == 1 && lines[0].contains(expected), "{flags:?}, {variables:?}: {stderr}");
    }
    // Without a GPU there is nothing to choose.
    for (flags, variables) in [(&["--device", "cpu"][..], &[][..]), (&[], &[("PIPEC_SIM_DEVICES", "0")])] {
        let (is_success, stderr) = train(flags, variables);
        assert!(is_success && !stderr.contains("--device auto"), "{stderr}");
    }
    for mixed in ["cpu,cuda:0", "cuda:1,cpu"] {
        let (is_success, stderr) = train(&["--device", mixed], &[]);
        assert!(!is_success && stderr.contains("all on the CPU or all on GPUs"), "{stderr}");
    }
}

#[test]
fn a_gpu_evaluates_like_the_cpu() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    for model in ["residual-cnn", "mlp"] {
        run(at, driver, &["zoo", model, "-o", "model.onnx"]);
        let values: Vec<f64> = (0..3 * 64).map(|i| f64::from(i % 17) / 17.0).collect();
        let inputs = BTreeMap::from([("x".to_string(), Tensor::from_f64(&[3, 1, 8, 8], &values).cast(DType::F32))]);
        write(&at.join("x.safetensors"), &inputs).unwrap();
        let outputs = ["cpu", "cuda:1"].map(|device| {
            run(
                at,
                driver,
                &["eval", "model.onnx", "--inputs", "x.safetensors", "--device", device, "-o", "y.safetensors"],
            );
            read(&at.join("y.safetensors")).unwrap()
        });
        let [on_cpu, on_gpu] = &outputs;
        assert!(!on_cpu.is_empty() && on_cpu.keys().eq(on_gpu.keys()));
        for (name, tensor) in on_cpu {
            let pairs = tensor.to_f64().into_iter().zip(on_gpu[name].to_f64());
            pairs.for_each(|(a, b)| assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{model}: {a} and {b}"));
        }
    }
}

#[test]
#[cfg(unix)]
fn the_script_for_gpus_measures_and_continues() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let benches = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches");
    fs::create_dir(at.join("bin")).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_pipec"), at.join("bin/pipec")).unwrap();
    for file in ["gpu.sh", "gpu/copies.py", "gpu/data.py", "gpu/summary.py"] {
        let file = benches.join(file);
        fs::copy(&file, at.join(file.file_name().unwrap())).unwrap();
    }
    let run = |groups: &str| {
        let mut command = on_simulated_gpus("bash", driver);
        command.current_dir(at).args(["gpu.sh", "run", "--small", "--models", "mlp", "--limit", "3000"]);
        let output = command.args(["--steps", groups]).env("PIPEC_GPU_PATIENCE", "10").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        let logs = || fs::read_to_string(at.join("results/train-mlp-fp32.log")).unwrap_or_default();
        assert!(output.status.success(), "{text}{}", logs());
        (text, fs::read_to_string(at.join("results/summary.md")).unwrap())
    };
    let (_, summary) = run("profile");
    assert!(summary.contains("| profile-mlp-bf16 | ok |"), "{summary}");
    let (text, summary) = run("profile,train");
    assert!(!text.contains("profile-mlp") && text.contains("train-mlp-fp32"), "{text}");
    assert!(summary.contains("The driver is simulated") && summary.contains("| train-mlp-bf16 | ok |"), "{summary}");
    if Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success()) {
        let row =
            summary.lines().find(|line| line.starts_with("| mlp | bf16 | 2 |")).unwrap_or_else(|| panic!("{summary}"));
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        for cell in &cells[4..6] {
            assert!(cell.replace(',', "").parse::<f64>().is_ok_and(|speed| speed > 0.0), "{row}");
        }
        assert_eq!(cells[6..8], ["-", "-"], "PyTorch did not run: {row}");
    }
}
