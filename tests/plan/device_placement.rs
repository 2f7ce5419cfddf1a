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
    let (mut any, mut ordered) = (f64::INFINITY, f64::INFINITY);
    'all: for number in 0..u64::from(devices).pow(nodes as u32) {
        let device_of: Vec<u32> =
            (0..nodes as u32).map(|node| (number / u64::from(devices).pow(node) % u64::from(devices)) as u32).collect();
        let mut bytes = vec![0.0; devices as usize];
        for (a, &device) in placement.nodes.iter().zip(&device_of) {
            bytes[device as usize] += if placement.is_host(device) { 0.0 } else { a.bytes };
            let apart = |b: &Node, other: u32| a.colour.is_some() && a.colour == b.colour && device != other;
            if placement.nodes.iter().zip(&device_of).any(|(b, &other)| apart(b, other)) {
                continue 'all;
            }
        }
        if bytes.iter().any(|&bytes| bytes > placement.bytes_per_device) {
            continue;
        }
        let worst = placement.loads(&device_of, devices as usize).into_iter().fold(0.0, f64::max);
        any = any.min(worst);
        if is_ordered(placement, &device_of) {
            ordered = ordered.min(worst);
        }
    }
    (any, ordered)
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
    let (mut anywhere_best, mut fits) = (0, 0);
    for seed in 1..=400 {
        let placement = instance(&mut Random(seed * 7919));
        let (any, ordered) = exhaustive(&placement);
        let found = solve(&placement, &Request::default());
        let Ok(plan) = found else {
            assert!(matches!(found, Err(SolveError::Infeasible { .. })), "seed {seed}: {found:?}");
            assert!(ordered.is_infinite(), "seed {seed}: {ordered} was not found");
            continue;
        };
        fits += 1;
        assert_eq!(plan.predicted.minibatch_us, ordered, "seed {seed}");
        assert!(plan.proven_optimal && plan.lower_bound_us == ordered, "seed {seed}");
        let freely = solve(&placement, &Request { anywhere: true, ..Request::default() }).expect("it has a start");
        assert!(freely.predicted.minibatch_us >= any && freely.lower_bound_us <= any, "seed {seed}");
        assert!(freely.predicted.minibatch_us <= ordered, "seed {seed}");
        anywhere_best += u32::from(freely.predicted.minibatch_us == any);
    }
    assert!(fits > 200 && anywhere_best * 100 >= fits * 97, "{anywhere_best} of {fits}");
}

#[test]
fn pipelines_with_hosts_are_the_best_of_all() {
    let (mut on_hosts, mut anywhere_best, mut only) = (0, 0, 0);
    let runs = 400;
    for seed in 1..=runs {
        let placement = instance_with_hosts(&mut Random(seed * 7919));
        let (any, ordered) = exhaustive(&placement);
        let model = PlannedModel { ops: placement.nodes.len() as u64, ..PlannedModel::default() };
        let plan = solve(&placement, &Request { model, ..Request::default() }).expect("a host holds everything");
        assert_eq!(plan.predicted.minibatch_us, ordered, "seed {seed}");
        assert!(plan.proven_optimal && plan.lower_bound_us == ordered, "seed {seed}");
        assert!(placement.lower_bound() <= any * (1.0 + 1e-12), "seed {seed}");
        assert_eq!(sound(&plan), Ok(()), "seed {seed}");
        assert_eq!(figures(&plan), [], "seed {seed}");
        on_hosts += u32::from(plan.stages.iter().any(|stage| stage.devices[0] >= placement.devices));
        only += u32::from(placement.nodes.iter().any(|node| node.time.is_infinite()));
        let without = Placement { hosts: 0, ..placement.clone() };
        if !placement.nodes.iter().any(|node| node.time.is_infinite())
            && let Ok(without) = solve(&without, &Request::default())
        {
            assert!(without.predicted.minibatch_us >= ordered, "seed {seed}");
        }
        let freely = solve(&placement, &Request { anywhere: true, ..Request::default() }).unwrap();
        assert!(freely.predicted.minibatch_us >= any && freely.lower_bound_us <= any, "seed {seed}");
        assert!(freely.predicted.minibatch_us <= ordered, "seed {seed}");
        anywhere_best += u32::from(freely.predicted.minibatch_us == any);
    }
    assert!(on_hosts > 100 && only > 50, "{on_hosts} {only}");
    assert!(u64::from(anywhere_best) * 100 >= runs * 97, "{anywhere_best} of {runs}");
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
    let mut other = plan.clone();
    other.stages[1].devices = vec![1];
    other.stages[2].devices = vec![2];
    let faults = check(&placement, &other).unwrap_err();
    assert!(faults.iter().any(|fault| fault.to_string().contains("runs on hosts only")), "{faults:?}");
    assert!(check(&Placement { hosts: 0, ..placement }, &plan).is_err());
    // The plan's own figures: a host with too long a time.
    let mut other = plan;
    other.stages[1].fwd_us = 7.0;
    assert!(!figures(&other).is_empty());
}

#[test]
fn the_smallest_limit_does_and_less_does_not() {
    let mut refused = 0;
    for seed in 1..=200 {
        let mut placement = instance(&mut Random(seed * 104_729));
        placement.bytes_per_device = 3.0;
        let Err(SolveError::Infeasible { smallest, .. }) = solve(&placement, &Request::default()) else { continue };
        refused += 1;
        placement.bytes_per_device = smallest as f64;
        assert!(solve(&placement, &Request::default()).is_ok(), "seed {seed}");
        placement.bytes_per_device = smallest as f64 - 1.0;
        assert!(solve(&placement, &Request::default()).is_err(), "seed {seed}");
    }
    assert!(refused > 50, "{refused}");
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
        let found = plan.predicted.minibatch_us;
        println!("{name}: {found}, published {load}, proven {}", plan.proven_optimal);
        // The published figures have six digits.
        assert!((found - load).abs() <= load * 5e-6, "{name}: {found}, {load} is published");
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
