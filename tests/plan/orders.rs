//! Clusters with several device classes: the device order along the pipeline against exhaustive search, and in limited
//! time.

use crate::support::problems::{Random, random_graph};
#[allow(dead_code)] // Other tests use the rest.
use compiler::cluster::device::find;
use compiler::cluster::read::levels;
use compiler::cluster::{Bytes, Cluster, DeviceClass};
use compiler::import::pipedream;
use compiler::partition::error::PlanError;
use compiler::partition::options::PlannerOptions;
use compiler::partition::partitioners::Partitioner;
use compiler::partition::planned::Planned;
use compiler::partition::planner::plan;
use compiler::plan::problem::{CostModel, Problem, ProblemError, Recomputation};
use compiler::plan::schedule::Schedule;
use std::time::Instant;

fn plan_with(problem: &Problem, partitioner: Partitioner) -> Result<Planned, PlanError> {
    plan(problem, &PlannerOptions { partitioner, ..PlannerOptions::default() })
}

fn us(planned: &Planned) -> f64 {
    planned.plan.predicted.minibatch_us
}

fn are_equal(left: f64, right: f64) -> bool {
    (left - right).abs() <= 1e-9 * left.max(right)
}

/// A cluster of devices with these speeds in order, and memory by speed.
fn mixed_cluster(text: &str, speeds: &[f64], memory: impl Fn(f64) -> u64) -> Cluster {
    let mut classes: Vec<DeviceClass> = Vec::new();
    for &speed in speeds {
        let mut device = find("h100").unwrap().device();
        device.memory = Bytes(memory(speed));
        match classes.last_mut() {
            Some(last) if last.speed == Some(speed) => last.count += 1,
            _ => classes.push(DeviceClass { device, count: 1, speed: Some(speed) }),
        }
    }
    Cluster { classes, ..levels(text).unwrap() }
}

fn small_problem(seed: u64) -> Problem {
    let mut random = Random(seed);
    let graph = random_graph(&mut random, 6);
    let (text, devices) =
        [("2:1GB/s", 2), ("3:1GB/s", 3), ("4:0.5GB/s", 4), ("2:10GB/s,2:1GB/s", 4)][random.below(4) as usize];
    let slow_speed = [0.25, 0.5, 0.8][random.below(3) as usize];
    let mut speeds: Vec<f64> = (0..devices).map(|_| [1.0, slow_speed][random.below(2) as usize]).collect();
    (speeds[0], speeds[devices - 1]) = (1.0, slow_speed);
    // In some cases slow devices cannot hold the whole model.
    let slow_bytes = if random.below(3) == 0 { 2_000_000 + random.below(6_000_000) } else { 1 << 40 };
    let cluster = mixed_cluster(text, &speeds, |speed| if speed == 1.0 { 1 << 40 } else { slow_bytes });
    let mut problem = Problem::new(graph, cluster, CostModel::Pipec);
    use Schedule::{Gpipe, Inference, OneFOneB, OneFOneBRr, TwoBw};
    problem.schedule =
        [OneFOneBRr, OneFOneBRr, OneFOneBRr, OneFOneB, Gpipe, TwoBw, Inference][random.below(7) as usize];
    problem.microbatches = if matches!(problem.schedule, OneFOneB | Gpipe | TwoBw) { 4 } else { 1 };
    problem.optimizer_state = random.below(3) as f64;
    problem
}

#[test]
fn plans_on_two_classes_tie_the_search_through_everything() {
    let (mut compared, mut suboptimal) = (0, Vec::new());
    for seed in 0..400 {
        let problem = small_problem(110_000 + seed);
        let best_us = match plan_with(&problem, Partitioner::Exhaustive) {
            Ok(best_us) => us(&best_us),
            // Too large for exhaustive search, or infeasible; then others find nothing either.
            Err(PlanError::Problem(_)) => continue,
            Err(_) => {
                assert!(plan_with(&problem, Partitioner::Pipec).is_err(), "seed {seed}");
                continue;
            }
        };
        compared += 1;
        let planned = plan_with(&problem, Partitioner::Pipec).unwrap();
        let bound = planned.plan.lower_bound_us;
        assert!(bound <= best_us * (1.0 + 1e-9), "seed {seed}: bound {bound} above the optimum {best_us}");
        assert!(us(&planned) >= best_us * (1.0 - 1e-9), "seed {seed}: {} beats everything, {best_us}", us(&planned));
        if !are_equal(us(&planned), best_us) {
            suboptimal.push((seed, us(&planned) / best_us));
        }
    }
    println!("{} of {compared} missed: {suboptimal:?}", suboptimal.len());
    assert!(compared > 300 && suboptimal.len() * 100 <= compared, "{compared}: {suboptimal:?}");
}

#[test]
fn infeasible_memory_needs_no_search() {
    let mut infeasible = 0;
    for seed in 0..24u64 {
        let mut random = Random(120_000 + seed);
        let cost = [CostModel::Pipec, CostModel::Pipec, CostModel::Paper][seed as usize % 3];
        let mut problem = Problem::new(random_graph(&mut random, 10), levels("6:1GB/s").unwrap(), cost);
        problem.schedule = [Schedule::ZbH1, Schedule::ZbH2, Schedule::OneFOneBRr][seed as usize / 3 % 3];
        problem.microbatches = 8;
        problem.optimizer_state = 2.0;
        problem.constraints.no_replication = seed % 2 == 0 && cost == CostModel::Pipec;
        problem.memory_limit = Some(Bytes(1000));
        let error = plan_with(&problem, Partitioner::Pipec).unwrap_err();
        assert!(matches!(error, PlanError::Infeasible { .. }), "seed {seed}: {error}");
        for partitioner in [Partitioner::Milp, Partitioner::Exhaustive] {
            let clock = Instant::now();
            assert_eq!(plan_with(&problem, partitioner).unwrap_err(), error, "seed {seed}: {partitioner:?}");
            assert!(clock.elapsed().as_secs() < 5, "seed {seed}: {partitioner:?} took {:?}", clock.elapsed());
        }
        // One byte less than an exact minimum is infeasible.
        let PlanError::Infeasible { smallest_limit, .. } = error else { continue };
        problem.memory_limit = Some(Bytes(smallest_limit));
        for partitioner in [Partitioner::Pipec, Partitioner::Milp] {
            assert!(plan_with(&problem, partitioner).is_ok(), "seed {seed}: {partitioner:?} with {smallest_limit}");
        }
        infeasible += 1;
    }
    assert_eq!(infeasible, 24);
}

/// Sets the memory of devices of class `class` and equal ones.
fn set_class_memory(problem: &mut Problem, class: u32, bytes: u64) {
    let reference = problem.cluster.classes[class as usize].clone();
    let is_alike =
        |candidate: &&mut DeviceClass| candidate.speed == reference.speed && candidate.device == reference.device;
    problem.cluster.classes.iter_mut().filter(is_alike).for_each(|candidate| candidate.device.memory = Bytes(bytes));
}

/// A reported requirement is exact: `bytes` is feasible, 1 % less is not, and on one level one byte less is not.
fn check_requirement(name: &str, bytes: u64, is_flat: bool, problem_with: impl Fn(u64) -> Problem) {
    let result = plan_with(&problem_with(bytes), Partitioner::Pipec);
    assert!(result.is_ok(), "{name}: {bytes} are said to do: {:?}", result.err());
    // On several levels, stages may be placed where no search looks.
    let partitioners = [Partitioner::Pipec, Partitioner::Exhaustive];
    for partitioner in partitioners.into_iter().take(1 + usize::from(is_flat)) {
        let smaller = if is_flat { bytes - 1 } else { bytes - bytes.div_ceil(100) };
        match plan_with(&problem_with(smaller), partitioner) {
            Err(PlanError::Infeasible { .. } | PlanError::DeviceMemory(_)) => {}
            // Too large for exhaustive search.
            Err(PlanError::Problem(ProblemError::TooLarge { .. })) => {}
            result_of_smaller => panic!("{name}: {smaller} of {bytes} do: {partitioner:?} {result_of_smaller:?}"),
        }
    }
}

#[test]
fn infeasible_plans_report_the_smallest_feasible_setting() {
    let (mut limits, mut classes, mut all_classes) = (0, 0, 0);
    for seed in 0..300 {
        let mut random = Random(130_000 + seed);
        let mut problem = small_problem(140_000 + seed);
        let is_flat = problem.cluster.levels.len() == 1;
        for class in &mut problem.cluster.classes {
            let fast = class.speed == Some(1.0);
            class.device.memory = Bytes(if fast { 2_000_000 + seed * 40_000 } else { 1_000_000 + seed * 20_000 });
        }
        problem.memory_limit = (random.below(2) == 0).then(|| Bytes(500_000 + random.below(3_000_000)));
        problem.recompute = if random.below(2) == 0 { Recomputation::Auto } else { Recomputation::Never };
        if random.below(4) == 0 {
            problem.constraints.replicas = Some(vec![1; 2]);
        }
        let name = format!("seed {seed}");
        match plan_with(&problem, Partitioner::Pipec) {
            Ok(_) | Err(PlanError::Problem(_)) => continue,
            Err(PlanError::Infeasible { limit, missing, smallest_limit, .. }) => {
                limits += 1;
                assert_eq!((Some(Bytes(limit)), limit + missing), (problem.memory_limit, smallest_limit), "{name}");
                check_requirement(&name, smallest_limit, is_flat, |bytes| {
                    let mut problem = problem.clone();
                    problem.memory_limit = Some(Bytes(bytes));
                    problem
                });
            }
            Err(PlanError::DeviceMemory(shortage)) => {
                assert_eq!(shortage.smallest, shortage.memory + shortage.missing, "{name}");
                // No limit helps.
                let mut unlimited = problem.clone();
                unlimited.memory_limit = None;
                assert!(matches!(plan_with(&unlimited, Partitioner::Pipec), Err(PlanError::DeviceMemory(_))), "{name}");
                let Some(class) = shortage.class else {
                    all_classes += 1;
                    continue;
                };
                classes += 1;
                assert_eq!(problem.cluster.classes[class as usize].device.memory, Bytes(shortage.memory), "{name}");
                check_requirement(&name, shortage.smallest, is_flat, |bytes| {
                    let mut problem = problem.clone();
                    set_class_memory(&mut problem, class, bytes);
                    problem.memory_limit = shortage.limit.map(Bytes).or(problem.memory_limit);
                    problem
                });
            }
            Err(error) => panic!("{name}: {error}"),
        }
    }
    println!("{limits} lack a limit, {classes} a class, {all_classes} several");
    assert!(limits > 20 && classes > 20, "{limits} lack a limit, {classes} a class, {all_classes} several");
}

fn published(name: &str) -> Option<compiler::profile::cost_graph::CostGraph> {
    let root =
        std::env::var("PIPEC_DATA").unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../shared/data").into());
    let text = std::fs::read_to_string(format!("{root}/partition/pipedream/profiles/{name}.graph.txt")).ok()?;
    Some(pipedream::read(&text).unwrap())
}

#[test]
fn published_profiles_on_two_classes_gain_by_the_order_and_take_no_longer_than_three_plans() {
    for name in ["gnmt", "vgg16", "inception_v3"] {
        for (text, fast, slow) in [("8:1.25GB/s", 4, 4), ("16:1.25GB/s", 10, 6), ("4:10GB/s,4:1.25GB/s", 6, 10)] {
            let Some(graph) = published(name) else { return println!("skipped: no shared data") };
            let uniform = Problem::new(graph.clone(), levels(text).unwrap(), CostModel::Pipec);
            let clock = Instant::now();
            let uniform_plan = plan_with(&uniform, Partitioner::Pipec).unwrap();
            let uniform_time = clock.elapsed();
            let speeds = [vec![1.0; fast], vec![0.4; slow]].concat();
            let problem = Problem::new(graph, mixed_cluster(text, &speeds, |_| 1 << 40), CostModel::Pipec);
            let clock = Instant::now();
            let planned = plan_with(&problem, Partitioner::Pipec).unwrap();
            let time = clock.elapsed();
            println!(
                "{name} on {text}: {:.1} us, bound {:.1}, alike {:.1}; {time:?} and {uniform_time:?}, {:.2}; {:?}; {:?} {:?}",
                us(&planned),
                planned.plan.lower_bound_us,
                us(&uniform_plan),
                time.as_secs_f64() / uniform_time.as_secs_f64(),
                planned.plan.stages.iter().map(|stage| stage.replicas).collect::<Vec<_>>(),
                planned.plan.search,
                planned.plan.warnings
            );
        }
    }
}
