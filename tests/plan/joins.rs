//! Planning of models with several inputs and outputs, ops that depend only on parameters, and unused ops.

use crate::support::problems::Random;
#[allow(dead_code)] // Other tests use the rest.
use compiler::cluster::Bytes;
use compiler::cluster::read::levels;
use compiler::graph::{Graph, Origin, Output};
use compiler::op::{Binary, Input, MatMul, Op, Parameter, Transpose, Unary, Value};
use compiler::partition::error::PlanError;
use compiler::partition::options::PlannerOptions;
use compiler::partition::partitioners::Partitioner;
use compiler::partition::planned::Planned;
use compiler::partition::planner::plan;
use compiler::pass::attribution::{Training, attribute};
use compiler::pass::costs::cost_graph;
use compiler::plan::check::error::PlanFault;
use compiler::plan::check::verify::check;
use compiler::plan::problem::{CostModel, InFlight, Problem, ProblemError};
use compiler::profile::arena::Live;
use compiler::profile::cost_graph::{CostGraph, OpCost, OpId, ParamCost, TensorCost};
use compiler::tensor::DType;
use compiler::tensor::fact::Fact;

fn plan_with(problem: &Problem, partitioner: Partitioner) -> Result<Planned, PlanError> {
    plan(problem, &PlannerOptions { partitioner, ..PlannerOptions::default() })
}

fn close(left: f64, right: f64) -> bool {
    (left - right).abs() <= 1e-9 * left.max(right)
}

/// Two inputs; `w`, transposed and negated, is read by two layers; one data result, one parameter result, one unused
/// op.
fn model() -> Graph {
    let mut graph = Graph::new("ways");
    let add = |graph: &mut Graph, op: Op, inputs: &[Value], source: &str| -> Value {
        let origin = Origin { source: source.into(), module: String::new() };
        Value { node: graph.add(op, inputs, &origin).unwrap(), output: 0 }
    };
    let fact = Fact::of(DType::F32, &[8, 8]);
    let input = |name: &str| Op::Input(Input { name: name.into(), fact: fact.clone() });
    let parameter = |name: &str| Op::Parameter(Parameter { name: name.into(), fact: fact.clone() });
    let matmul = || Op::MatMul(MatMul { transpose_a: false, transpose_b: false });
    let (left, right) = (add(&mut graph, input("left"), &[], ""), add(&mut graph, input("right"), &[], ""));
    let (w, v) = (add(&mut graph, parameter("w"), &[], ""), add(&mut graph, parameter("v"), &[], ""));
    let transposed = add(&mut graph, Op::Transpose(Transpose { perm: vec![1, 0] }), &[w], "turned");
    let negated = add(&mut graph, Op::Unary(Unary::Neg), &[transposed], "negated");
    let first = add(&mut graph, Op::Unary(Unary::Tanh), &[left], "first");
    let layer = add(&mut graph, matmul(), &[first, negated], "layer");
    let second = add(&mut graph, Op::Unary(Unary::Tanh), &[right], "other");
    let sum_of_layers = add(&mut graph, Op::Binary(Binary::Add), &[layer, second], "joint");
    let last = add(&mut graph, matmul(), &[sum_of_layers, transposed], "last");
    add(&mut graph, Op::Unary(Unary::Exp), &[sum_of_layers], "nobody");
    let norm = add(&mut graph, Op::Unary(Unary::Exp), &[v], "norm");
    for (name, value) in [("last", last), ("other", second), ("norm", norm)] {
        graph.outputs.push(Output { name: name.into(), value });
    }
    graph
}

fn costs(graph: &Graph) -> CostGraph {
    let mut costs = cost_graph(graph, &attribute(graph, Training::Gradient).unwrap());
    for (at, op) in costs.ops.iter_mut().enumerate() {
        (op.fwd_us, op.bwd_us) = (10.0 + at as f64, 20.0);
    }
    costs.check().unwrap();
    costs
}

fn joins(costs: &CostGraph) -> Vec<(&str, &str)> {
    let pairs = costs.ops.iter().filter_map(|op| Some((op, op.joins?)));
    let mut joins: Vec<_> = pairs.map(|(op, to)| (op.name.as_str(), costs.ops[to.index()].name.as_str())).collect();
    joins.sort_unstable();
    joins
}

#[test]
fn what_follows_from_parameters_joins_its_first_reader() {
    let costs = costs(&model());
    let last = costs.ops.iter().rev().find(|op| op.joins.is_none()).unwrap().name.as_str();
    let mut expected = vec![("negated", "layer"), ("norm", last), ("turned", "layer")];
    expected.sort_unstable();
    assert_eq!(joins(&costs), expected);
    let mut graph = Graph::new("no input");
    let fact = Fact::of(DType::F32, &[4]);
    let w = graph.add(Op::Parameter(Parameter { name: "w".into(), fact }), &[], &Origin::default()).unwrap();
    let y = graph.add(Op::Unary(Unary::Exp), &[Value { node: w, output: 0 }], &Origin::default()).unwrap();
    graph.outputs.push(Output { name: "y".into(), value: Value { node: y, output: 0 } });
    assert_eq!(joins(&self::costs(&graph)), []);
}

#[test]
fn several_ways_in_and_out_are_planned() {
    let graph = costs(&model());
    let ops = graph.ops.len();
    for cluster in ["1:1GB/s", "3:1GB/s", "2:10GB/s,2:1GB/s"] {
        for cost in [CostModel::Paper, CostModel::Pipedream] {
            let mut problem = Problem::new(graph.clone(), levels(cluster).unwrap(), cost);
            problem.activation_compression = Some(1.0);
            for partitioner in Partitioner::all() {
                let plan = plan_with(&problem, partitioner).unwrap().plan;
                let mut op_ids: Vec<u32> = plan.stages.iter().flat_map(|stage| stage.op_ids()).collect();
                op_ids.sort_unstable();
                assert_eq!(op_ids, (0..ops as u32).collect::<Vec<_>>(), "{cluster} {partitioner:?}");
                assert!(check(&problem, &plan).is_ok());
            }
        }
    }
}

#[test]
fn cuts_after_joins_are_reported() {
    let problem = |name: &str| {
        let mut problem = Problem::new(costs(&model()), levels("2:1GB/s").unwrap(), CostModel::Paper);
        problem.constraints.cut_after = Some(vec![name.to_string()]);
        problem
    };
    let plan = plan_with(&problem("negated"), Partitioner::Pipec).unwrap().plan;
    let first = &plan.stages[0].op_names;
    assert!(
        ["turned", "negated", "first", "layer"].iter().all(|name| first.iter().any(|op_name| op_name == name)),
        "{first:?}"
    );
    let negated_warning = plan.warnings.iter().find(|warning| warning.contains("negated")).unwrap();
    assert!(negated_warning.contains("fused with `layer`"), "{negated_warning}");
    let id = problem("").graph.ops.iter().position(|op| op.name == "negated").unwrap();
    assert_eq!(plan_with(&problem(&id.to_string()), Partitioner::Pipec).unwrap().plan.stages, plan.stages);
    let plan_without_join = plan_with(&problem("layer"), Partitioner::Pipec).unwrap().plan;
    assert!(plan_without_join.warnings.is_empty() && plan_without_join.stages == plan.stages);
    // The second stage also reads `turned`, which is sent there.
    assert!(plan.edges[0].tensors.iter().any(|tensor| tensor == "turned"));
    let error = plan_with(&problem("negatd"), Partitioner::Pipec).unwrap_err();
    assert!(
        matches!(&error, PlanError::Problem(ProblemError::UnknownName { .. })) && error.to_string().contains("negated")
    );
}

#[test]
fn the_judge_refuses_what_is_apart() {
    let mut problem = Problem::new(costs(&model()), levels("2:1GB/s").unwrap(), CostModel::Paper);
    problem.constraints.cut_after = Some(vec!["first".into()]);
    let plan = plan_with(&problem, Partitioner::Pipec).unwrap().plan;
    // The same plan for a model in which one of the first stage's ops is fused with one of the second's.
    let layer = problem.graph.ops.iter().position(|op| op.name == "layer").unwrap() as u32;
    let first = problem.graph.ops.iter().position(|op| op.name == "first").unwrap();
    problem.graph.ops[first].joins = Some(OpId(layer));
    let faults = check(&problem, &plan).unwrap_err();
    assert!(
        faults.iter().any(|fault| matches!(fault, PlanFault::Apart { op, with, .. } if *op == first && *with == layer))
    );
    assert!(faults[0].to_string().contains("must be in the same stage"), "{}", faults[0]);
}

/// `weights` parameter-only ops, then `data` data ops, which may read earlier ones of either kind.
fn random_graph(random: &mut Random, weights: u32, data: u32) -> CostGraph {
    let ops = weights + data;
    let mut readers: Vec<Vec<OpId>> = vec![Vec::new(); ops as usize];
    for to in 1..ops {
        for _ in 0..1 + random.below(2) {
            let from = random.below(u64::from(to)) as usize;
            if readers[from].last() != Some(&OpId(to)) {
                readers[from].push(OpId(to));
            }
        }
    }
    let mut joins: Vec<Option<OpId>> = vec![None; ops as usize];
    for op in (0..weights as usize).rev() {
        let first =
            readers[op].iter().filter_map(|to| if to.0 >= weights { Some(*to) } else { joins[to.index()] }).min();
        joins[op] = first.or(Some(OpId(ops - 1)));
    }
    let mut graph = CostGraph::default();
    for (id, consumers) in readers.into_iter().enumerate() {
        let (name, bytes, param) = (format!("op{id}"), random.below(400_000), random.below(100_000));
        graph.ops.push(OpCost {
            id: id as u32,
            name: name.clone(),
            fwd_us: random.below(1000) as f64,
            bwd_us: random.below(2000) as f64,
            param_bytes: param,
            saved_bytes: random.below(500_000),
            workspace_bytes: random.below(100_000),
            batched_grad_bytes: param / 2,
            batched_grad_workspace_bytes: param % 150_000,
            live: Live::of((bytes, [bytes / 3, param]), (bytes / 2, [param, bytes / 3])),
            out_bytes: bytes,
            joins: joins[id],
            ..OpCost::default()
        });
        graph.params.push(ParamCost::new(format!("w{id}"), param, vec![OpId(id as u32)]));
        graph.tensors.push(TensorCost { name, producer: OpId(id as u32), bytes, consumers });
    }
    graph
}

#[test]
fn every_plan_keeps_what_joins_together_and_none_beats_exhaustive() {
    for seed in 0..120 {
        let mut random = Random(seed);
        let (weights, data) = (1 + random.below(8) as u32, 2 + random.below(6) as u32);
        let graph = random_graph(&mut random, weights, data);
        let cluster = levels(["2:1GB/s", "3:1GB/s", "4:0.2GB/s"][seed as usize % 3]).unwrap();
        let cost = [CostModel::Paper, CostModel::Pipedream][seed as usize / 3 % 2];
        let mut problem = Problem::new(graph, cluster, cost);
        problem.activation_compression = (seed % 5 > 0).then_some(1.0);
        problem.in_flight = InFlight::Pipedream;
        let optimal = plan_with(&problem, Partitioner::Exhaustive).unwrap().plan;
        assert!(optimal.proven_optimal);
        for partitioner in Partitioner::all() {
            let plan = plan_with(&problem, partitioner).unwrap().plan;
            let (us, optimal_us) = (plan.predicted.minibatch_us, optimal.predicted.minibatch_us);
            assert!(us >= optimal_us * (1.0 - 1e-9), "seed {seed}: {partitioner:?} beats exhaustive");
            assert!(
                partitioner != Partitioner::Pipec || close(us, optimal_us),
                "seed {seed}: pipec {us}, least {optimal_us}"
            );
            assert!(plan.lower_bound_us <= optimal_us * (1.0 + 1e-9), "seed {seed}: {partitioner:?} bound");
            let stage_of = |op: u32| plan.stages.iter().position(|stage| stage.op_ids().any(|id| id == op));
            for op in problem.graph.ops.iter().filter(|op| op.joins.is_some()) {
                assert_eq!(stage_of(op.id), stage_of(op.joins.unwrap().0), "seed {seed}: {partitioner:?}");
            }
        }
        // The peak of the found plan as a memory limit is still feasible.
        let pipec_plan = plan_with(&problem, Partitioner::Pipec).unwrap().plan;
        let peak = pipec_plan.stages.iter().map(|stage| stage.memory.total).max().unwrap();
        problem.memory_limit = Some(Bytes(peak));
        let limited_plan = plan_with(&problem, Partitioner::Pipec).unwrap().plan;
        assert!(limited_plan.stages.iter().all(|stage| stage.memory.total <= peak), "seed {seed}");
    }
}
