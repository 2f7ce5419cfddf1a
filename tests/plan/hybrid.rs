//! Stages with replicas, tensor parallelism and choices: against exhaustive search on tiny instances, and a published
//! one.

use crate::support::problems::Random;
#[allow(dead_code)] // Other tests use the rest.
use instances::piper::check::check;
use instances::piper::model::{Choice, Hybrid, Layer, Link};
use instances::piper::read::read;
use instances::piper::solve::{Request, SolveError, solve};
use std::path::PathBuf;

/// Up to five layers; some without weights, some with a two-device variant, some with recomputation.
fn instance(random: &mut Random) -> Hybrid {
    let count = 1 + random.below(5) as usize;
    let syncs = random.below(3) == 0;
    let mut links = Vec::new();
    for to in 0..count {
        for from in 0..to {
            if random.below(2) == 0 {
                let bytes = random.below(3) * random.below(20);
                links.push(Link { from: from as u32, to: to as u32, bytes: bytes as f64 });
            }
        }
    }
    let mut layers: Vec<Layer> = Vec::new();
    for at in 0..count as u32 {
        let touching: Vec<u32> = (0..links.len() as u32)
            .filter(|&link| [links[link as usize].from, links[link as usize].to].contains(&at))
            .collect();
        let is_light = random.below(5) == 0;
        let mut choice = |name: &str, parts: u64| {
            let mut number = |below: u64| if is_light { 0.0 } else { random.below(below) as f64 / parts as f64 };
            let (time, weight_bytes, bytes_in_flight, bytes_standing) = (number(40), number(60), number(9), number(20));
            let sync = touching.iter().map(|_| if syncs { random.below(6) as f64 } else { 0.0 }).collect();
            let (name, recomputes) = (name.to_string(), name == "recomp");
            Choice { name, time, weight_bytes, bytes_in_flight, bytes_standing, sync, recomputes }
        };
        let mut choices = vec![(1, vec![choice("plain", 1), choice("recomp", 1)])];
        choices.push((2, vec![choice("halves", 2)]));
        if at == 0 && count > 3 {
            choices.pop();
        }
        layers.push(Layer { name: format!("n{at}"), title: String::new(), choices, links: touching });
    }
    let (devices, microbatches) = (1 + random.below(4) as u32, [1, 2, 4, 6][random.below(4) as usize]);
    let bytes_per_device = 10.0 + random.below(90) as f64;
    Hybrid { layers, links, devices, microbatches, bandwidth: 1.0 + random.below(6) as f64, bytes_per_device }
}

/// The minimum time per sample over all stage assignments, replicas, degrees and layer choices.
fn exhaustive(hybrid: &Hybrid) -> f64 {
    let (count, mut best) = (hybrid.layers.len(), f64::INFINITY);
    for stages in 1..=count.min(hybrid.devices as usize) {
        for number in 0..stages.pow(count as u32) {
            let stage_of: Vec<usize> = (0..count as u32).map(|layer| number / stages.pow(layer) % stages).collect();
            let uses_all = (0..stages).all(|stage| stage_of.contains(&stage));
            let is_forward = hybrid.links.iter().all(|link| stage_of[link.from as usize] <= stage_of[link.to as usize]);
            if uses_all && is_forward {
                best = best.min(min_over_replicas(hybrid, &stage_of, stages));
            }
        }
    }
    best
}

fn min_over_replicas(hybrid: &Hybrid, stage_of: &[usize], stages: usize) -> f64 {
    let mut options = Vec::new();
    for replicas in 1..=hybrid.devices.min(hybrid.microbatches) {
        for degree in [1, 2] {
            if hybrid.microbatches.is_multiple_of(replicas) && replicas * degree <= hybrid.devices {
                options.push((replicas, degree));
            }
        }
    }
    let mut best = f64::INFINITY;
    for number in 0..options.len().pow(stages as u32) {
        let choices: Vec<(u32, u32)> =
            (0..stages as u32).map(|stage| options[number / options.len().pow(stage) % options.len()]).collect();
        let devices: u32 = choices.iter().map(|(replicas, degree)| replicas * degree).sum();
        let replicas: u32 = choices.iter().map(|(replicas, _)| replicas).sum();
        if devices > hybrid.devices || replicas > hybrid.microbatches {
            continue;
        }
        let time = |stage: usize| {
            let later_replicas: u32 = choices[stage..].iter().map(|(replicas, _)| replicas).sum();
            min_stage_time(hybrid, stage_of, stage, choices[stage], later_replicas.div_ceil(choices[stage].0))
        };
        best = best.min((0..stages).map(time).fold(0.0, f64::max));
    }
    best
}

/// The minimum time of one stage over its layers' choices.
fn min_stage_time(
    hybrid: &Hybrid,
    stage_of: &[usize],
    stage: usize,
    (replicas, degree): (u32, u32),
    in_flight: u32,
) -> f64 {
    let (d, mut sums) = (f64::from(replicas), vec![(0.0, 0.0)]);
    for (at, layer) in hybrid.layers.iter().enumerate().filter(|(at, _)| stage_of[*at] == stage) {
        let mut extended = Vec::new();
        for choice in layer.at(degree) {
            let mut bytes_moved = 0.0;
            for (&link, sync) in layer.links.iter().zip(&choice.sync) {
                let link = hybrid.links[link as usize];
                let neighbour = if link.from as usize == at { link.to } else { link.from };
                bytes_moved += if stage_of[neighbour as usize] == stage { 0.0 } else { link.bytes + sync };
            }
            let all_reduce_time = 4.0 * (d - 1.0) / d * choice.weight_bytes / f64::from(hybrid.microbatches);
            let time = (choice.time + 2.0 * bytes_moved / hybrid.bandwidth) / d + all_reduce_time / hybrid.bandwidth;
            let bytes = choice.bytes_in_flight * f64::from(in_flight) + choice.bytes_standing;
            extended.extend(sums.iter().map(|&(total_time, total_bytes)| (total_time + time, total_bytes + bytes)));
        }
        sums = extended;
    }
    let feasible = sums.into_iter().filter(|(_, total_bytes)| *total_bytes <= hybrid.bytes_per_device);
    feasible.map(|(total_time, _)| total_time).fold(f64::INFINITY, f64::min)
}

#[test]
fn nothing_is_better_than_what_is_found() {
    let (mut feasible, mut infeasible, mut with_degrees, mut recomputed) = (0, 0, 0, 0);
    for seed in 1..=1500 {
        let hybrid = instance(&mut Random(seed * 7919));
        let best = exhaustive(&hybrid);
        let result = solve(&hybrid, &Request::default());
        let Ok(plan) = result else {
            let expected = matches!(result, Err(SolveError::Memory { .. } | SolveError::Devices { .. }));
            assert!(expected && best.is_infinite(), "seed {seed}: {result:?}, {best}");
            infeasible += 1;
            continue;
        };
        feasible += 1;
        with_degrees += u32::from(plan.stages.iter().any(|stage| stage.tensor_degree == Some(2)));
        recomputed += u32::from(plan.stages.iter().any(|stage| stage.recompute));
        let time = plan.predicted.minibatch_us;
        assert!((time - best).abs() <= 2e-9 * best, "seed {seed}: {time}, {best} is possible");
        assert!(plan.proven_optimal, "seed {seed}");
        assert!(hybrid.lower_bound() <= best * (1.0 + 1e-12), "seed {seed}");
    }
    assert!(
        feasible > 700 && infeasible > 100 && with_degrees > 200 && recomputed > 100,
        "{feasible} {infeasible} {with_degrees} {recomputed}"
    );
}

#[test]
fn the_smallest_limit_does() {
    let mut infeasible = 0;
    for seed in 1..=300 {
        let mut hybrid = instance(&mut Random(seed * 104_729));
        hybrid.bytes_per_device = 3.0;
        let Err(SolveError::Memory { smallest, .. }) = solve(&hybrid, &Request::default()) else { continue };
        infeasible += 1;
        hybrid.bytes_per_device = smallest as f64;
        assert!(solve(&hybrid, &Request::default()).is_ok(), "seed {seed}");
    }
    assert!(infeasible > 50, "{infeasible}");
}

#[test]
fn without_all_sets_a_warning_says_so() {
    let mut warned = 0;
    for seed in 1..=200 {
        let hybrid = instance(&mut Random(seed * 7919));
        let request = Request { budget: Some(2), ..Request::default() };
        let Ok(plan) = solve(&hybrid, &request) else { continue };
        assert_eq!(plan.warnings.is_empty(), plan.proven_optimal, "seed {seed}");
        assert!(plan.lower_bound_us <= exhaustive(&hybrid) * (1.0 + 1e-9), "seed {seed}");
        warned += u32::from(!plan.proven_optimal);
    }
    assert!(warned > 50, "{warned}");
}

#[test]
fn the_judge_finds_what_is_wrong() {
    let hybrid = instance(&mut Random(3 * 7919));
    let plan = solve(&hybrid, &Request::default()).unwrap();
    assert_eq!(check(&hybrid, &plan), Ok(plan.predicted.minibatch_us));
    let mut changed = plan.clone();
    changed.predicted.minibatch_us *= 1.01;
    assert!(check(&hybrid, &changed).is_err());
    let mut changed = plan.clone();
    changed.stages[0].choices[0] = "unheard of".to_string();
    assert!(check(&hybrid, &changed).is_err());
    let mut changed = plan.clone();
    changed.stages[0].replicas += 1;
    assert!(check(&hybrid, &changed).is_err());
    let mut changed = plan;
    changed.stages[0].ops.clear();
    assert!(check(&hybrid, &changed).is_err());
}

#[test]
fn more_microbatches_than_devices_are_planned() {
    let file = FILE.replace("\"mbsInBatch\": 8", "\"mbsInBatch\": 100000");
    let hybrid = read(&file).unwrap();
    let plan = solve(&hybrid, &Request::default()).unwrap();
    assert_eq!((plan.schedule.microbatches, plan.proven_optimal), (100_000, true));
    let (time, best) = (plan.predicted.minibatch_us, exhaustive(&hybrid));
    assert!((time - best).abs() <= 2e-9 * best, "{time}, {best} is possible");
    assert_eq!(check(&hybrid, &plan), Ok(plan.predicted.minibatch_us));
}

/// A file of two layers for mutations.
const FILE: &str = r#"{"maxDevices": 4, "maxMemoryPerDevice": 90, "bandwidth": 10, "mbsInBatch": 8, "nodes": [
    {"id": 1, "TMPCs": {"1": [{"id": "vanilla", "timePerSample": 9, "parameterSize": 3, "memoryUsageA": 1, "memoryUsageB": 2,
     "syncTimeFw": {}, "syncTimeBw": {"2": 0}}], "2": [{"id": "halves", "timePerSample": 5, "parameterSize": 2,
     "memoryUsageA": 1, "memoryUsageB": 1, "syncTimeFw": {}, "syncTimeBw": {"2": 1}}]}},
    {"id": 2, "TMPCs": {"1": [{"id": "vanilla", "timePerSample": 4, "parameterSize": 8, "memoryUsageA": 1, "memoryUsageB": 0,
     "syncTimeFw": {"1": 0}, "syncTimeBw": {}}]}}], "edges": [{"sourceId": 1, "destId": 2, "communicationCost": 5}]}"#;

#[test]
fn mutated_files_are_refused_or_planned() {
    let mut planned = 0;
    for seed in 1..=20_000 {
        let mut random = Random(seed * 7919);
        let mut bytes = FILE.as_bytes().to_vec();
        for _ in 0..1 + random.below(3) {
            let at = random.below(bytes.len() as u64) as usize;
            match random.below(4) {
                0 => drop(bytes.remove(at)),
                1 => bytes[at] = b"0123456789eE.-{}[],:\""[random.below(21) as usize],
                2 => bytes.insert(at, b"0123456789"[random.below(10) as usize]),
                _ => bytes.truncate(bytes.len() - random.below(3) as usize),
            }
        }
        let Ok(text) = String::from_utf8(bytes) else { continue };
        let Ok(hybrid) = read(&text) else { continue };
        match solve(&hybrid, &Request::default()) {
            Ok(plan) => {
                check(&hybrid, &plan).unwrap();
                planned += 1;
            }
            Err(error) => assert!(!matches!(error, SolveError::Unsound(_)), "{error}: {text}"),
        }
    }
    assert!(planned > 1000, "{planned}");
}

/// A published instance, if the shared data is there.
fn published(name: &str) -> Option<Hybrid> {
    let data = std::env::var_os("PIPEC_DATA").map_or_else(|| PathBuf::from("../shared/data"), PathBuf::from);
    let file = data.join(format!("partition/piper/{name}.json"));
    if !file.exists() {
        println!("skipped: no shared data");
        return None;
    }
    Some(read(&std::fs::read_to_string(file).unwrap()).unwrap())
}

#[test]
fn a_published_network_of_many_layers_is_planned_within_little_memory() {
    let Some(published) = published("piper-resnet-32x4gib") else { return };
    // The times of Piper's own plans, rounded up.
    for (devices, piper_us) in [(32, 17.6), (64, 8.67)] {
        let hybrid = Hybrid { devices, ..published.clone() };
        let plan = solve(&hybrid, &Request::default()).unwrap();
        assert!(plan.proven_optimal && plan.predicted.minibatch_us <= piper_us, "{devices}: {:?}", plan.predicted);
        check(&hybrid, &plan).unwrap();
    }
}

#[test]
fn the_published_instance_at_any_size() {
    let Some(published) = published("gnmt") else { return };
    assert_eq!((published.layers.len(), published.devices, published.microbatches), (78, 10, 256));
    for devices in [1, 2, 4, 10, 16, 64, 256, 1024] {
        let hybrid = Hybrid { devices, ..published.clone() };
        let plan = solve(&hybrid, &Request::default()).unwrap();
        let (time, uniform) = (plan.predicted.minibatch_us, plan.baselines.uniform);
        println!("{devices} devices: {time}, proven {}, equal layers {uniform}", plan.proven_optimal);
        assert!(plan.proven_optimal, "{devices}");
        assert!(devices < 4 || time <= uniform / 1.2, "{devices}: {time}, {uniform}");
    }
}
