//! What a plan is predicted to bring, beside the plain alternatives: every time is that of one minibatch.
//!
//! Cost models `paper` and `pipedream` speak of the slowest stage in steady state, which is a micro-batch where a minibatch has
//! several. Here both sides of every comparison are turned into whole minibatches, filling and draining of a flush included. Cost
//! `pipec` includes them by itself.

use crate::cli::screen::Screen;
use crate::cli::stage_table;
use compiler::export::gradients::gradients;
use compiler::export::quantity::plural;
use compiler::export::quantity::{self, short};
use compiler::export::stage_name::ranges;
use compiler::partition::search::in_flight::ENOUGH;
use compiler::plan::problem::{CostModel, Objective};
use compiler::plan::{Plan, Stage};
use compiler::schedule::pipeline::{generated, pipeline};
use compiler::schedule::scheduler::schedule;
use compiler::schedule::semantics::StepCount;
use compiler::simulate::run::Machine;
use compiler::simulate::steady_throughput::Run;
use compiler::simulate::step_time;
use pipec::plan::solve::cost_name;
use std::collections::BTreeSet;

/// Minibatches without which nothing is told of shared cores.
const FEWEST: u32 = 4;

/// Ratios nearer to 1 than this are told as equal: four digits show no difference.
const EQUAL: f64 = 5e-4;

/// What the alternative is called that has all of the model on every device.
const DATA_PARALLEL: &str = "data parallel";

/// From here on two times of one plan are told apart: where in-flight caps are raised for less waiting.
const APART: f64 = 1.0 / ENOUGH - 1.0;

/// Why a simulated step takes another time than the plan says, where that is because of links.
pub fn other_links(plan: &Plan, simulated_us: f64) -> Option<String> {
    let ratio = simulated_us / plan.predicted.step_us;
    let is_other = plan.cost != CostModel::Pipec && (ratio - 1.0).abs() > APART;
    is_other.then(|| {
        format!(
            "the plan's times follow cost `{}`; in simulation messages take what cost `pipec` says, and share the ports they go over",
            cost_name(plan.cost)
        )
    })
}

/// Why a simulated step takes a little more than the plan says, where the plan has the figure of the equations.
pub fn waits(plan: &Plan, simulated_us: f64) -> Option<String> {
    let ratio = simulated_us / plan.predicted.step_us;
    let is_told = plan.cost == CostModel::Pipec && plan.schedule.kind.is_continuous() && ratio.is_finite();
    if !is_told || !(1.0 + EQUAL..=1.0 + APART).contains(&ratio) {
        return None;
    }
    Some(format!(
        "the plan's figure is what its slowest stage or link takes; in the program that waits for others besides, and for sums of gradients that \
         nothing hides, {:.1} % more: so little stays where more in flight (`--in-flight`) would cost memory",
        (ratio - 1.0) * 100.0
    ))
}

/// What the plan's program takes, where that is a little more than the figure above it.
fn in_program(plan: &Plan) -> Option<String> {
    let (kind, pipeline) = (generated(plan.schedule.kind).ok()?, pipeline(plan).ok()?);
    let us = step_time::step_us(kind, &pipeline, plan.schedule.microbatches).ok()??;
    waits(plan, us)?;
    Some(format!(
        "{} per minibatch, {:.1} % more: in-flight caps are raised, which costs memory, for {:.1} % and more",
        quantity::time(us),
        (us / plan.predicted.step_us - 1.0) * 100.0,
        (1.0 - ENOUGH) * 100.0
    ))
}

/// Whether the pipeline drains after every minibatch, so that a step is longer than its micro-batches at the slowest stage.
fn flushes(plan: &Plan) -> bool {
    // What cost `hybrid` minimises leaves filling and draining out, and the files tell too little to say what they take.
    !plan.schedule.kind.is_continuous() && plan.stages.len() > 1 && plan.cost != CostModel::Hybrid
}

/// Whether the objective speaks of the steady state alone, though the pipeline drains.
fn is_steady(plan: &Plan) -> bool {
    flushes(plan) && plan.cost != CostModel::Pipec
}

/// Whether the objective and the baselines are times of a micro-batch.
pub fn is_of_items(plan: &Plan) -> bool {
    let is_whole = plan.cost == CostModel::Pipec && plan.schedule.kind.trains();
    plan.schedule.microbatches > 1 && !is_whole
}

/// How often the objective counts in a minibatch.
fn microbatches(plan: &Plan) -> f64 {
    if is_of_items(plan) { f64::from(plan.schedule.microbatches) } else { 1.0 }
}

/// What devices that share replicas gain and pay, for one item and all stages.
fn groups(plan: &Plan) -> Option<String> {
    let degree = plan.stages.first().map(Stage::degree).filter(|degree| *degree > 1)?;
    let (mut alone, mut shared, mut meetings) = (0.0, 0.0, 0.0);
    for stage in &plan.stages {
        let sharing = stage.sharing.as_ref()?;
        alone += sharing.alone_fwd_us + sharing.alone_bwd_us;
        meetings += sharing.meeting_fwd_us + sharing.meeting_bwd_us;
        shared += stage.fwd_us + stage.bwd_us - if stage.recompute { stage.fwd_us } else { 0.0 };
    }
    Some(format!(
        "{degree} devices share each replica: {} through all stages in place of {}, {:.1} % of it to bring tensors together",
        quantity::time(shared),
        quantity::time(alone),
        if shared > 0.0 { meetings / shared * 100.0 } else { 0.0 }
    ))
}

/// Whether the devices have one micro-batch from flush to flush, so that no two of them work at a time.
fn leaves_nothing(plan: &Plan) -> bool {
    let has_costs = !matches!(plan.cost, CostModel::Load | CostModel::Hybrid);
    // Devices of a group work together, and halves of a backward beside those of other stages.
    let is_serial = plan.stages.iter().all(|stage| stage.degree() == 1) && !plan.schedule.kind.splits_backward();
    let is_one = !plan.schedule.kind.is_continuous() && plan.schedule.microbatches == 1 && plan.cluster.devices > 1;
    has_costs && is_serial && is_one
}

/// What keeps devices of data parallelism from work: under a flush they are dealt micro-batches, and there may be fewer.
fn idle(plan: &Plan) -> Option<String> {
    let (all, items) = (plan.cluster.devices, plan.schedule.microbatches);
    let is_alone = plan.stages.iter().all(|stage| stage.degree() == 1);
    let has_idle = is_alone && !plan.schedule.kind.is_continuous() && items < all;
    has_idle.then(|| {
        let work = plural(u64::from(items), "micro-batch keeps", "micro-batches keep");
        format!("under a flush {work} {items} of {all} devices at work")
    })
}

/// The prediction, beside one device and data parallelism, with its bound.
pub fn prediction(plan: &Plan) -> String {
    let predicted = &plan.predicted;
    let step = predicted.step_us;
    let what = if plan.objective == Objective::Latency { "from input to answer" } else { "per minibatch" };
    let mut text = format!(
        "predicted      {} {what}, {} samples/s; slowest is {}\n",
        quantity::time(step),
        quantity::samples(predicted.throughput_per_s),
        predicted.bottleneck
    );
    if let Some(told) = in_program(plan) {
        text += &format!("its program    {told}\n");
    }
    if let Some(told) = updates(plan) {
        text += &format!("update         {told}\n");
    }
    if leaves_nothing(plan) {
        text += "micro-batches  1 a minibatch: under a flush nothing overlaps; `--microbatches M` makes M of the same size\n";
    }
    if flushes(plan) && !is_steady(plan) {
        text += &format!(
            "flush          {}; {:.1} % of a step the busiest stage waits while the pipeline fills and drains\n",
            plural(u64::from(plan.schedule.microbatches), "micro-batch", "micro-batches"),
            predicted.bubble * 100.0
        );
    }
    if is_steady(plan) {
        text += &format!(
            "flush          {} of {} at the slowest stage; {:.1} % of a step fills and drains the pipeline\n",
            plural(u64::from(plan.schedule.microbatches), "micro-batch", "micro-batches"),
            quantity::time(predicted.minibatch_us),
            predicted.bubble * 100.0
        );
    }
    for (name, other, fits) in alternatives(plan) {
        let against = match other / step {
            ratio if !ratio.is_finite() || (ratio - 1.0).abs() < EQUAL => "the same".to_string(),
            ratio if ratio > 1.0 => format!("this plan is {} times as fast", short(ratio)),
            ratio => format!("{} times as fast as this plan", short(1.0 / ratio)),
        };
        let fits = if fits { "" } else { "; does not fit in memory" };
        let idle = idle(plan).filter(|_| name == DATA_PARALLEL).map_or(String::new(), |idle| format!("; {idle}"));
        text += &format!("{name:14} {} {what}: {against}{fits}{idle}\n", quantity::time(other));
    }
    text += &format!("bound          {}\n", bound(plan));
    if let Some(told) = gradients(plan) {
        text += &format!("gradients      {told}\n");
    }
    if let Some(told) = groups(plan) {
        text += &format!("groups         {told}\n");
    }
    if let Some(link) = &predicted.busiest_link {
        text += &format!(
            "busiest link   {} of group {} on {}: {} {}, {} % of the time\n",
            link.direction,
            link.unit,
            link.level.escape_debug(),
            quantity::bytes(link.bytes),
            if plan.schedule.microbatches > 1 { "a micro-batch" } else { "a minibatch" },
            short(link.share * 100.0)
        );
    }
    let numbers = |list: &[u32]| list.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    let schedule = &plan.schedule;
    text += &format!(
        "in flight      {} per replica of each stage; weight versions {}\n",
        numbers(&schedule.in_flight),
        numbers(&schedule.weight_versions)
    );
    if !plan.cluster.idle.is_empty() {
        let (idle, all) = (&plan.cluster.idle, plan.cluster.devices);
        text +=
            &format!("idle           {} of {all} devices, on which no stage stands: {}\n", idle.len(), ranges(idle));
    }
    if let Some(shared) = shared(plan) {
        text += &format!("shared cores   {shared}\n");
    }
    text
}

/// What a plan is, its stages and what it is predicted to bring, as wide as the screen.
pub fn told(plan: &Plan, screen: &Screen) -> String {
    let [heading, prediction] = [stage_table::heading(plan), prediction(plan)].map(|prose| screen.folded(&prose));
    format!("{heading}\n{}\n{prediction}", stage_table::stages(plan, screen.width()))
}

/// Over how many samples an update of each stage averages.
pub fn update_samples(plan: &Plan) -> Vec<u64> {
    let minibatch = plan.schedule.micro_batch.saturating_mul(plan.schedule.microbatches.into());
    let of = |stage: &Stage| if plan.schedule.kind.is_round_robin() { stage.replicas } else { 1 };
    plan.stages.iter().map(|stage| minibatch.saturating_mul(of(stage).into())).collect()
}

/// Over how many samples an update averages, in words, where that is more than one item; nothing where nobody trains by the plan.
pub fn updates(plan: &Plan) -> Option<String> {
    let (schedule, stages) = (&plan.schedule, &plan.stages);
    if matches!(plan.cost, CostModel::Load | CostModel::Hybrid) || !schedule.kind.trains() {
        return None;
    }
    let most = stages.iter().map(|stage| stage.replicas).max().filter(|most| *most > 1);
    let samples = |items: u32| plural(schedule.micro_batch.saturating_mul(items.into()), "sample", "samples");
    let one = quantity::count(schedule.micro_batch);
    if !schedule.kind.is_round_robin() {
        let items = Some(schedule.microbatches).filter(|items| *items > 1)?;
        let dealt = if most.is_some() { ", dealt to the replicas of each stage" } else { "" };
        return Some(format!("averages {}: {items} micro-batches of {one}{dealt}", samples(items)));
    }
    let most = most?;
    if stages.iter().all(|stage| stage.replicas == most) {
        return Some(format!("averages {}: a minibatch of {one} for each of {most} replicas", samples(most)));
    }
    let mut counts: Vec<u32> = stages.iter().map(|stage| stage.replicas).collect();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    counts.dedup();
    let of = |replicas: u32| {
        let ids: Vec<u32> = stages.iter().filter(|stage| stage.replicas == replicas).map(|stage| stage.id.0).collect();
        let word = if ids.len() > 1 { "stages" } else { "stage" };
        format!("{} in {word} {}", samples(replicas), ranges(&ids))
    };
    let all: Vec<String> = counts.into_iter().map(of).collect();
    Some(format!("averages {}: a minibatch of {one} for each replica", all.join(", ")))
}

/// The plain alternatives: what each is, its time for a whole minibatch, whether it fits.
pub fn alternatives(plan: &Plan) -> Vec<(&'static str, f64, bool)> {
    let (all, fits, m) = (&plan.baselines, &plan.baselines.fits, microbatches(plan));
    let mut rows =
        vec![("one device", all.single * m, fits.single), (DATA_PARALLEL, all.data_parallel * m, fits.data_parallel)];
    if plan.schedule.kind.is_continuous() {
        rows.push(("uniform", all.uniform * m, fits.uniform));
    }
    rows
}

/// The least time of a whole minibatch that any plan can have; 0 where the bound speaks of something else.
pub fn bound_us(plan: &Plan) -> f64 {
    if is_steady(plan) { 0.0 } else { plan.lower_bound_us * microbatches(plan) }
}

/// How near the plan is to the best, as a sentence.
pub fn bound_sentence(plan: &Plan) -> String {
    format!("Bound: {}.", bound(plan))
}

/// How near the plan is to the best; under a flush this speaks of the steady state alone.
fn bound(plan: &Plan) -> String {
    let (bound, time, m) = (plan.lower_bound_us, plan.predicted.minibatch_us, microbatches(plan));
    let (unit, bound_told) = match is_steady(plan) {
        true => (" per micro-batch in steady state, before filling and draining", quantity::time(bound)),
        false => ("", quantity::time(bound * m)),
    };
    let gap = (time / bound - 1.0) * 100.0;
    // The plain alternatives keep to no constraint, and may be faster than all plans that do.
    let is_free = CONSTRAINTS.iter().all(|name| !plan.options.contains_key(*name)) && !is_of_given_groups(plan);
    let which = if is_free { "" } else { " of those asked for" };
    if plan.proven_optimal {
        let steady = if is_steady(plan) { " in steady state; filling and draining are not part of it" } else { "" };
        format!("proven the fastest{which} under this cost model{steady}")
    } else if bound <= 0.0 {
        "none is known".to_string()
    } else if gap < EQUAL {
        format!("no plan{which} is faster than {bound_told}{unit}: this one is equal to the bound")
    } else {
        format!("no plan{which} is faster than {bound_told}{unit}: at most {} % away", short(gap))
    }
}

/// The options that say which plans are looked at.
const CONSTRAINTS: [&str; 6] = ["stages", "pin", "max_stages", "no_replication", "target", "cut_after"];

/// Whether this option alone says which plans are looked at.
fn is_pinned_by(plan: &Plan, only: &str) -> bool {
    CONSTRAINTS.iter().all(|name| plan.options.contains_key(*name) == (*name == only))
}

/// Whether the size of groups was given.
fn is_of_given_groups(plan: &Plan) -> bool {
    plan.options.get("tensor").is_some_and(|sizes| sizes.is_array())
}

/// What comes before everything else: that a plain alternative is the answer, where the planner was free to say so, or that one
/// beats a plan that was pinned.
pub fn verdict(plan: &Plan) -> Option<String> {
    let target = plan.options.get("target").and_then(|target| target.as_str()).filter(|_| is_pinned_by(plan, "target"));
    let is_planned = plan.search.method == "pipec" || target.is_some();
    let is_free = is_planned && plan.objective == Objective::Throughput && !is_of_given_groups(plan);
    let target = target.map_or(String::new(), |target| format!(" for `--target {target}`"));
    if let [only] = &plan.stages[..] {
        match only.replicas {
            replicas if is_free && only.degree() > 1 => {
                let (what, degree) =
                    (if replicas > 1 { "Data parallelism over" } else { "Sharing all ops in" }, only.degree());
                let groups = plural(u64::from(replicas), "group", "groups");
                return Some(format!(
                    "{what} {groups} of {degree} devices is the answer{target}: no pipeline found is faster.\n"
                ));
            }
            1 if plan.cluster.devices == 1 => {
                return Some("There is one device, so everything runs on it.\n".to_string());
            }
            1 if is_free => {
                let why = match plan.proven_optimal {
                    _ if leaves_nothing(plan) => {
                        "under a flush one micro-batch leaves the others nothing to do meanwhile"
                    }
                    true => "more devices do not make this model faster",
                    false => "no plan found with more devices is faster",
                };
                return Some(format!("One device alone is the answer{target}: {why}.\n"));
            }
            r if is_free => {
                return Some(format!(
                    "Data parallelism over {r} devices is the answer{target}: no pipeline found is faster.\n"
                ));
            }
            _ => {}
        }
    }
    let (all, step, m) = (&plan.baselines, plan.predicted.step_us, microbatches(plan));
    let data_parallel = (all.data_parallel * m, all.fits.data_parallel, "Data parallelism");
    let single = (all.single * m, all.fits.single, "One device alone");
    let faster = [data_parallel, single].into_iter().filter(|(other, fits, _)| *fits && *other * (1.0 + EQUAL) < step);
    let best = faster.min_by(|left, right| left.0.total_cmp(&right.0))?;
    let this = if plan.stages.len() > 1 { "pipeline" } else { "plan" };
    Some(format!("{} would be {} times as fast as this {this}.\n", best.2, short(step / best.0)))
}

/// What the plan brings where its workers outnumber the cores that they share; nothing where each has its own device.
pub fn shared(plan: &Plan) -> Option<String> {
    let cores = plan.cluster.device.cores?;
    // A device that has several stages is one worker.
    let workers = plan.stages.iter().flat_map(|stage| &stage.devices).collect::<BTreeSet<_>>().len() as u64;
    // Cores are those of one host, and only the first level is known to be one.
    if workers <= u64::from(cores) || plan.cluster.levels.len() > 1 {
        return None;
    }
    let told = format!("{workers} workers share {}", plural(u64::from(cores), "core", "cores"));
    let rate = on_cores(plan, cores).map_or(String::new(), |rate| {
        format!(": {} samples/s by simulation; the figures above give each worker its own", quantity::samples(rate))
    });
    Some(told + &rate)
}

/// Samples per second by simulation on so many cores.
fn on_cores(plan: &Plan, cores: u32) -> Option<f64> {
    let microbatches = plan.schedule.microbatches;
    let pipeline = pipeline(plan).ok()?;
    let machine = Machine { cores: Some(cores), ..Machine::of(&pipeline) };
    let run = Run::of(plan.schedule.kind, &pipeline, &machine, plan.schedule.microbatches);
    let minibatches = Some(run.minibatches()).filter(|minibatches| *minibatches >= FEWEST)?;
    let count = StepCount { minibatches, microbatches };
    let step = run.step_us(&schedule(generated(plan.schedule.kind).ok()?, &pipeline, count).ok()?)?;
    let samples = plan.schedule.micro_batch as f64 * f64::from(microbatches);
    (step > 0.0).then(|| samples * 1e6 / step)
}
