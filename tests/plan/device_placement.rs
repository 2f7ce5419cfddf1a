//! Placement of graphs on devices without replication: against exhaustive search, and published instances.

use crate::support::problems::Random;
use crate::support::shared::data;
use compiler::plan::PlannedModel;
use compiler::plan::check::consistency::sound;
use compiler::plan::check::figures::figures;
use instances::placement::check::check;
use instances::placement::model::{Node, Placement};
use instances::placement::read::{read, read_with_hosts};
use instances::placement::solve::{Request, SolveError, solve};

/// Up to seven nodes; a third of the instances have a backward pass.
fn instance(random: &mut Random) -> Placement {
    let forward = 2 + random.below(5) as usize;
    let trains = random.below(3) == 0 && forward <= 3;
    let mut nodes: Vec<Node> = Vec::new();
    for at in 0..forward {
        let time = random.below(20) as f64;
        let (bytes, transfer) = (random.below(10) as f64, random.below(8) as f64);
        let readers = (at + 1..forward).filter(|_| random.below(3) == 0).map(|to| to as u32).collect();
        nodes.push(Node {
            name: at.to_string(),
            time,
            bytes,
            transfer,
            readers,
            colour: Some(at as u64),
            ..Node::default()
        });
    }
    if trains {
        for at in 0..forward {
            let readers: Vec<u32> = (0..at)
                .filter(|&to| nodes[to].readers.contains(&(at as u32)))
                .map(|to| (forward + to) as u32)
                .collect();
            let transfer = random.below(8) as f64;
            nodes.push(Node {
                name: format!("b{at}"),
                time: 1.0,
                transfer,
                readers,
                is_backward: true,
                ..nodes[at].clone()
            });
        }
    }
    let total: f64 = nodes.iter().map(|node| node.bytes).sum();
    Placement {
        nodes,
        devices: 1 + random.below(3) as u32,
        bytes_per_device: total * (0.4 + random.below(8) as f64 / 10.0),
        ..Placement::default()
    }
}

/// An instance with one or two hosts, up to four times slower than an accelerator; some nodes run on hosts only.
fn instance_with_hosts(random: &mut Random) -> Placement {
    let mut placement = instance(random);
    placement.hosts = 1 + random.below(2) as u32;
    placement.devices = placement.devices.min(2);
    for node in &mut placement.nodes {
        node.host_time = node.time * random.below(4) as f64 + random.below(4) as f64;
        if random.below(8) == 0 {
            node.time = f64::INFINITY;
        }
    }
    placement
}

/// The minimum load over all assignments, and over those whose devices can be ordered along all forward edges.
fn exhaustive(placement: &Placement) -> (f64, f64) {
    let (nodes, devices) = (placement.nodes.len(), placement.devices + placement.hosts);
    let (mut best_anywhere, mut best_ordered) = (f64::INFINITY, f64::INFINITY);
    'all: for number in 0..u64::from(devices).pow(nodes as u32) {
        let device_of: Vec<u32> =
            (0..nodes as u32).map(|node| (number / u64::from(devices).pow(node) % u64::from(devices)) as u32).collect();
        let mut bytes = vec![0.0; devices as usize];
        for (a, &device) in placement.nodes.iter().zip(&device_of) {
            bytes[device as usize] += if placement.is_host(device) { 0.0 } else { a.bytes };
            let are_separated =
                |b: &Node, other_device: u32| a.colour.is_some() && a.colour == b.colour && device != other_device;
            if placement.nodes.iter().zip(&device_of).any(|(b, &other_device)| are_separated(b, other_device)) {
                continue 'all;
            }
        }
        if bytes.iter().any(|&bytes| bytes > placement.bytes_per_device) {
            continue;
        }
        let max_load = placement.loads(&device_of, devices as usize).into_iter().fold(0.0, f64::max);
        best_anywhere = best_anywhere.min(max_load);
        if is_ordered(placement, &device_of) {
            best_ordered = best_ordered.min(max_load);
        }
    }
    (best_anywhere, best_ordered)
}

/// True if the forward edges between devices form no cycle.
fn is_ordered(placement: &Placement, device_of: &[u32]) -> bool {
    let devices = (placement.devices + placement.hosts) as usize;
    let mut reaches = vec![vec![false; devices]; devices];
    for (node, &from) in placement.nodes.iter().zip(device_of).filter(|(node, _)| !node.is_backward) {
        for &to in &node.readers {
            let to = device_of[to as usize];
            reaches[from as usize][to as usize] |= from != to;
        }
    }
    for through in 0..devices {
        for from in 0..devices {
            for to in 0..devices {
                reaches[from][to] |= reaches[from][through] && reaches[through][to];
            }
        }
    }
    (0..devices).all(|device| !reaches[device][device])
}

#[test]
fn contiguous_is_the_best_of_all_pipelines() {
    let (mut optimal_anywhere, mut feasible) = (0, 0);
    for seed in 1..=400 {
        let placement = instance(&mut Random(seed * 7919));
        let (best_anywhere, best_ordered) = exhaustive(&placement);
        let result = solve(&placement, &Request::default());
        let Ok(plan) = result else {
            assert!(matches!(result, Err(SolveError::Infeasible { .. })), "seed {seed}: {result:?}");
            assert!(best_ordered.is_infinite(), "seed {seed}: {best_ordered} was not found");
            continue;
        };
        feasible += 1;
        assert_eq!(plan.predicted.minibatch_us, best_ordered, "seed {seed}");
        assert!(plan.proven_optimal && plan.lower_bound_us == best_ordered, "seed {seed}");
        let noncontiguous =
            solve(&placement, &Request { anywhere: true, ..Request::default() }).expect("it has a start");
        assert!(
            noncontiguous.predicted.minibatch_us >= best_anywhere && noncontiguous.lower_bound_us <= best_anywhere,
            "seed {seed}"
        );
        assert!(noncontiguous.predicted.minibatch_us <= best_ordered, "seed {seed}");
        optimal_anywhere += u32::from(noncontiguous.predicted.minibatch_us == best_anywhere);
    }
    assert!(feasible > 200 && optimal_anywhere * 100 >= feasible * 97, "{optimal_anywhere} of {feasible}");
}

#[test]
fn pipelines_with_hosts_are_the_best_of_all() {
    let (mut on_hosts, mut optimal_anywhere, mut host_only) = (0, 0, 0);
    let runs = 400;
    for seed in 1..=runs {
        let placement = instance_with_hosts(&mut Random(seed * 7919));
        let (best_anywhere, best_ordered) = exhaustive(&placement);
        let model = PlannedModel { ops: placement.nodes.len() as u64, ..PlannedModel::default() };
        let plan = solve(&placement, &Request { model, ..Request::default() }).expect("a host holds everything");
        assert_eq!(plan.predicted.minibatch_us, best_ordered, "seed {seed}");
        assert!(plan.proven_optimal && plan.lower_bound_us == best_ordered, "seed {seed}");
        assert!(placement.lower_bound() <= best_anywhere * (1.0 + 1e-12), "seed {seed}");
        assert_eq!(sound(&plan), Ok(()), "seed {seed}");
        assert_eq!(figures(&plan), [], "seed {seed}");
        on_hosts += u32::from(plan.stages.iter().any(|stage| stage.devices[0] >= placement.devices));
        host_only += u32::from(placement.nodes.iter().any(|node| node.time.is_infinite()));
        let without_hosts = Placement { hosts: 0, ..placement.clone() };
        if !placement.nodes.iter().any(|node| node.time.is_infinite())
            && let Ok(without_hosts) = solve(&without_hosts, &Request::default())
        {
            assert!(without_hosts.predicted.minibatch_us >= best_ordered, "seed {seed}");
        }
        let noncontiguous = solve(&placement, &Request { anywhere: true, ..Request::default() }).unwrap();
        assert!(
            noncontiguous.predicted.minibatch_us >= best_anywhere && noncontiguous.lower_bound_us <= best_anywhere,
            "seed {seed}"
        );
        assert!(noncontiguous.predicted.minibatch_us <= best_ordered, "seed {seed}");
        optimal_anywhere += u32::from(noncontiguous.predicted.minibatch_us == best_anywhere);
    }
    assert!(on_hosts > 100 && host_only > 50, "{on_hosts} {host_only}");
    assert!(u64::from(optimal_anywhere) * 100 >= runs * 97, "{optimal_anywhere} of {runs}");
}

#[test]
fn the_checker_knows_hosts() {
    let node = |time: f64, host_time: f64, transfer: f64, readers: &[u32]| Node {
        time,
        host_time,
        transfer,
        bytes: 10.0,
        readers: readers.to_vec(),
        ..Node::default()
    };
    let nodes = vec![node(4.0, 40.0, 1.0, &[1]), node(f64::INFINITY, 6.0, 1.0, &[2]), node(4.0, 40.0, 0.0, &[])];
    let placement = Placement { nodes, devices: 2, hosts: 1, bytes_per_device: 10.0 };
    let plan = solve(&placement, &Request::default()).unwrap();
    // Each accelerator pays for one transfer, the host for none.
    assert_eq!(plan.predicted.minibatch_us, 6.0);
    assert_eq!(plan.stages.iter().map(|stage| stage.devices[0]).collect::<Vec<_>>(), [0, 2, 1]);
    assert_eq!(check(&placement, &plan), Ok(6.0));
    let mut changed = plan.clone();
    changed.stages[1].devices = vec![1];
    changed.stages[2].devices = vec![2];
    let faults = check(&placement, &changed).unwrap_err();
    assert!(faults.iter().any(|fault| fault.to_string().contains("runs on hosts only")), "{faults:?}");
    assert!(check(&Placement { hosts: 0, ..placement }, &plan).is_err());
    // The plan's own figures: a host with too long a time.
    let mut changed = plan;
    changed.stages[1].fwd_us = 7.0;
    assert!(!figures(&changed).is_empty());
}

#[test]
fn the_smallest_limit_does_and_less_does_not() {
    let mut infeasible = 0;
    for seed in 1..=200 {
        let mut placement = instance(&mut Random(seed * 104_729));
        placement.bytes_per_device = 3.0;
        let Err(SolveError::Infeasible { smallest, .. }) = solve(&placement, &Request::default()) else { continue };
        infeasible += 1;
        placement.bytes_per_device = smallest as f64;
        assert!(solve(&placement, &Request::default()).is_ok(), "seed {seed}");
        placement.bytes_per_device = smallest as f64 - 1.0;
        assert!(solve(&placement, &Request::default()).is_err(), "seed {seed}");
    }
    assert!(infeasible > 50, "{infeasible}");
}

/// Proven by search over all closed sets. A lower published optimum also uses a CPU.
const CONTIGUOUS: [(&str, f64); 8] = [
    ("LayerGraphs/bert24_inference", 17.7899),
    ("LayerGraphs/bert24_training", 41.7458),
    ("LayerGraphs/resnet50_inference", 34.2229),
    ("LayerGraphs/resnet50_training", 80.4549),
    ("OperatorGraphs/bert_l-3_inference", 27.9186),
    ("OperatorGraphs/bert_l-3_training", 65.3031),
    ("OperatorGraphs/bert_l-6_inference", 33.9891),
    ("OperatorGraphs/resnet50_inference", 128.0735),
];

/// Published optima of Tarnawski et al. with the one CPU of each file.
const WITH_CPU: [(&str, f64); 8] = [
    ("LayerGraphs/bert24_inference", 17.7899),
    ("LayerGraphs/bert24_training", 41.7458),
    ("LayerGraphs/resnet50_inference", 33.7747),
    ("LayerGraphs/resnet50_training", 78.6318),
    ("OperatorGraphs/bert_l-3_inference", 27.9186),
    ("OperatorGraphs/bert_l-3_training", 65.3031),
    ("OperatorGraphs/bert_l-6_inference", 29.5795),
    ("OperatorGraphs/resnet50_inference", 124.349),
];

#[test]
fn published_instances_with_their_cpu() {
    let Some(folder) = data("partition/dnn-partitioning/throughput-inputs") else { return };
    for (name, load) in WITH_CPU {
        let text = std::fs::read_to_string(folder.join(format!("{name}.json"))).unwrap();
        let placement = read_with_hosts(&text).unwrap();
        let plan = solve(&placement, &Request::default()).unwrap();
        let minibatch_us = plan.predicted.minibatch_us;
        println!("{name}: {minibatch_us}, published {load}, proven {}", plan.proven_optimal);
        // The published figures have six digits.
        assert!((minibatch_us - load).abs() <= load * 5e-6, "{name}: {minibatch_us}, {load} is published");
        assert!(plan.proven_optimal, "{name}");
    }
}

#[test]
fn published_instances() {
    let Some(folder) = data("partition/dnn-partitioning/throughput-inputs") else { return };
    for (name, load) in CONTIGUOUS {
        let text = std::fs::read_to_string(folder.join(format!("{name}.json"))).unwrap();
        let placement = read(&text).unwrap();
        let plan = solve(&placement, &Request::default()).unwrap();
        assert!((plan.predicted.minibatch_us - load).abs() < 1e-4, "{name}: {}", plan.predicted.minibatch_us);
        assert!(plan.proven_optimal, "{name}");
        if name.ends_with("bert24_training") {
            let plan = solve(&placement, &Request { anywhere: true, ..Request::default() }).unwrap();
            assert!(plan.predicted.minibatch_us <= 39.944, "{}", plan.predicted.minibatch_us);
        }
    }
}
