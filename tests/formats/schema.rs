//! Output and files match `pipec schema`, and deviations do not.
//!
//! The validator here supports only the keywords that our schemas use, and fails on any other.

use assert_cmd::Command;
use compiler::tensor::Tensor;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;

fn pipec(folder: &Path, line: &str) -> String {
    let mut command = Command::cargo_bin("pipec").unwrap();
    let output = command.current_dir(folder).args(line.split_whitespace()).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Keywords without constraints.
const SILENT: [&str; 7] = ["$schema", "$defs", "title", "description", "format", "default", "patternProperties"];

/// The location and keyword of the first violation.
fn judge(root: &Value, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
    let schema = match schema {
        Value::Bool(true) => return Ok(()),
        Value::Object(schema) => schema,
        other => return Err(format!("{at}: {other} is no schema")),
    };
    let fail = |why: String| Err(format!("{at}: {why}"));
    for (word, rule) in schema {
        match word.as_str() {
            word if SILENT.contains(&word) => {}
            "$ref" => {
                let name = rule.as_str().unwrap().strip_prefix('#').unwrap();
                judge(root, root.pointer(name).unwrap_or_else(|| panic!("{name}")), value, at)?;
            }
            "type" => {
                let is = |name: &Value| is_of(name.as_str().unwrap(), value);
                if !rule.as_array().map_or_else(|| is(rule), |names| names.iter().any(is)) {
                    return fail(format!("is no {rule}"));
                }
            }
            "const" if rule != value => return fail(format!("is not {rule}")),
            "enum" if !rule.as_array().unwrap().contains(value) => return fail(format!("is none of {rule}")),
            "const" | "enum" => {}
            "minimum" if value.as_f64().is_some_and(|value| value < rule.as_f64().unwrap()) => {
                return fail("is too small".to_string());
            }
            "maximum" if value.as_f64().is_some_and(|value| value > rule.as_f64().unwrap()) => {
                return fail("is too large".to_string());
            }
            "minItems" if value.as_array().is_some_and(|list| (list.len() as u64) < rule.as_u64().unwrap()) => {
                return fail("is too short".to_string());
            }
            "maxItems" if value.as_array().is_some_and(|list| list.len() as u64 > rule.as_u64().unwrap()) => {
                return fail("is too long".to_string());
            }
            "minimum" | "maximum" | "minItems" | "maxItems" => {}
            "anyOf" | "oneOf" => {
                let matching =
                    rule.as_array().unwrap().iter().filter(|option| judge(root, option, value, at).is_ok()).count();
                if matching == 0 || word == "oneOf" && matching > 1 {
                    return fail(format!("is {matching} of `{word}`"));
                }
            }
            "allOf" => rule.as_array().unwrap().iter().try_for_each(|option| judge(root, option, value, at))?,
            "prefixItems" => {
                let pairs = rule.as_array().unwrap().iter().zip(value.as_array().into_iter().flatten());
                pairs
                    .enumerate()
                    .try_for_each(|(i, (option, value))| judge(root, option, value, &format!("{at}[{i}]")))?;
            }
            "items" => {
                let list = value.as_array().into_iter().flatten().enumerate();
                list.clone().try_for_each(|(i, value)| judge(root, rule, value, &format!("{at}[{i}]")))?;
            }
            "required" => {
                let Some(object) = value.as_object() else { continue };
                let absent = rule.as_array().unwrap().iter().find(|name| !object.contains_key(name.as_str().unwrap()));
                if let Some(name) = absent {
                    return fail(format!("has no {name}"));
                }
            }
            "properties" => {
                for (name, value) in value.as_object().into_iter().flatten() {
                    if let Some(inner) = rule.get(name) {
                        judge(root, inner, value, &format!("{at}.{name}"))?;
                    }
                }
            }
            "additionalProperties" => {
                let empty = Map::new();
                let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&empty);
                let is_others = |name: &str| schema.contains_key("patternProperties") && name.starts_with("x-");
                for (name, value) in value.as_object().into_iter().flatten() {
                    match properties.contains_key(name) || is_others(name) {
                        true => {}
                        false if *rule == Value::Bool(false) => return fail(format!("has `{name}`")),
                        false => judge(root, rule, value, &format!("{at}.{name}"))?,
                    }
                }
            }
            other => panic!("the judge does not know `{other}`"),
        }
    }
    Ok(())
}

fn is_of(name: &str, value: &Value) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|value| value.fract() == 0.0),
        other => panic!("the judge does not know the type `{other}`"),
    }
}

/// Locations where anything is valid.
const OPEN: [&str; 1] = ["/options"];

/// Every location of a document.
fn collect_pointers(value: &Value, at: String, pointers: &mut Vec<String>) {
    pointers.push(at.clone());
    let escaped = |name: &str| name.replace('~', "~0").replace('/', "~1");
    match value {
        Value::Object(object) => {
            object.iter().for_each(|(name, inner)| collect_pointers(inner, format!("{at}/{}", escaped(name)), pointers))
        }
        Value::Array(list) => list
            .iter()
            .take(2)
            .enumerate()
            .for_each(|(i, inner)| collect_pointers(inner, format!("{at}/{i}"), pointers)),
        _ => {}
    }
}

/// The document is valid; with another value at any location, or an additional field in a fixed object, it is not.
fn assert_fits(schema: &Value, document: &Value, what: &str) {
    judge(schema, schema, document, "").unwrap_or_else(|why| panic!("{what}{why}"));
    let mut pointers = Vec::new();
    collect_pointers(document, String::new(), &mut pointers);
    assert!(pointers.len() > 3, "{what}: {pointers:?}");
    for pointer in pointers.iter().filter(|pointer| !OPEN.iter().any(|open| pointer.starts_with(open))) {
        let mut corrupted = document.clone();
        *corrupted.pointer_mut(pointer).unwrap() = json!({"of another": ["kind"]});
        assert!(judge(schema, schema, &corrupted, "").is_err(), "{what}: anything goes at {pointer}");
    }
}

#[test]
fn files_and_answers_are_what_the_schemas_say() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let schema = |what: &str| parsed(&pipec(at, &format!("schema {what}")));
    let read = |name: &str| parsed(&fs::read_to_string(at.join(name)).unwrap());

    // Plans: of models and published profiles, with and without a flush, chunks, recomputation, limits, device classes.
    let plan = schema("plan");
    pipec(at, "zoo gpt --layers 2 -o gpt.onnx");
    let mixed = "schema = \"pipec.cluster/1\"\n[[device]]\nkind = \"a100\"\ncount = 1\n[[device]]\nkind = \"t4\"\ncount = 3\n\
                 [[level]]\nname = \"l\"\ncount = 4\nbandwidth = \"1GB/s\"\nlatency = \"3us\"\n[[host]]\naddress = \"a:1\"\ndevices = 4\n";
    fs::write(at.join("mixed.toml"), mixed).unwrap();
    for flags in [
        "--gpus 4",
        "--levels 2:10GB/s,2:1GB/s --stages 2,1,1 --optimizer adam",
        "--gpus 2 --schedule zbv --microbatches 8 --memory 1GB",
        "--gpus 2 --stages 1,1 --microbatches 4 --memory 6MB",
        "--gpus 2 --cost paper",
        "--gpus 2 --objective latency",
        "--cluster mixed.toml",
    ] {
        let printed = pipec(at, &format!("partition gpt.onnx {flags} -o p.json --format json -q"));
        assert_fits(&plan, &parsed(&printed), flags);
        assert_eq!(parsed(&printed), read("p.json"));
        assert_eq!(parsed(&pipec(at, "plan show p.json --format json")), read("p.json"));
    }
    let mut foreign = read("p.json");
    foreign["x-mine"] = json!(1);
    assert!(judge(&plan, &plan, &foreign, "").is_ok());
    foreign["mine"] = json!(1);
    assert!(judge(&plan, &plan, &foreign, "").unwrap_err().contains("has `mine`"));

    // Profiles, measured and analytic.
    let profile = schema("profile");
    for flags in ["--runs 1 --no-cache --micro-batch 2", "--device analytic:t4"] {
        let printed = pipec(at, &format!("profile gpt.onnx {flags} -o q.json --format json -q"));
        assert_fits(&profile, &parsed(&printed), flags);
        assert_eq!(parsed(&printed), read("q.json"));
    }

    let cluster = schema("cluster");
    assert_fits(&cluster, &parsed(&pipec(at, "cluster detect --cpu --workers 3 --format json -q")), "detect");
    for flags in ["mixed.toml", "--gpus 4", "--levels 8:450GB/s,2:50GB/s"] {
        let cluster_text = parsed(&pipec(at, &format!("cluster show {flags} --format json")));
        assert_fits(&cluster, &cluster_text["file"], flags);
    }
    let benched = parsed(&pipec(at, "cluster bench --format json -q"));
    assert_fits(&cluster, &benched["file"], "bench");

    // Metrics, of a run with held-out rows and of one that diverges.
    let metrics = schema("metrics");
    pipec(at, "zoo mlp --inputs 6 --classes 3 --hidden 8 -o m.onnx");
    let arrays = [("x", Tensor::from_f32(&[12, 6], &[0.5; 72])), ("y", Tensor::from_i64(&[12], &[1; 12]))];
    let arrays = arrays.map(|(name, tensor)| (name.to_string(), tensor));
    runtime::data::weights::write(&at.join("d.npz"), &arrays.into()).unwrap();
    let train = "train m.onnx --data d.npz --batch 4 --metrics m.jsonl --stages 2,1 --eval-split 0.4";
    let printed = parsed(&pipec(at, &format!("{train} --format json -q")));
    let total = json!({"$ref": "#/$defs/Total", "$defs": metrics["$defs"]});
    assert_fits(&total, &printed, "train");
    let lines = fs::read_to_string(at.join("m.jsonl")).unwrap();
    lines.lines().for_each(|line| assert_fits(&metrics, &parsed(line), "metrics"));
    assert_eq!(parsed(lines.lines().last().unwrap())["total"], printed);
    let diverging = "train m.onnx --synthetic-data --steps 40 --batch 8 --lr 1e30 --metrics m.jsonl";
    let output = Command::cargo_bin("pipec").unwrap().current_dir(at).args(diverging.split(' ')).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let lines = fs::read_to_string(at.join("m.jsonl")).unwrap();
    assert!(lines.contains("\"loss\":null"), "{lines}");
    lines.lines().for_each(|line| judge(&metrics, &metrics, &parsed(line), "").unwrap());

    // Errors of a subcommand and of the command line.
    let error = schema("error");
    for (line, code) in [("train m.onnx", 2), ("partition m.onnx --gpus 2 --memory 1kB", 3), ("trian m.onnx", 2)] {
        let line = format!("{line} --format json -q");
        let output = Command::cargo_bin("pipec").unwrap().current_dir(at).args(line.split(' ')).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{line}");
        assert!(output.stdout.is_empty(), "{line}");
        let stderr = String::from_utf8(output.stderr).unwrap();
        let parsed_output = parsed(stderr.lines().last().unwrap());
        assert_fits(&error, &parsed_output, &line);
        assert_eq!(parsed_output["exit_code"], code, "{line}");
    }

    let program = schema("program");
    for schedule in ["1f1b-rr", "zb-h1", "gpipe"] {
        pipec(at, &format!("partition m.onnx --gpus 3 --stages 2,1 -o p.json --schedule {schedule} -q"));
        pipec(at, "simulate p.json --minibatches 2 --programs prog.json -q");
        assert_fits(&program, &read("prog.json"), schedule);
    }
}

#[test]
fn what_verbs_answer_is_what_the_schema_of_answers_says() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let answers = parsed(&pipec(at, "schema answers"));
    let assert_answer = |verb: &str, line: &str, code: i32| {
        let line = format!("{line} --format json -qq");
        let output = Command::cargo_bin("pipec").unwrap().current_dir(at).args(line.split(' ')).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        let parsed_output = parsed(&String::from_utf8(output.stdout).unwrap());
        judge(&answers, &answers["$defs"][verb], &parsed_output, "").unwrap_or_else(|why| panic!("{line}: {why}"));
        let mut incomplete = parsed_output.as_object().unwrap().clone();
        incomplete.remove(answers["$defs"][verb]["required"][0].as_str().unwrap());
        assert!(judge(&answers, &answers["$defs"][verb], &json!(incomplete), "").is_err(), "{line}");
    };
    assert_answer("models", "zoo", 0);
    for (name, flags) in [("mlp", ""), ("gpt", " --layers 1 --structure"), ("cnn", "")] {
        assert_answer("zoo", &format!("zoo {name}{flags} -o {name}.onnx"), 0);
        assert_answer("inspect", &format!("inspect {name}.onnx"), 0);
    }
    pipec(at, "partition mlp.onnx --gpus 2 --stages 1,1 -o one.json -q");
    pipec(at, "partition mlp.onnx --gpus 4 --stages 2,1,1 -o two.json -q");
    assert_answer("check", "plan check one.json --model mlp.onnx", 0);
    assert_answer("diff", "plan diff one.json two.json", 1);
    assert_answer("diff", "plan diff one.json one.json", 0);
    assert_answer("simulate", "simulate two.json --minibatches 8", 0);
    assert_answer("report", "report two.json --html r.html", 0);
    assert_answer("export", "export two.json --to dot -o two.dot", 0);
    assert_answer("sweep", "sweep mlp.onnx --gpus 1,2 --depth 1,2 --svg pictures", 0);
    assert_answer("doctor", "doctor", 0);
    let x = Tensor::from_f32(&[2, 1, 8, 8], &[0.5; 128]);
    let y = Tensor::from_i64(&[2], &[1; 2]);
    let arrays = [("x", x), ("y", y)].map(|(name, tensor)| (name.to_string(), tensor));
    runtime::data::weights::write(&at.join("d.npz"), &arrays.into()).unwrap();
    assert_answer("eval", "eval mlp.onnx --inputs d.npz -o out.npz", 0);
    fs::write(at.join("list.tsv"), "mlp.onnx\td.npz\tout.npz\nnone.onnx\td.npz\tout.npz\n").unwrap();
    assert_answer("cases", "eval --batch-file list.tsv", 1);
    assert_answer("completions", "completions zsh", 0);
    assert_answer("train", "train mlp.onnx --data d.npz --batch 2 --steps 2", 0);
    assert_answer("show", "cluster show --levels 2:9GB/s,2:1GB/s", 0);
    assert_answer("bench", "cluster bench", 0);
    assert_answer("quickstart", "quickstart --model mlp --dir quick --epochs 1", 0);
    let mut broken: Value = parsed(&fs::read_to_string(at.join("one.json")).unwrap());
    broken["predicted"]["minibatch_us"] = json!(1.0);
    fs::write(at.join("broken.json"), broken.to_string()).unwrap();
    assert_answer("check", "plan check broken.json", 1);
}

#[test]
fn the_judge_judges() {
    let schema = json!({"type": "object", "required": ["a"], "additionalProperties": false, "properties": {
        "a": {"type": ["integer", "null"], "minimum": 1}, "b": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 1},
        "c": {"anyOf": [{"const": 1}, {"type": "string"}]}}});
    for (value, right) in [
        (json!({"a": 1}), true),
        (json!({"a": null, "b": ["x"], "c": "d"}), true),
        (json!({}), false),
        (json!({"a": 0}), false),
        (json!({"a": 1.5}), false),
        (json!({"a": 1, "b": ["z"]}), false),
        (json!({"a": 1, "b": ["x", "y"]}), false),
        (json!({"a": 1, "c": 2}), false),
        (json!({"a": 1, "d": 2}), false),
        (json!([]), false),
    ] {
        assert_eq!(judge(&schema, &schema, &value, "").is_ok(), right, "{value}");
    }
}
