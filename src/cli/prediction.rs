//! Predicted throughput and memory of a plan compared with the baselines; every time is per minibatch.
//!
//! Cost models `paper` and `pipedream` give the time of the slowest stage in steady state, per micro-batch if a minibatch has several.
//! Here both sides of every comparison are converted to whole minibatches, including fill and drain of a flush, which cost `pipec`
//! includes already.

use crate::cli::screen::Screen;
use crate::cli::stage_table;
use compiler::export::gradients::gradients;
use compiler::export::report::Alternative;
use compiler::export::stage_name::{by_replicas, per_stage, ranges};
use compiler::partition::search::in_flight::ENOUGH;
use compiler::pass::analytic::matmul;
use compiler::plan::problem::{CostModel, Objective};
use compiler::plan::{Plan, PlannedCollective, PlannedExperts, Stage};
use compiler::profile::Method;
use compiler::profile::shared::ActivationSharding;
use compiler::schedule::generators::schedule;
use compiler::schedule::pipeline::{generated, pipeline};
use compiler::schedule::semantics::StepCount;
use compiler::simulate::run::Machine;
use compiler::simulate::steady_throughput::Run;
use compiler::simulate::step_time;
use compiler::tensor::DType;
use compiler::text::quantity::{self, plural, short};
use pipec::plan::interruptible::INTERRUPTED;
use pipec::plan::result;
use std::collections::BTreeSet;

/// Fewest simulated minibatches for a throughput on shared cores.
const MIN_MINIBATCHES: u32 = 4;

/// Relative difference below which two times count as equal: four digits show no difference.
const EQUAL_TOLERANCE: f64 = 5e-4;

/// Name of the baseline with the whole model on every device.
const DATA_PARALLEL: &str = "data parallel";

/// Relative difference above which two times of a plan count as different; the planner raises in-flight limits from here on.
const MAX_EQUAL_RATIO: f64 = 1.0 / ENOUGH - 1.0;

/// Explains a simulated step that differs from the plan because of the link model.
pub fn explain_links(plan: &Plan, simulated_us: f64) -> Option<String> {
    let ratio = simulated_us / plan.predicted.step_us;
    let differs = plan.cost != CostModel::Pipec && (ratio - 1.0).abs() > MAX_EQUAL_RATIO;
    differs.then(|| {
        format!(
            "the plan's times use cost model `{}`; the simulation uses the link times of cost model `pipec`, with contention for ports",
            plan.cost.name()
        )
    })
}

/// Explains a simulated step that is slightly longer than the plan's estimate.
pub fn explain_waits(plan: &Plan, simulated_us: f64) -> Option<String> {
    let ratio = simulated_us / plan.predicted.step_us;
    let is_estimate = plan.cost == CostModel::Pipec && plan.schedule.kind.is_continuous() && ratio.is_finite();
    if !is_estimate || !(1.0 + EQUAL_TOLERANCE..=1.0 + MAX_EQUAL_RATIO).contains(&ratio) {
        return None;
    }
    Some(format!(
        "the plan's estimate is the time of its slowest stage or link; in simulation it also waits for other stages and for \
         exposed gradient all-reduces, {:.1} % more. More in-flight minibatches (`--in-flight`) could reduce this but use memory",
        (ratio - 1.0) * 100.0
    ))
}

/// The simulated time of the plan's program, if it is slightly above the estimate.
fn program_text(plan: &Plan) -> Option<String> {
    let (kind, pipeline) = (generated(plan.schedule.kind).ok()?, pipeline(plan).ok()?);
    let us = step_time::step_us(kind, &pipeline, plan.schedule.microbatches).ok()??;
    explain_waits(plan, us)?;
    Some(format!(
        "{} per minibatch, {:.1} % above the estimate; in-flight limits are raised only for gains of at least {:.1} %, because they cost memory",
        quantity::time(us),
        (us / plan.predicted.step_us - 1.0) * 100.0,
        (1.0 - ENOUGH) * 100.0
    ))
}

/// True if the pipeline drains after every minibatch: a step then takes longer than its micro-batches at the slowest stage.
fn has_flush(plan: &Plan) -> bool {
    // The objective of cost `hybrid` excludes fill and drain, and its files have too little data to compute them.
    !plan.schedule.kind.is_continuous() && plan.stages.len() > 1 && plan.cost != CostModel::Hybrid
}

/// True if the objective covers only the steady state although the pipeline drains.
fn covers_only_steady_state(plan: &Plan) -> bool {
    has_flush(plan) && plan.cost != CostModel::Pipec
}

/// True if the objective and the baselines are times per micro-batch.
pub fn is_per_microbatch(plan: &Plan) -> bool {
    let is_per_minibatch = plan.cost == CostModel::Pipec && plan.schedule.kind.trains();
    plan.schedule.microbatches > 1 && !is_per_minibatch
}

/// Factor from the objective to the time of a minibatch.
fn microbatches(plan: &Plan) -> f64 {
    if is_per_microbatch(plan) { f64::from(plan.schedule.microbatches) } else { 1.0 }
}

/// Gain and cost of tensor parallelism, for one micro-batch over all stages.
fn tensor_parallel_text(plan: &Plan) -> Option<String> {
    let degree = plan.stages.first().map(Stage::degree).filter(|degree| *degree > 1)?;
    let (mut unsharded_us, mut sharded_us, mut collective_us) = (0.0, 0.0, 0.0);
    for stage in &plan.stages {
        let tensor_parallel = stage.tensor_parallel.as_ref()?;
        unsharded_us += tensor_parallel.unsharded_fwd_us + tensor_parallel.unsharded_bwd_us;
        collective_us += tensor_parallel.collective_fwd_us + tensor_parallel.collective_bwd_us;
        sharded_us += stage.fwd_us + stage.bwd_us - stage.recompute_us();
    }
    let sharding = match plan.activations() {
        ActivationSharding::Replicated => "",
        ActivationSharding::Sequence => ", sequence parallel",
        ActivationSharding::Batch => ", batch split within a group",
    };
    Some(format!(
        "{degree}{sharding}: one micro-batch takes {} through all stages ({:.1} % collectives), {} on single devices",
        quantity::time(sharded_us),
        if sharded_us > 0.0 { collective_us / sharded_us * 100.0 } else { 0.0 },
        quantity::time(unsharded_us)
    ))
}

fn collectives_text(plan: &Plan) -> Option<String> {
    let describe = |collective: &PlannedCollective| {
        let kind = if collective.count == 1 { collective.kind.clone() } else { format!("{}s", collective.kind) };
        format!("{} {kind} ({})", quantity::count(collective.count), quantity::bytes(collective.bytes))
    };
    let parts: Vec<String> = plan.predicted.collectives.iter().map(describe).collect();
    (!parts.is_empty())
        .then(|| format!("per micro-batch over all stages, with the bytes that a device sends: {}", parts.join(", ")))
}

/// The device of a group, or of a replica, that holds each expert.
fn experts_text(plan: &Plan) -> Vec<String> {
    let degree = u64::from(plan.stages.iter().map(Stage::degree).max().unwrap_or(1));
    let describe = |planned: &PlannedExperts| {
        let weights = plural(planned.weights.into(), "weight", "weights");
        let experts = planned.experts;
        match planned.split.as_str() {
            "experts" if degree > 1 => {
                let per_device = experts / degree;
                format!(
                    "{experts} per layer ({weights}), {per_device} on each device of a group: device 0 holds experts 0-{}, …, device {} \
                     experts {}-{}",
                    per_device.saturating_sub(1),
                    degree - 1,
                    experts - per_device,
                    experts - 1
                )
            }
            "inputs" | "outputs" if degree > 1 => format!(
                "{experts} per layer ({weights}): every device of a group holds 1/{degree} of each expert, split by its {}",
                planned.split
            ),
            _ if degree > 1 => format!("{experts} per layer ({weights}): every device of a group holds all of them"),
            _ => format!(
                "{experts} per layer ({weights}): every replica holds all of them; `--tensor` can distribute them"
            ),
        }
    };
    plan.predicted.experts.iter().map(describe).collect()
}

/// Operations per second of each device of a stage, and their share of the peak: model flops utilisation (MFU; Chowdhery
/// et al., "PaLM", 2022, appendix B), and hardware flops utilisation (HFU) with recomputation.
fn utilisation_text(plan: &Plan) -> Option<String> {
    let predicted = &plan.predicted;
    let device = &plan.cluster.device;
    let precision = plan.precision();
    let dtype =
        DType::parse(&plan.dtype).filter(|_| device.multiprocessors.is_some() && plan.cluster.classes.is_empty())?;
    let peak = matmul::peak(&precision.map_or_else(|| device.clone(), |precision| precision.on(device)), dtype);
    let devices: BTreeSet<u32> = plan.stages.iter().flat_map(|stage| stage.devices.iter().copied()).collect();
    let rate = predicted.throughput_per_s / (plan.schedule.micro_batch as f64 * f64::from(plan.schedule.microbatches));
    let per_device = |flops: f64| flops * rate / devices.len() as f64;
    (predicted.flops > 0.0 && rate > 0.0).then(|| {
        let hardware = per_device(predicted.flops + predicted.recomputed_flops) / peak * 100.0;
        let recomputation = match predicted.recomputed_flops > 0.0 {
            true => format!("; {} % with recomputation (HFU)", short(hardware)),
            false => String::new(),
        };
        let model = per_device(predicted.flops);
        format!(
            "{} Tflop/s per device, {} % of its {} peak (MFU){recomputation}",
            short(model / 1e12),
            short(model / peak * 100.0),
            plan.precision_name()
        )
    })
}

/// True if there is one micro-batch between flushes, so that no two devices work at the same time.
fn is_fully_serial(plan: &Plan) -> bool {
    let has_costs = !matches!(plan.cost, CostModel::Load | CostModel::Hybrid);
    // Tensor-parallel devices work together, and the passes of a split backward overlap with other stages.
    let is_serial = plan.stages.iter().all(|stage| stage.degree() == 1) && !plan.schedule.kind.splits_backward();
    let has_one_item =
        !plan.schedule.kind.is_continuous() && plan.schedule.microbatches == 1 && plan.cluster.devices > 1;
    has_costs && is_serial && has_one_item
}

/// Reports idle devices of data parallelism: with a flush, micro-batches are distributed over the devices, and there may be fewer.
fn idle_text(plan: &Plan) -> Option<String> {
    let (devices, microbatches) = (plan.cluster.devices, plan.schedule.microbatches);
    let is_unsharded = plan.stages.iter().all(|stage| stage.degree() == 1);
    let has_idle = is_unsharded && !plan.schedule.kind.is_continuous() && microbatches < devices;
    has_idle.then(|| {
        let subject = plural(u64::from(microbatches), "micro-batch keeps", "micro-batches keep");
        format!("with a flush, {subject} {microbatches} of {devices} devices busy")
    })
}

/// The time of a flush: the bubble of a step, or the steps of the slowest stage between fill and drain.
fn flush_text(plan: &Plan) -> Option<String> {
    let items = plural(u64::from(plan.schedule.microbatches), "micro-batch", "micro-batches");
    let bubble = plan.predicted.bubble * 100.0;
    has_flush(plan).then(|| match covers_only_steady_state(plan) {
        false => format!("{items}; the busiest stage idles {bubble:.1} % of a step (pipeline bubble)"),
        true => {
            let time = quantity::time(plan.predicted.minibatch_us);
            format!("{items} of {time} at the slowest stage; fill and drain take {bubble:.1} % of a step")
        }
    })
}

/// A baseline beside the plan.
fn comparison_text(plan: &Plan, other: &Alternative, unit: &str) -> String {
    let time = quantity::time(other.us);
    if !other.fits {
        return format!("does not fit in memory (would take {time} {unit})");
    }
    let comparison = match other.us / plan.predicted.step_us {
        ratio if !ratio.is_finite() || (ratio - 1.0).abs() < EQUAL_TOLERANCE => "the same".to_string(),
        ratio if ratio > 1.0 => format!("this plan is {} times as fast", short(ratio)),
        ratio => format!("{} times as fast as this plan", short(1.0 / ratio)),
    };
    let idle_devices = idle_text(plan).filter(|_| other.name == DATA_PARALLEL);
    let idle_devices = idle_devices.map_or(String::new(), |idle_devices| format!("; {idle_devices}"));
    format!("{time} {unit}: {comparison}{idle_devices}")
}

fn busiest_link_text(plan: &Plan) -> Option<String> {
    let link = plan.predicted.busiest_link.as_ref()?;
    Some(format!(
        "{} of group {} on {}: {} {}, {} % of the time",
        link.direction,
        link.unit,
        link.level.escape_debug(),
        quantity::bytes(link.bytes),
        if plan.schedule.microbatches > 1 { "per micro-batch" } else { "per minibatch" },
        short(link.share * 100.0)
    ))
}

/// The prediction, compared with the baselines and the lower bound: rows of a name and a text.
pub fn prediction(plan: &Plan) -> String {
    let predicted = &plan.predicted;
    let unit = if plan.objective == Objective::Latency { "end to end" } else { "per minibatch" };
    let first = format!(
        "{} {unit}, {} samples/s; bottleneck: {}",
        quantity::time(predicted.step_us),
        quantity::samples(predicted.throughput_per_s),
        predicted.bottleneck
    );
    let serial = "1 per minibatch: with a flush, nothing overlaps; `--microbatches M` uses M of the same size";
    let idle = &plan.cluster.idle;
    let idle_text = || format!("{} of {} devices, without a stage: {}", idle.len(), plan.cluster.devices, ranges(idle));
    let alternatives = alternatives(plan);
    let mut rows: Vec<(&str, Option<String>)> = vec![
        ("predicted", Some(first)),
        ("expected", expected_text(plan).map(|interval| format!("{interval} {unit}"))),
        ("contention", contention_text(plan)),
        ("compute", utilisation_text(plan)),
        ("simulated", program_text(plan)),
        // The heading states how other schedules divide a batch.
        ("update", updates_text(plan)),
        ("micro-batches", is_fully_serial(plan).then(|| serial.to_string())),
        ("flush", flush_text(plan)),
    ];
    rows.extend(alternatives.iter().map(|other| (other.name.as_str(), Some(comparison_text(plan, other, unit)))));
    rows.extend([
        ("lower bound", Some(bound_text(plan))),
        ("gradients", gradients(plan)),
        ("tensor degree", tensor_parallel_text(plan)),
        ("collectives", collectives_text(plan)),
    ]);
    rows.extend(experts_text(plan).into_iter().map(|text| ("experts", Some(text))));
    rows.extend([
        ("busiest link", busiest_link_text(plan)),
        ("in flight", Some(in_flight(plan))),
        ("idle", (!idle.is_empty()).then(idle_text)),
        ("shared cores", shared_cores_text(plan)),
    ]);
    rows.into_iter().filter_map(|(name, text)| Some(format!("{name:14} {}\n", text?))).collect()
}

/// A faster schedule without a flush, beside the plan's time per minibatch.
pub fn asynchronous_text(alternative: &result::Alternative, step_us: f64) -> String {
    let name = alternative.schedule.name();
    format!(
        "asynchronous   {} per minibatch, {} times as fast, if each update may use gradients of weights one update old: \
         `--schedule {name}`\n",
        quantity::time(alternative.minibatch_us),
        short(step_us / alternative.minibatch_us)
    )
}

/// The in-flight limit and the weight versions of each stage.
fn in_flight(plan: &Plan) -> String {
    let [limits, versions] = [&plan.schedule.in_flight, &plan.schedule.weight_versions].map(|list| per_stage(list));
    let unit = if limits.contains(" in stage") { ", per replica" } else { " per replica of each stage" };
    format!("{limits}{unit}; weight versions {versions}")
}

/// Heading, stage table and prediction of a plan, fitted to the width of the screen.
pub fn describe(plan: &Plan, screen: &Screen) -> String {
    let [heading, prediction] = [stage_table::heading(plan), prediction(plan)].map(|prose| screen.wrap(&prose));
    format!("{heading}\n{}\n{prediction}", stage_table::stages(plan, screen.width()))
}

/// Samples per optimizer update of each stage.
pub fn update_samples(plan: &Plan) -> Vec<u64> {
    let minibatch = plan.schedule.micro_batch.saturating_mul(plan.schedule.microbatches.into());
    let minibatches_of = |stage: &Stage| if plan.schedule.kind.is_round_robin() { stage.replicas } else { 1 };
    plan.stages.iter().map(|stage| minibatch.saturating_mul(minibatches_of(stage).into())).collect()
}

/// Describes the samples per optimizer update of a round-robin schedule with replicas.
fn updates_text(plan: &Plan) -> Option<String> {
    let (schedule, stages) = (&plan.schedule, &plan.stages);
    if matches!(plan.cost, CostModel::Load | CostModel::Hybrid) || !schedule.kind.is_round_robin() {
        return None;
    }
    let max_replicas = stages.iter().map(|stage| stage.replicas).max().filter(|max_replicas| *max_replicas > 1)?;
    let samples = |items: u32| plural(schedule.micro_batch.saturating_mul(items.into()), "sample", "samples");
    let size = quantity::count(schedule.micro_batch);
    if stages.iter().all(|stage| stage.replicas == max_replicas) {
        return Some(format!(
            "averages {}: one minibatch of {size} on each of {max_replicas} replicas",
            samples(max_replicas)
        ));
    }
    let samples_of = |(replicas, ids): (u32, Vec<u32>)| {
        let word = if ids.len() > 1 { "stages" } else { "stage" };
        format!("{} in {word} {}", samples(replicas), ranges(&ids))
    };
    let parts: Vec<String> = by_replicas(plan).into_iter().rev().map(samples_of).collect();
    Some(format!("averages {}: one minibatch of {size} on each replica", parts.join(", ")))
}

/// The baselines, in times per minibatch.
pub fn alternatives(plan: &Plan) -> Vec<Alternative> {
    let (baselines, fits, m) = (&plan.baselines, &plan.baselines.fits, microbatches(plan));
    let alternative = |name: &str, us: f64, fits| Alternative { name: name.to_string(), us: us * m, fits };
    let mut alternatives = vec![
        alternative("one device", baselines.single, fits.single),
        alternative(DATA_PARALLEL, baselines.data_parallel, fits.data_parallel),
    ];
    if plan.schedule.kind.is_continuous() {
        alternatives.push(alternative("uniform", baselines.uniform, fits.uniform));
    }
    alternatives
}

/// Lower bound of the minibatch time; 0 if the bound covers only the steady state.
pub fn bound_us(plan: &Plan) -> f64 {
    if covers_only_steady_state(plan) { 0.0 } else { plan.lower_bound_us * microbatches(plan) }
}

/// The lower bound and the optimality gap, as a sentence.
pub fn bound_sentence(plan: &Plan) -> String {
    format!("Lower bound: {}.", bound_text(plan))
}

/// The lower bound and the optimality gap; with a flush, possibly of the steady state only.
fn bound_text(plan: &Plan) -> String {
    let (bound, time, m) = (plan.lower_bound_us, plan.predicted.minibatch_us, microbatches(plan));
    let (unit, time_of_bound) = match covers_only_steady_state(plan) {
        true => (" per micro-batch in steady state, without fill and drain", quantity::time(bound)),
        false => ("", quantity::time(bound * m)),
    };
    let gap = (time / bound - 1.0) * 100.0;
    // The baselines ignore the constraints, and may be faster than every plan that satisfies them.
    let is_free = CONSTRAINTS.iter().all(|name| !plan.options.contains_key(*name)) && !is_of_given_groups(plan);
    let qualifier = if is_free { "" } else { " within the constraints" };
    if plan.proven_optimal {
        let steady = if covers_only_steady_state(plan) { " in steady state, without fill and drain" } else { "" };
        format!("proven optimal{qualifier} under this cost model{steady}")
    } else if bound <= 0.0 {
        "not known".to_string()
    } else if gap < EQUAL_TOLERANCE {
        format!("no plan{qualifier} is faster than {time_of_bound}{unit}; this plan reaches the bound")
    } else {
        format!("no plan{qualifier} is faster than {time_of_bound}{unit}; this plan is at most {} % slower", short(gap))
    }
}

/// The options that constrain the plans searched.
const CONSTRAINTS: [&str; 6] = ["stages", "pin", "max_stages", "no_replication", "target", "cut_after"];

/// True if this option is the only constraint.
fn is_pinned_by(plan: &Plan, option: &str) -> bool {
    CONSTRAINTS.iter().all(|name| plan.options.contains_key(*name) == (*name == option))
}

/// True if the tensor-parallel degree was given.
fn is_of_given_groups(plan: &Plan) -> bool {
    plan.options.get("tensor").is_some_and(|sizes| sizes.is_array())
}

/// The first sentence of the output: a baseline is recommended, if the planner was free to choose it, or a baseline is faster than
/// the constrained plan.
pub fn verdict(plan: &Plan) -> Option<String> {
    let target = plan.options.get("target").and_then(|target| target.as_str()).filter(|_| is_pinned_by(plan, "target"));
    let is_planned = plan.search.method == "pipec" || target.is_some();
    let is_free = is_planned && plan.objective == Objective::Throughput && !is_of_given_groups(plan);
    let target = target.map_or(String::new(), |target| format!(" for `--target {target}`"));
    if let [stage] = &plan.stages[..] {
        let recommended = match (stage.replicas, stage.degree()) {
            (replicas, degree) if is_free && degree > 1 => {
                let parallelism = if replicas > 1 { "data parallelism over" } else { "tensor parallelism in" };
                let groups = plural(u64::from(replicas), "group", "groups");
                Some(format!("{parallelism} {groups} of {degree} devices; no faster pipeline was found"))
            }
            (1, _) if plan.cluster.devices == 1 => {
                return Some("The cluster has one device, which runs the complete model.\n".to_string());
            }
            _ if !is_free => None,
            (1, _) => {
                let why = match plan.proven_optimal {
                    _ if is_fully_serial(plan) => "with a flush and one micro-batch, the other devices would be idle",
                    true => "more devices do not make this model faster",
                    false => "no faster plan with more devices was found",
                };
                Some(format!("one device ({why})"))
            }
            (r, _) => Some(format!("data parallelism over {r} devices; no faster pipeline was found")),
        };
        if let Some(recommended) = recommended {
            return Some(format!("Recommended{target}: {recommended}.\n"));
        }
    }
    // The baselines of such a plan are not simulated.
    if plan.search.fallback.as_deref() == Some(INTERRUPTED) {
        return None;
    }
    let (baselines, step, m) = (&plan.baselines, plan.predicted.step_us, microbatches(plan));
    let data_parallel = (baselines.data_parallel * m, baselines.fits.data_parallel, "Data parallelism");
    let single = (baselines.single * m, baselines.fits.single, "One device");
    let faster = [data_parallel, single]
        .into_iter()
        .filter(|(baseline_us, fits, _)| *fits && *baseline_us * (1.0 + EQUAL_TOLERANCE) < step);
    let best = faster.min_by(|left, right| left.0.total_cmp(&right.0))?;
    let subject = if plan.stages.len() > 1 { "pipeline" } else { "plan" };
    Some(format!("{} would be {} times as fast as this {subject}.\n", best.2, short(step / best.0)))
}

/// Throughput of the plan if its workers outnumber the cores they share; `None` if each has its own device.
pub fn shared_cores_text(plan: &Plan) -> Option<String> {
    let cores = plan.cluster.device.cores?;
    let workers = u64::from(plan.workers());
    // Cores belong to one host, and only the first level is known to be within a host.
    if workers <= u64::from(cores) || plan.cluster.levels.len() > 1 {
        return None;
    }
    let text = format!("{workers} workers share {}", plural(u64::from(cores), "core", "cores"));
    let rate = simulate_on_cores(plan, cores).map_or(String::new(), |rate| {
        format!(": {} samples/s in simulation; the figures above assume one core per worker", quantity::samples(rate))
    });
    Some(text + &rate)
}

/// The prediction interval of a step.
fn expected_text(plan: &Plan) -> Option<String> {
    let [low, high] = plan.expected_step_us()?.map(quantity::time);
    Some(format!("{low} to {high}"))
}

/// Says that a profile was measured with another number of workers on the cores of the machine.
fn contention_text(plan: &Plan) -> Option<String> {
    let (workers, measured) = (plan.workers_of_one_host()?, plan.profile.workers);
    let differs = plan.profile.method == Method::Measured && workers != measured;
    let measured = plural(u64::from(measured), "worker", "workers");
    differs.then(|| match workers {
        1 => format!("measured with {measured} at the same time; one alone is faster"),
        _ => format!("measured with {measured}; `pipec profile --workers {workers}` includes the memory bandwidth that {workers} share"),
    })
}

/// Simulated samples per second on this number of cores.
fn simulate_on_cores(plan: &Plan, cores: u32) -> Option<f64> {
    let microbatches = plan.schedule.microbatches;
    let pipeline = pipeline(plan).ok()?;
    let machine = Machine { cores: Some(cores), ..Machine::of(&pipeline) };
    let run = Run::of(plan.schedule.kind, &pipeline, &machine, plan.schedule.microbatches);
    let minibatches = Some(run.minibatches()).filter(|minibatches| *minibatches >= MIN_MINIBATCHES)?;
    let count = StepCount { minibatches, microbatches };
    let step = run.step_us(&schedule(generated(plan.schedule.kind).ok()?, &pipeline, count).ok()?)?;
    let samples = plan.schedule.micro_batch as f64 * f64::from(microbatches);
    (step > 0.0).then(|| samples * 1e6 / step)
}
