//! Heterogeneous clusters: compared with all assignments, known optima, memory limits per class, and simulation.

mod random;

use compiler::cluster::device::find;
use compiler::cluster::read::{from_toml, levels};
use compiler::cluster::{Bytes, Cluster, DeviceClass};
use compiler::partition::error::PlanError;
use compiler::partition::options::PlannerOptions;
use compiler::partition::partitioners::Partitioner;
use compiler::partition::planned::Planned;
use compiler::partition::planner::plan;
use compiler::plan::Plan;
use compiler::plan::check::consistency::sound;
use compiler::plan::check::verify::check;
use compiler::plan::problem::{CostModel, InFlight, Objective, Problem, ProblemError};
use compiler::plan::schedule::Schedule;
use compiler::profile::cost_graph::{CostGraph, OpCost, OpId, ParamCost, TensorCost};
use compiler::schedule::generators::schedule;
use compiler::schedule::pipeline::{generated, pipeline};
use compiler::schedule::semantics::StepCount;
use compiler::simulate::run::{Machine, simulate};
use random::Random;

/// A cluster with classes of (count, speed, memory bytes).
fn mixed(text: &str, classes: &[(u32, f64, u64)]) -> Cluster {
    let class = |&(count, speed, memory): &(u32, f64, u64)| {
        let mut device = find("h100").unwrap().device();
        device.memory = Bytes(memory);
        DeviceClass { device, count, speed: Some(speed) }
    };
    Cluster { classes: classes.iter().map(class).collect(), ..levels(text).unwrap() }
}

/// A graph with the given op times (a third of each is forward) and edges; `bytes` gives all sizes.
fn graph(times: &[f64], edges: &[(u32, u32)], bytes: &mut dyn FnMut() -> u64) -> CostGraph {
    let mut graph = CostGraph::default();
    for (id, time) in times.iter().enumerate() {
        let (fwd_us, bwd_us) = (time / 3.0, time / 3.0 * 2.0);
        let (param_bytes, saved_bytes, out_bytes) = (bytes(), bytes(), bytes());
        graph.ops.push(OpCost {
            id: id as u32,
            name: format!("op{id}"),
            fwd_us,
            bwd_us,
            param_bytes,
            saved_bytes,
            out_bytes,
            ..OpCost::default()
        });
        let users = vec![OpId(id as u32)];
        graph.params.push(ParamCost::new(format!("w{id}"), param_bytes, users));
        let consumers = edges.iter().filter(|(from, _)| *from == id as u32).map(|(_, to)| OpId(*to)).collect();
        let (name, producer) = (format!("t{id}"), OpId(id as u32));
        graph.tensors.push(TensorCost { name, producer, bytes: out_bytes, consumers });
    }
    graph
}

fn chain(times: &[f64]) -> CostGraph {
    let edges: Vec<(u32, u32)> = (1..times.len() as u32).map(|to| (to - 1, to)).collect();
    graph(times, &edges, &mut || 0)
}

fn random_graph(random: &mut Random, max_ops: u64, most_bytes: u64) -> (CostGraph, Vec<(u32, u32)>) {
    let ops = 2 + random.below(max_ops - 1) as u32;
    let times: Vec<f64> = (0..ops).map(|_| 3.0 * random.below(400) as f64).collect();
    let mut edges = Vec::new();
    for to in 1..ops {
        for from in 0..to {
            if random.below(2) == 0 || (from + 1 == to && random.below(3) > 0) {
                edges.push((from, to));
            }
        }
    }
    (graph(&times, &edges, &mut || random.below(most_bytes)), edges)
}

fn with(problem: &Problem, partitioner: Partitioner) -> Result<Planned, PlanError> {
    plan(problem, &PlannerOptions { partitioner, ..PlannerOptions::default() })
}

fn checked_plan(problem: &Problem) -> Plan {
    let plan = with(problem, Partitioner::Pipec).unwrap().plan;
    check(problem, &plan).unwrap();
    sound(&plan).unwrap();
    plan
}

/// Minimum time over all device assignments, for a model without transfers and memory.
fn exhaustive(graph: &CostGraph, edges: &[(u32, u32)], speeds: &[f64]) -> f64 {
    fn best_rest(times: &[f64], edges: &[(u32, u32)], speeds: &[f64], assigned: u32, used: u32) -> f64 {
        let full_set = (1u32 << times.len()) - 1;
        if assigned == full_set {
            return 0.0;
        }
        let mut best = f64::INFINITY;
        for set in 1..=full_set {
            let next = assigned | set;
            let is_closed = edges.iter().all(|(from, to)| next >> to & 1 == 0 || next >> from & 1 == 1);
            if set & assigned != 0 || !is_closed {
                continue;
            }
            let work: f64 = (0..times.len()).filter(|op| set >> op & 1 == 1).map(|op| times[op]).sum();
            for devices in 1..1u32 << speeds.len() {
                if devices & used != 0 {
                    continue;
                }
                let group = (0..speeds.len()).filter(|device| devices >> device & 1 == 1);
                let slowest = group.map(|device| speeds[device]).fold(f64::INFINITY, f64::min);
                let stage_us = work / slowest / f64::from(devices.count_ones());
                if stage_us < best {
                    best = best.min(stage_us.max(best_rest(times, edges, speeds, next, used | devices)));
                }
            }
        }
        best
    }
    let times: Vec<f64> = graph.ops.iter().map(|op| op.fwd_us + op.bwd_us).collect();
    best_rest(&times, edges, speeds, 0, 0)
}

#[test]
fn no_assignment_of_devices_is_faster() {
    let mut stages = 0;
    for seed in 1..=120 {
        let mut random = Random(seed);
        let (graph, edges) = random_graph(&mut random, 5, 1);
        let classes: Vec<(u32, f64, u64)> = (0..1 + random.below(3))
            .map(|_| (1 + random.below(2) as u32, [0.5, 1.0, 2.0, 3.0][random.below(4) as usize], 1 << 40))
            .collect();
        let speeds: Vec<f64> =
            classes.iter().flat_map(|&(count, speed, _)| vec![speed; count as usize]).take(4).collect();
        let classes: Vec<(u32, f64, u64)> = speeds.iter().map(|&speed| (1, speed, 1 << 40)).collect();
        let cluster = mixed(&format!("{}:1GB/s", speeds.len()), &classes);
        let problem = Problem::new(graph, cluster, CostModel::Pipec);
        let best = exhaustive(&problem.graph, &edges, &speeds);
        let plan = checked_plan(&problem);
        let us = plan.predicted.minibatch_us;
        assert!((us - best).abs() <= 1e-9 * best, "seed {seed}: {us}, {best} is possible on {speeds:?}");
        assert!(plan.proven_optimal, "seed {seed}: bound {}", plan.lower_bound_us);
        stages += usize::from(plan.stages.len() > 1);
    }
    assert!(stages > 40, "{stages} are pipelines");
}

#[test]
fn nothing_beats_the_search_through_everything_and_the_planner_ties_it() {
    let (mut tied, mut compared, mut infeasible) = (0, 0, 0);
    for seed in 1..=120 {
        let mut random = Random(seed * 31);
        let (graph, _) = random_graph(&mut random, 5, 300_000);
        let memory = |random: &mut Random| 400_000 + random.below(4_000_000);
        let classes: Vec<(u32, f64, u64)> = (0..2 + random.below(2))
            .map(|_| (1 + random.below(2) as u32, [0.5, 1.0, 2.0][random.below(3) as usize], memory(&mut random)))
            .collect();
        let count: u32 = classes.iter().map(|class| class.0).sum();
        let (count, classes) = if count > 4 {
            (classes.len() as u32, classes.iter().map(|class| (1, class.1, class.2)).collect())
        } else {
            (count, classes)
        };
        let mut problem = Problem::new(graph, mixed(&format!("{count}:1GB/s"), &classes), CostModel::Pipec);
        match random.below(4) {
            0 => (problem.schedule, problem.microbatches) = (Schedule::OneFOneB, 1 + random.below(6) as u32),
            1 => (problem.schedule, problem.objective) = (Schedule::Inference, Objective::Latency),
            _ => {}
        }
        let best = match with(&problem, Partitioner::Exhaustive) {
            Ok(best) => best.plan,
            Err(PlanError::Infeasible { .. } | PlanError::DeviceMemory(_)) => {
                infeasible += 1;
                assert!(with(&problem, Partitioner::Pipec).is_err(), "seed {seed}");
                continue;
            }
            Err(baseline) => panic!("seed {seed}: {baseline}"),
        };
        check(&problem, &best).unwrap();
        compared += 1;
        let best_us = best.predicted.minibatch_us;
        let Ok(outcome) = with(&problem, Partitioner::Pipec) else { continue };
        let us = outcome.plan.predicted.minibatch_us;
        assert!(us >= best_us * (1.0 - 1e-9), "seed {seed}: {us} beats {best_us}");
        assert!(outcome.plan.lower_bound_us <= best_us * (1.0 + 1e-9), "seed {seed}: the bound is above {best_us}");
        tied += u32::from(us <= best_us * (1.0 + 1e-9));
        for partitioner in
            [Partitioner::Pipedream, Partitioner::DataParallel, Partitioner::Uniform, Partitioner::Single]
        {
            let Ok(baseline) = with(&problem, partitioner) else { continue };
            assert!(baseline.plan.lower_bound_us <= best_us * (1.0 + 1e-9), "seed {seed}: {partitioner:?}");
            assert!(baseline.plan.predicted.minibatch_us >= best_us * (1.0 - 1e-9), "seed {seed}: {partitioner:?}");
        }
    }
    println!("{tied} of {compared} tie the search through everything, {infeasible} do not fit");
    assert!(compared > 60 && tied * 100 >= compared * 95, "{tied} of {compared}");
}

#[test]
fn one_fast_device_among_slow_ones_stands_where_the_work_is() {
    let cluster = mixed("4:1GB/s", &[(1, 4.0, 1 << 40), (3, 1.0, 1 << 40)]);
    for heavy in 0..4usize {
        let mut times = [90.0; 4];
        times[heavy] = 360.0;
        let plan = checked_plan(&Problem::new(chain(&times), cluster.clone(), CostModel::Pipec));
        assert_eq!((plan.predicted.minibatch_us, plan.proven_optimal), (90.0, true), "{heavy}");
        assert_eq!(plan.stages[heavy].devices, [0], "{heavy}");
        assert_eq!(plan.stages[heavy].fwd_us, 30.0);
        // The plan's devices are cluster positions: swapping them makes another plan, which the checker rejects.
        let problem = Problem::new(chain(&times), cluster.clone(), CostModel::Pipec);
        let mut swapped = plan.clone();
        let elsewhere = (heavy + 1) % 4;
        let (here, there) = (plan.stages[heavy].devices.clone(), plan.stages[elsewhere].devices.clone());
        (swapped.stages[heavy].devices, swapped.stages[elsewhere].devices) = (there, here);
        assert!(check(&problem, &swapped).is_err(), "{heavy}");
    }
    // The fast device alone takes 630 / 4, all four at the slow pace also 630 / 4; the pipeline takes 90.
    let plan = checked_plan(&Problem::new(chain(&[360.0, 90.0, 90.0, 90.0]), cluster, CostModel::Pipec));
    assert_eq!((plan.baselines.single, plan.baselines.data_parallel), (157.5, 157.5));
}

#[test]
fn what_does_not_fit_on_the_small_class_goes_to_the_large() {
    let mut sizes = [100u64, 0, 0, 9000, 0, 0].into_iter();
    let graph = graph(&[60.0, 60.0], &[(0, 1)], &mut || sizes.next().unwrap());
    let mut problem = Problem::new(graph, mixed("2:1GB/s", &[(1, 1.0, 30_000), (1, 1.0, 1_000)]), CostModel::Pipec);
    let plan = checked_plan(&problem);
    assert_eq!(plan.stages.len(), 2);
    assert_eq!((&plan.stages[0].devices, &plan.stages[1].devices), (&vec![1], &vec![0]));
    let mut swapped = plan.clone();
    (swapped.stages[0].devices, swapped.stages[1].devices) = (vec![0], vec![1]);
    assert!(check(&problem, &swapped).is_err() && sound(&swapped).is_err());
    problem.cluster.classes[0].device.memory = Bytes(1_000);
    // Both classes hold 1,000 bytes, which is too little for either stage.
    let Err(PlanError::DeviceMemory(small)) = with(&problem, Partitioner::Pipec) else { panic!("it fits") };
    assert_eq!((small.class, small.memory, small.limit), (Some(0), 1_000, None));
    problem.cluster.classes.iter_mut().for_each(|class| class.device.memory = Bytes(small.smallest));
    assert_eq!(checked_plan(&problem).stages.iter().map(|stage| stage.memory.total).max(), Some(small.smallest));
}

#[test]
fn units_of_several_levels_change_places_whole() {
    for seed in 1..=30 {
        let mut random = Random(seed * 77);
        let (graph, _) = random_graph(&mut random, 6, 200_000);
        let cluster = mixed("2:10GB/s,2:1GB/s", &[(2, 1.0, 1 << 40), (1, 2.0, 1 << 40), (1, 0.5, 1 << 40)]);
        let problem = Problem::new(graph, cluster, CostModel::Pipec);
        let plan = checked_plan(&problem);
        assert!(plan.lower_bound_us <= plan.predicted.minibatch_us);
        let ideal_us: f64 = problem.graph.total_us() / 4.5;
        assert!(plan.lower_bound_us >= ideal_us * (1.0 - 1e-9), "seed {seed}");
    }
}

#[test]
fn simulation_goes_at_the_same_pace() {
    let cluster = mixed("4:1GB/s", &[(2, 2.0, 1 << 40), (2, 1.0, 1 << 40)]);
    let mut problem = Problem::new(chain(&[300.0, 120.0, 90.0, 210.0, 180.0]), cluster, CostModel::Pipec);
    problem.in_flight = InFlight::Given(vec![6; checked_plan(&problem).stages.len()]);
    let plan = checked_plan(&problem);
    let pipeline = pipeline(&plan).unwrap();
    let count = StepCount { minibatches: 200, microbatches: 1 };
    let program = schedule(generated(plan.schedule.kind).unwrap(), &pipeline, count).unwrap();
    let timeline = simulate(&program, &pipeline, &Machine::of(&pipeline)).unwrap();
    let step_us = timeline.makespan / 200.0;
    let us = plan.predicted.minibatch_us;
    assert!((step_us - us).abs() < 0.1 * us, "simulated {step_us}, predicted {us}");
}

#[test]
fn what_knows_no_classes_is_refused() {
    let cluster = mixed("2:1GB/s", &[(1, 1.0, 1 << 40), (1, 2.0, 1 << 40)]);
    for cost in [CostModel::Paper, CostModel::Pipedream] {
        let error = with(&Problem::new(chain(&[3.0, 3.0]), cluster.clone(), cost), Partitioner::Pipec).unwrap_err();
        assert_eq!(error.to_string(), "a cluster of several device classes requires cost `pipec`");
    }
    let mut problem = Problem::new(chain(&[3.0, 3.0]), cluster.clone(), CostModel::Pipec);
    problem.objective = Objective::Memory;
    assert!(matches!(with(&problem, Partitioner::Pipec), Err(PlanError::Problem(ProblemError::Mixed { .. }))));
    let file = "schema='pipec.cluster/1'\n[[device]]\nkind='h100'\ncount=1\n[[device]]\nkind='t4'\ncount=1\n\
                [[level]]\ncount=2\nbandwidth='1GB/s'\n";
    let problem = Problem::new(chain(&[3.0, 3.0]), from_toml(file).unwrap(), CostModel::Pipec);
    assert!(matches!(
        with(&problem, Partitioner::Pipec),
        Err(PlanError::Problem(ProblemError::NoSpeed { class: 0, .. }))
    ));
}
