//! The planner's choice against plans pinned by hand: `cargo bench --bench partition -- --pins [FILTER]`.
//!
//! Each case is a model on a cluster under a schedule. The planner chooses a plan without constraints. Then each of at
//! least 30 pins fixes the stages and replicas (`--stages`), and the planner cuts for them. A pin that is faster by more than
//! 1 % beats the planner. Times are simulated.

use crate::table::{Table, measure_usage};
use compiler::cluster::BytesPerSecond;
use compiler::plan::Plan;
use compiler::plan::schedule::Schedule;
use models::zoo;
use pipec::cluster::ClusterRequest;
use pipec::costs::CostInput;
use pipec::events::Silent;
use pipec::plan::request::{PlanRequest, ScheduleChoice};
use pipec::plan::solve::plan;
use std::path::Path;

/// A pin beats the planner if its time is below this fraction of the planner's.
const BEATEN: f64 = 0.99;

struct Case {
    model: &'static str,
    devices: u32,
    gigabytes_per_s: f64,
    kind: &'static str,
    micro_batch: u64,
    /// Micro-batches per minibatch; one for 1F1B-RR.
    microbatches: u32,
    schedule: Schedule,
}

const fn flushed(
    model: &'static str,
    devices: u32,
    gigabytes_per_s: f64,
    kind: &'static str,
    micro_batch: u64,
    microbatches: u32,
) -> Case {
    Case { model, devices, gigabytes_per_s, kind, micro_batch, microbatches, schedule: Schedule::OneFOneB }
}

const fn continuous(model: &'static str, devices: u32, gigabytes_per_s: f64, micro_batch: u64) -> Case {
    Case { schedule: Schedule::OneFOneBRr, ..flushed(model, devices, gigabytes_per_s, "v100", micro_batch, 1) }
}

const CASES: [Case; 24] = [
    flushed("gnmt8", 8, 1.0, "v100", 1, 16),
    flushed("gnmt8", 8, 1.0, "v100", 16, 16),
    flushed("bert-base", 8, 1.0, "v100", 1, 16),
    flushed("bert-large", 8, 1.0, "v100", 1, 16),
    flushed("bert-large", 8, 12.0, "a100", 4, 16),
    flushed("amoebanet", 8, 1.0, "v100", 1, 16),
    flushed("unet", 8, 1.0, "v100", 1, 16),
    flushed("vgg16", 8, 1.0, "v100", 16, 16),
    flushed("vgg16", 4, 10.0, "v100", 32, 8),
    flushed("resnet50", 8, 1.0, "v100", 8, 16),
    flushed("resnet50", 8, 12.0, "a100", 32, 8),
    flushed("resnet152", 8, 3.0, "v100", 8, 16),
    flushed("alexnet", 8, 1.0, "v100", 32, 16),
    flushed("awd-lm", 4, 1.0, "v100", 20, 8),
    flushed("gpt2", 8, 12.0, "a100", 4, 16),
    flushed("gpt2", 8, 1.0, "a100", 1, 16),
    flushed("gpt2-medium", 8, 25.0, "a100", 2, 32),
    flushed("gpt2-xl", 8, 25.0, "h100", 1, 16),
    flushed("transformer-3", 4, 5.0, "v100", 4, 16),
    continuous("vgg16", 8, 1.0, 32),
    continuous("resnet50", 8, 1.0, 32),
    continuous("gnmt8", 8, 1.0, 32),
    continuous("unet", 8, 1.0, 4),
    continuous("bert-base", 8, 1.0, 8),
];

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
    pins.extend([[3, 5], [5, 3], [6, 2], [2, 6]].iter().map(|pin| pin.to_vec()));
    pins.extend([[4, 2, 2], [2, 4, 2], [2, 2, 4], [3, 3, 2], [4, 3, 1], [3, 4, 1]].iter().map(|pin| pin.to_vec()));
    pins.extend([[2, 2, 2, 1], [3, 2, 2, 1], [3, 3, 1, 1], [1, 2, 3, 2]].iter().map(|pin| pin.to_vec()));
    pins.retain(|pin| pin.iter().sum::<u32>() <= devices);
    pins.sort();
    pins.dedup();
    pins
}

fn request(case: &Case, model: &Path, replicas: Option<Vec<u32>>) -> PlanRequest {
    let mut request = PlanRequest::new(model, case.devices);
    request.cluster = ClusterRequest {
        gpus: Some(case.devices),
        bandwidth: Some(BytesPerSecond(case.gigabytes_per_s * 1e9)),
        ..ClusterRequest::default()
    };
    request.costs = CostInput::Analytic(Some(case.kind.to_string()));
    request.micro_batch = Some(case.micro_batch);
    request.options.microbatches = case.microbatches;
    request.options.schedule = Some(ScheduleChoice::Named(case.schedule));
    request.options.replicas = replicas;
    request
}

fn planned(case: &Case, model: &Path, replicas: Option<Vec<u32>>) -> Option<Plan> {
    plan(&request(case, model, replicas), &Silent).ok().map(|result| result.planned.plan)
}

/// Replicas by stage, as in "13-2-1".
pub fn joined(replicas: &[u32]) -> String {
    replicas.iter().map(u32::to_string).collect::<Vec<_>>().join("-")
}

/// The table of the cases whose model contains `filter`.
pub fn table(filter: &str) -> String {
    let columns = ["case", "plan", "ms", "closed form", "CPU-s", "pins", "best pin", "ms of it", "better by"];
    let mut table = Table::new("The planner's choice against pinned stages", &columns);
    let folder = tempfile::tempdir().expect("a folder for the models can be created");
    let (mut beaten, mut errors, mut count) = (0, Vec::new(), 0);
    for case in CASES.iter().filter(|case| case.model.contains(filter)) {
        let file = folder.path().join(format!("{}.onnx", case.model));
        let options = zoo::Options { structure: true, ..zoo::Options::default() };
        let built = zoo::build(case.model, &options).expect("models of the zoo can be built");
        std::fs::write(&file, zoo::to_bytes(&built.model)).expect("the folder can be written to");
        let (ours, usage) = measure_usage(|| planned(case, &file, None).expect("every case has a plan"));
        let us = ours.predicted.minibatch_us;
        let closed = ours.predicted.objective_us.unwrap_or(us);
        let replicas: Vec<u32> = ours.stages.iter().map(|stage| stage.replicas).collect();
        let all = pins(case.devices);
        let timed =
            all.iter().filter_map(|pin| Some((planned(case, &file, Some(pin.clone()))?.predicted.minibatch_us, pin)));
        let (best_us, best) = timed.min_by(|left, right| left.0.total_cmp(&right.0)).expect("some pin has a plan");
        count += 1;
        beaten += usize::from(best_us < BEATEN * us);
        errors.push((closed / us - 1.0).abs() * 100.0);
        let name = format!(
            "{} on {} {} at {} GB/s, {} × {}, {}",
            case.model,
            case.devices,
            case.kind,
            case.gigabytes_per_s,
            case.microbatches,
            case.micro_batch,
            case.schedule.name()
        );
        let row = [
            name,
            joined(&replicas),
            format!("{:.3}", us / 1e3),
            format!("{:+.1} %", (closed / us - 1.0) * 100.0),
            format!("{:.2}", usage.cpu_seconds),
            all.len().to_string(),
            joined(best),
            format!("{:.3}", best_us / 1e3),
            format!("{:.1} %", (us / best_us - 1.0) * 100.0),
        ];
        eprintln!("{}", row.join(" | "));
        table.row(&row);
    }
    errors.sort_by(f64::total_cmp);
    let [median, worst] = [errors.get(errors.len() / 2), errors.last()].map(|error| error.copied().unwrap_or(0.0));
    format!(
        "{}\nBeaten by more than 1 %: {beaten} of {count}. Closed form against simulation: median {median:.1} %, worst {worst:.1} %.\n",
        table.text()
    )
}
