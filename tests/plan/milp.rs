//! MILP search against exhaustive search: it finds the optimum from a poor start for every supported cost model, and
//! its proofs hold.

use crate::support::problems::{Random, chain, random_graph, transformer};
#[allow(dead_code)] // Other tests use the rest.
use compiler::cluster::Bytes;
use compiler::cluster::read::{gpus, levels};
use compiler::cluster::unit::bandwidth;
use compiler::import::pipedream;
use compiler::partition::error::PlanError;
use compiler::partition::milp::solve::refine;
use compiler::partition::options::PlannerOptions;
use compiler::partition::partitioners::Partitioner;
use compiler::partition::planned::Planned;
use compiler::partition::planner::plan;
use compiler::partition::search::context::SearchContext;
use compiler::partition::search::fused_graph::FusedGraph;
use compiler::partition::search::result::SearchResult;
use compiler::plan::problem::{CostModel, Objective, Problem, ProblemError, Recomputation};
use compiler::plan::read::to_json;
use compiler::plan::schedule::Schedule;
use compiler::profile::arena::Live;
use compiler::profile::cost_graph::{CostGraph, OpId, ParamCost};
use std::time::{Duration, Instant};

fn plan_with(problem: &Problem, partitioner: Partitioner) -> Result<Planned, PlanError> {
    plan(problem, &PlannerOptions { partitioner, ..PlannerOptions::default() })
}

fn us(planned: &Planned) -> f64 {
    planned.plan.predicted.minibatch_us
}

/// Equal within the solver tolerance.
fn are_equal(left: f64, right: f64) -> bool {
    (left - right).abs() <= 1e-7 * left.max(right)
}

/// Up to eight ops with scratch, some of which share a parameter.
fn scratched_graph(random: &mut Random) -> CostGraph {
    let mut graph = random_graph(random, 8);
    for op in &mut graph.ops {
        op.workspace_bytes = random.below(300_000);
        (op.batched_grad_bytes, op.batched_grad_workspace_bytes) = (op.saved_bytes / 2, op.saved_bytes);
        op.unsaved = random.below(3) == 0;
        let bytes = op.saved_bytes / 2;
        op.live = Live::of((bytes, [op.out_bytes, bytes / 2]), (bytes / 2, [bytes / 5, bytes / 3]));
    }
    if random.below(3) == 0 {
        let last = graph.ops.len() as u32 - 1;
        graph.params.push(ParamCost::new("tied", 500_000, vec![OpId(0), OpId(last)]));
        graph.ops[0].param_bytes += 500_000;
    }
    graph
}

const CLUSTERS: [&str; 4] = ["2:1GB/s", "3:1GB/s", "4:0.2GB/s", "4:10GB/s"];

fn random_problem(seed: u64, cost: CostModel) -> Problem {
    let mut random = Random(seed);
    let graph = scratched_graph(&mut random);
    let cluster = levels(CLUSTERS[random.below(4) as usize]).unwrap();
    let mut problem = Problem::new(graph, cluster, cost);
    problem.optimizer_state = random.below(3) as f64;
    if random.below(2) == 0 {
        problem.activation_compression = Some(1.0);
    }
    problem
}

/// Part of the memory of the problem's slowest plan, so that only some plans fit.
fn set_limit(problem: &mut Problem, seed: u64) {
    let peak = |planned: Planned| planned.plan.stages.iter().map(|stage| stage.memory.total).max();
    let single = peak(plan_with(problem, Partitioner::Single).unwrap()).unwrap();
    problem.memory_limit = Some(Bytes(single * (6 + seed % 5) / 12));
}

/// MILP result, starting from a single device, which may not fit.
fn from_single(problem: &Problem, budget: Option<u64>, time_limit: Option<Duration>) -> SearchResult {
    let fused = FusedGraph::of(&problem.graph);
    let options = PlannerOptions { budget, time_limit, ..PlannerOptions::default() };
    let context = SearchContext::new(problem, problem, &fused, &options);
    let [single, ..] = context.baselines();
    refine(&context, SearchResult::of(single)).unwrap()
}

/// Checks a result against exhaustive search; returns whether it is proven. Programs whose terms are not linear may stay
/// undecided.
fn compare_with_exhaustive(problem: &Problem, message: &str) -> bool {
    let result = from_single(problem, Some(1_000_000), None);
    if result.fallback.is_some() {
        let best_us = plan_with(problem, Partitioner::Exhaustive).map_or(f64::INFINITY, |planned| us(&planned));
        assert!(result.proven_us.is_none() && result.bound_us <= best_us * (1.0 + 1e-7), "{message}: {best_us}");
        return false;
    }
    let fits = result.candidates.iter().filter(|candidate| candidate.fits);
    let best_us = fits.map(|candidate| candidate.minibatch_us).min_by(f64::total_cmp);
    match plan_with(problem, Partitioner::Exhaustive) {
        Ok(exhaustive) => {
            let (best_us, expected_us) = (best_us.unwrap_or(f64::INFINITY), us(&exhaustive));
            assert!(are_equal(best_us, expected_us), "{message}: milp {best_us}, everything {expected_us}");
            assert_eq!(result.proven_us, Some(best_us), "{message}");
        }
        Err(PlanError::Infeasible { .. }) => assert_eq!(best_us, None, "{message}"),
        Err(error) => panic!("{message}: {error}"),
    }
    true
}

#[test]
fn whole_group_costs_tie_the_exhaustive_search() {
    for seed in 0..120 {
        let cost = if seed % 2 == 0 { CostModel::Paper } else { CostModel::Pipedream };
        let mut problem = random_problem(70_000 + seed, cost);
        assert!(compare_with_exhaustive(&problem, &format!("seed {seed}")), "{seed}");
        if seed % 3 == 0 {
            set_limit(&mut problem, seed);
            assert!(compare_with_exhaustive(&problem, &format!("seed {seed}, within memory")), "{seed}");
        }
    }
}

#[test]
fn cost_pipec_ties_the_exhaustive_search_under_every_schedule() {
    use Schedule::{Gpipe, Inference, OneFOneB, OneFOneBRr, OneFOneBRrVsync, TwoBw};
    let schedules = [OneFOneBRr, OneFOneBRrVsync, TwoBw, OneFOneB, Gpipe, Inference];
    let mut proven = 0;
    for seed in 0..60 {
        let mut problem = random_problem(80_000 + seed, CostModel::Pipec);
        problem.schedule = schedules[seed as usize % 6];
        problem.microbatches = if matches!(problem.schedule, OneFOneB | Gpipe | TwoBw) { 8 } else { 1 };
        let is_latency = problem.schedule == Inference && seed % 4 == 1;
        problem.objective = if is_latency { Objective::Latency } else { Objective::Throughput };
        if seed % 4 == 0 {
            problem.cluster.levels[0].latency.0 = 40e-6;
        }
        proven += u32::from(compare_with_exhaustive(&problem, &format!("seed {seed}")));
    }
    assert!(proven >= 45, "{proven} of 60");
}

#[test]
fn cost_pipec_ties_the_exhaustive_search_within_memory() {
    let mut proven = 0;
    for seed in 0..24 {
        let mut problem = random_problem(90_000 + seed, CostModel::Pipec);
        problem.cluster = levels(["2:1GB/s", "3:1GB/s"][seed as usize % 2]).unwrap();
        problem.recompute = if seed % 4 < 3 { Recomputation::Auto } else { Recomputation::Never };
        set_limit(&mut problem, seed);
        proven += u32::from(compare_with_exhaustive(&problem, &format!("seed {seed}")));
    }
    assert!(proven >= 18, "{proven} of 24");
}

#[test]
fn constraints_are_obeyed_and_proven_plans_agree() {
    for seed in 0..40u64 {
        let mut problem = random_problem(100_000 + seed, CostModel::Pipec);
        let last = problem.graph.ops.len() as u32 - 1;
        match seed % 4 {
            0 => problem.constraints.pins = vec![("0".into(), 0), (last.to_string(), 1)],
            1 => problem.constraints.most_stages = Some(2),
            2 => problem.constraints.no_replication = true,
            _ => problem.constraints.replicas = Some(vec![1, 1]),
        }
        let (pipec, milp) = match (plan_with(&problem, Partitioner::Pipec), plan_with(&problem, Partitioner::Milp)) {
            (Ok(pipec), Ok(milp)) => (pipec, milp),
            (pipec, milp) => {
                assert_eq!(pipec.unwrap_err(), milp.unwrap_err(), "seed {seed}");
                continue;
            }
        };
        assert!(us(&milp) <= us(&pipec) * (1.0 + 1e-9), "seed {seed}");
        assert!(
            !pipec.plan.proven_optimal || are_equal(us(&pipec), us(&milp)),
            "seed {seed}: {} {}",
            us(&pipec),
            us(&milp)
        );
        assert!(milp.plan.proven_optimal, "seed {seed}: {:?}", milp.plan.search);
        assert_eq!(milp.plan.search.method, "milp");
        let stages = &milp.plan.stages;
        match seed % 4 {
            0 => assert!(stages[0].op_ids().any(|op| op == 0) && stages[1].op_ids().any(|op| op == last)),
            1 => assert!(stages.len() <= 2),
            2 => assert!(stages.iter().all(|stage| stage.replicas == 1)),
            _ => assert_eq!(stages.iter().map(|stage| stage.replicas).collect::<Vec<_>>(), [1, 1]),
        }
    }
}

#[test]
fn the_answer_is_never_worse_and_never_called_proven_when_the_budget_ends() {
    for (name, graph, cost) in [
        ("chain", chain(24), CostModel::Pipedream),
        ("transformer", transformer(40, 256, 512), CostModel::Paper),
        ("transformer", transformer(30, 256, 512), CostModel::Pipec),
    ] {
        let mut problem = Problem::new(graph, levels("4:10GB/s").unwrap(), cost);
        problem.activation_compression = Some(1.0);
        let pipec = plan_with(&problem, Partitioner::Pipec).unwrap();
        // A single device leaves much to find, and a budget of no nodes is too little to find it.
        let fused = FusedGraph::of(&problem.graph);
        let options = PlannerOptions { budget: Some(0), ..PlannerOptions::default() };
        let context = SearchContext::new(&problem, &problem, &fused, &options);
        let [single, ..] = context.baselines();
        let single_us = single.minibatch_us;
        let result = refine(&context, SearchResult::of(single)).unwrap();
        let best_us = result.candidates.iter().map(|candidate| candidate.minibatch_us).fold(f64::INFINITY, f64::min);
        println!(
            "{name}: {best_us} of {single_us}, {:?}, bound {}, {:?}",
            result.proven_us, result.bound_us, result.fallback
        );
        assert!(best_us <= single_us, "{name}");
        match result.proven_us {
            // The relaxation alone may suffice.
            Some(proven) => assert!(are_equal(proven, us(&pipec)), "{name}"),
            None => assert!(result.fallback.is_some_and(|why| why.contains("node budget")), "{name}"),
        }
        assert!(result.bound_us <= us(&pipec) * (1.0 + 1e-7), "{name}: {}", result.bound_us);
        let options = PlannerOptions { partitioner: Partitioner::Milp, budget: Some(50), ..PlannerOptions::default() };
        let milp = plan(&problem, &options).unwrap();
        assert!(us(&milp) <= us(&pipec) * (1.0 + 1e-9), "{name}");
        assert!(!pipec.plan.proven_optimal || are_equal(us(&pipec), us(&milp)), "{name}");
        let repeated = plan(&problem, &options).unwrap();
        assert_eq!(to_json(&milp.plan).unwrap(), to_json(&repeated.plan).unwrap(), "{name}");
    }
}

#[test]
fn no_time_at_all_is_said() {
    let problem = Problem::new(chain(20), levels("4:0.5GB/s").unwrap(), CostModel::Paper);
    let result = from_single(&problem, None, Some(Duration::ZERO));
    assert_eq!((result.proven_us, result.candidates.len()), (None, 1));
    assert!(result.fallback.unwrap().contains("time limit"));
}

#[test]
fn what_is_too_large_is_left_to_the_search_and_said() {
    let large = [
        ("ops", Problem::new(chain(300), levels("4:10GB/s").unwrap(), CostModel::Paper)),
        ("devices", Problem::new(chain(20), levels("32:10GB/s").unwrap(), CostModel::Pipedream)),
        ("levels", Problem::new(chain(9), levels("2:10GB/s,2:1GB/s").unwrap(), CostModel::Pipec)),
    ];
    for (word, problem) in large {
        let pipec = plan_with(&problem, Partitioner::Pipec).unwrap();
        let milp = plan_with(&problem, Partitioner::Milp).unwrap();
        assert_eq!(us(&milp), us(&pipec), "{word}");
        let why = milp.plan.search.fallback.clone().unwrap_or_default();
        assert!(why.contains("no integer program was solved") && why.contains(word), "{word}: {why}");
        assert!(milp.plan.proven_optimal || !milp.plan.warnings.is_empty());
    }
}

#[test]
fn a_clock_goes_with_milp_alone() {
    let problem = Problem::new(chain(4), gpus(2, Some(bandwidth("1GB/s").unwrap())).unwrap(), CostModel::Paper);
    let options = PlannerOptions { time_limit: Some(Duration::from_secs(9)), ..PlannerOptions::default() };
    let error = plan(&problem, &options).unwrap_err();
    assert!(matches!(error, PlanError::Problem(ProblemError::Unmet { .. })), "{error:?}");
}

#[test]
fn published_profiles_are_proven() {
    let data = std::env::var("PIPEC_DATA").unwrap_or("../shared/data".into());
    // Flat clusters of the PipeDream goldens, milliseconds per minibatch.
    for (name, devices, link_bandwidth, expected_ms) in
        [("vgg16", 4, "1.25GB/s", 176.349), ("alexnet", 4, "1.25GB/s", 32.461), ("gnmt", 4, "1.25GB/s", 25.868)]
    {
        let folder = format!("{data}/partition/pipedream/profiles");
        let Ok(text) = std::fs::read_to_string(format!("{folder}/{name}.graph.txt")) else {
            println!("skipped: no shared data");
            return;
        };
        let graph = pipedream::read(&text).unwrap();
        let cluster = gpus(devices, Some(bandwidth(link_bandwidth).unwrap())).unwrap();
        let mut problem = Problem::new(graph, cluster, CostModel::Pipedream);
        problem.activation_compression = Some(1.0);
        let clock = Instant::now();
        let milp = plan_with(&problem, Partitioner::Milp).unwrap();
        println!("{name} on {devices}: {:.3} ms, {:?}, {:?}", us(&milp) / 1e3, milp.plan.search, clock.elapsed());
        assert!((us(&milp) / 1e3 - expected_ms).abs() < 5e-4 * expected_ms, "{name}: {}", us(&milp));
        if name != "alexnet" {
            continue;
        }
        // With a memory limit, and with all or no stages recomputed, both find the same.
        problem.cost = CostModel::Pipec;
        problem.memory_limit = Some(Bytes(1_000_000_000));
        let (pipec, milp) =
            (plan_with(&problem, Partitioner::Pipec).unwrap(), plan_with(&problem, Partitioner::Milp).unwrap());
        println!("alexnet within 1 GB: {} and {} us, {:?}", us(&pipec), us(&milp), milp.plan.search);
        assert!(are_equal(us(&pipec), us(&milp)) && milp.plan.search.fallback.is_none());
    }
}
