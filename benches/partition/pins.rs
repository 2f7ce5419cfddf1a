//! The planner's choice against plans made by hand: `cargo bench --bench partition -- --pins [FILTER]`.
//!
//! Each case of `cases.txt` is a model on a cluster. The planner chooses a plan without constraints. Then each pin fixes the
//! stages and replicas (`--stages`), and the planner cuts for them: about 40 on eight devices. Last, random single moves change
//! the chosen plan: they shift a cut, or give a replica to another stage. A pin or move with a throughput higher by more than
//! 1 % beats the planner. Throughput is simulated. The table counts the pins and moves that have a plan.

use crate::problems::Random;
use crate::table::Table;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

const CASES: &str = include_str!("cases.txt");

/// The cluster of the cases with unequal devices.
const MIXED: &str = r#"schema = "pipec.cluster/1"
[[device]]
kind = "a100"
count = 4
[[device]]
kind = "v100"
count = 4
speed = 0.4
[[level]]
count = 8
bandwidth = "12GB/s"
"#;

/// A pin beats the planner if its throughput is higher by this factor.
const BEATEN: f64 = 1.01;

const MOVES: usize = 40;

/// The longest shift of a cut, in ops.
const LONGEST_SHIFT: u64 = 8;

/// Replicas of the stages of each pin on this many devices.
fn pins(devices: u32) -> Vec<Vec<u32>> {
    let mut pins: Vec<Vec<u32>> = (1..=devices).map(|stages| vec![1; stages as usize]).collect();
    for stages in 1..=devices {
        pins.push(vec![devices / stages; stages as usize]);
        // One stage with the devices that the others leave over: first, last or in the middle.
        let spare = devices + 1 - stages;
        for at in [0, stages / 2, stages - 1] {
            let mut replicas = vec![1; stages as usize];
            replicas[at as usize] = spare;
            pins.push(replicas);
        }
    }
    pins.extend([[1, 2], [2, 1], [3, 5], [5, 3], [6, 2], [2, 6], [7, 1], [4, 4]].iter().map(|pin| pin.to_vec()));
    pins.extend([[4, 2, 2], [2, 4, 2], [2, 2, 4], [3, 3, 2], [4, 3, 1], [3, 4, 1]].iter().map(|pin| pin.to_vec()));
    pins.extend([[2, 2, 2, 1], [3, 2, 2, 1], [3, 3, 1, 1], [1, 2, 3, 2]].iter().map(|pin| pin.to_vec()));
    pins.retain(|pin| pin.iter().sum::<u32>() <= devices);
    pins.sort();
    pins.dedup();
    pins
}

/// Replicas by stage, as in "13-2-1".
pub fn joined(replicas: &[u32]) -> String {
    replicas.iter().map(u32::to_string).collect::<Vec<_>>().join("-")
}

/// A plan of the command line.
struct Pinned {
    throughput: f64,
    replicas: Vec<u32>,
    /// The last op of each stage but the last; empty if stages are not contiguous.
    cuts: Vec<u64>,
    devices: u32,
    /// Relative difference between the closed form and the simulated time.
    closed_form_error: f64,
    /// Relative difference between the plan's time and its lower bound.
    gap: f64,
    cpu_seconds: f64,
}

impl Pinned {
    fn read(path: &Path) -> Option<Pinned> {
        let plan: Value = serde_json::from_str(&fs::read_to_string(path).ok()?).ok()?;
        let stages = plan["stages"].as_array()?;
        let replicas = stages.iter().map(|stage| Some(stage["replicas"].as_u64()? as u32)).collect::<Option<_>>()?;
        let last_op = |stage: &Value| match stage["ops"].as_array()?.as_slice() {
            [range] => range[1].as_u64()?.checked_sub(1),
            _ => None,
        };
        let cuts: Option<Vec<u64>> = stages[..stages.len() - 1].iter().map(last_op).collect();
        let levels = plan["cluster"]["levels"].as_array()?;
        let us = plan["predicted"]["minibatch_us"].as_f64()?;
        Some(Pinned {
            throughput: plan["predicted"]["throughput_per_s"].as_f64()?,
            replicas,
            cuts: cuts.unwrap_or_default(),
            devices: levels.iter().filter_map(|level| level["count"].as_u64()).product::<u64>() as u32,
            closed_form_error: plan["predicted"]["objective_us"].as_f64().unwrap_or(us) / us - 1.0,
            gap: us / plan["lower_bound_us"].as_f64()? - 1.0,
            cpu_seconds: 0.0,
        })
    }
}

/// Plans with further flags; `None` if no plan has them.
fn planned(folder: &Path, flags: &str, more: &[&str]) -> Option<Pinned> {
    let before = children_cpu_seconds();
    let mut command = Command::new(env!("CARGO_BIN_EXE_pipec"));
    command.current_dir(folder).args(["partition", "model.onnx", "-qq", "-o", "plan.json"]);
    let output = command.args(flags.split_whitespace()).args(more).output().expect("pipec can be started");
    let cpu_seconds = children_cpu_seconds() - before;
    output.status.success().then_some(())?;
    Pinned::read(&folder.join("plan.json")).map(|plan| Pinned { cpu_seconds, ..plan })
}

/// CPU seconds of all processes that this one waited for; 0 if the system does not report it.
fn children_cpu_seconds() -> f64 {
    let text = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(13) + ticks(14)) / 100.0
}

/// The flags of a random change of one cut or of one replica.
fn random_move(plan: &Pinned, random: &mut Random) -> Option<[String; 2]> {
    let (mut replicas, mut cuts) = (plan.replicas.clone(), plan.cuts.clone());
    let stages = replicas.len() as u64;
    if random.below(2) == 0 {
        let at = random.below(cuts.len() as u64) as usize;
        let by = 1 + random.below(LONGEST_SHIFT);
        cuts[at] = if random.below(2) == 0 { cuts[at].checked_sub(by)? } else { cuts[at] + by };
        cuts.is_sorted_by(|one, next| one < next).then_some(())?;
    } else {
        let idle = plan.devices.saturating_sub(replicas.iter().sum());
        let from = random.below(stages + u64::from(idle > 0)) as usize;
        let to = random.below(stages) as usize;
        (from != to).then_some(())?;
        if let Some(count) = replicas.get_mut(from) {
            *count = count.checked_sub(1).filter(|count| *count > 0)?;
        }
        replicas[to] += 1;
    }
    let list = |numbers: Vec<String>| numbers.join(",");
    let cuts = list(cuts.iter().map(u64::to_string).collect());
    Some([list(replicas.iter().map(u32::to_string).collect()), cuts])
}

/// The plans of random moves from this one.
fn moved(folder: &Path, flags: &str, ours: &Pinned) -> Vec<Pinned> {
    if ours.cuts.is_empty() {
        return Vec::new();
    }
    let mut random = Random(ours.devices.into());
    let mut moves = BTreeSet::new();
    for _ in 0..10 * MOVES {
        moves.extend(random_move(ours, &mut random).filter(|_| moves.len() < MOVES));
    }
    moves
        .iter()
        .filter_map(|[stages, cuts]| planned(folder, flags, &["--stages", stages, "--cut-after", cuts]))
        .collect()
}

/// The table of the cases that contain `filter`.
pub fn table(filter: &str) -> String {
    let columns = [
        "case",
        "plan",
        "samples/s",
        "closed form",
        "gap",
        "CPU-s",
        "pins",
        "best pin",
        "better by",
        "moves",
        "best move",
        "better by",
    ];
    let mut table = Table::new("The planner's choice against pinned stages and random moves", &columns);
    let folder = tempfile::tempdir().expect("a folder for the models can be created");
    let folder = folder.path();
    fs::write(folder.join("mixed.toml"), MIXED).expect("the folder can be written to");
    let (mut beaten, mut errors, mut gaps) = (0, Vec::new(), Vec::new());
    let cases = CASES.lines().filter(|line| !line.is_empty() && !line.starts_with('#') && line.contains(filter));
    for case in cases {
        let (model, flags) = case.split_once(" | ").expect("a case has a model and flags");
        write_model(folder, model);
        let ours = planned(folder, flags, &[]).unwrap_or_else(|| panic!("no plan: {case}"));
        let pins = pins(ours.devices);
        let pinned: Vec<Pinned> = pins
            .iter()
            .filter_map(|pin| planned(folder, flags, &["--stages", &joined(pin).replace('-', ",")]))
            .collect();
        let moved = moved(folder, flags, &ours);
        let counts = [pinned.len(), moved.len()];
        let [best_pin, best_move] = [pinned, moved]
            .map(|plans| plans.into_iter().max_by(|one, other| one.throughput.total_cmp(&other.throughput)));
        let factor = |plan: &Option<Pinned>| plan.as_ref().map_or(1.0, |plan| plan.throughput / ours.throughput);
        beaten += usize::from(factor(&best_pin).max(factor(&best_move)) > BEATEN);
        errors.push(ours.closed_form_error.abs() * 100.0);
        gaps.push(ours.gap * 100.0);
        let percent = |factor: f64| format!("{:.1} %", (factor - 1.0) * 100.0);
        let stages = |plan: &Option<Pinned>| plan.as_ref().map_or("–".to_string(), |plan| joined(&plan.replicas));
        let row = [
            case.replace(" | ", " "),
            joined(&ours.replicas),
            format!("{:.1}", ours.throughput),
            format!("{:+.1} %", ours.closed_form_error * 100.0),
            format!("{:.1} %", ours.gap * 100.0),
            format!("{:.2}", ours.cpu_seconds),
            counts[0].to_string(),
            stages(&best_pin),
            percent(factor(&best_pin)),
            counts[1].to_string(),
            stages(&best_move),
            percent(factor(&best_move)),
        ];
        eprintln!("{}", row.join(" | "));
        table.row(&row);
    }
    let count = errors.len();
    let [(error, worst_error), (gap, worst_gap)] = [errors, gaps].map(|mut numbers| {
        numbers.sort_by(f64::total_cmp);
        (numbers.get(count / 2).copied().unwrap_or(0.0), numbers.last().copied().unwrap_or(0.0))
    });
    format!(
        "{}\nBeaten by more than 1 %: {beaten} of {count}. Closed form against simulation: median {error:.1} %, worst \
         {worst_error:.1} %. Gap to the lower bound: median {gap:.0} %, worst {worst_gap:.0} %.\n",
        table.text()
    )
}

/// Writes a model of the zoo, given by the arguments of `pipec zoo`.
fn write_model(folder: &Path, model: &str) {
    // pipec replaces no file of another model.
    for file in ["model.onnx", "plan.json"] {
        let _ = fs::remove_file(folder.join(file));
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_pipec"));
    command.current_dir(folder).arg("zoo").args(model.split_whitespace()).args([
        "--structure",
        "-qq",
        "-o",
        "model.onnx",
    ]);
    let output = command.output().expect("pipec can be started");
    assert!(output.status.success(), "{model}: {}", String::from_utf8_lossy(&output.stderr));
}
