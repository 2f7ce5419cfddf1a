//! Prepares a run: binds symbolic dimensions, attaches the loss, compiles stages, generates and checks the program.

use crate::comm::tensor_group::Layouts;
use crate::device::api::Device;
use crate::device::cpu::device::cpu;
use crate::exec::compile::{PassOptions, Recomputation, compile_with};
use crate::exec::compile_error::CompileError;
use crate::exec::stage_code::StageCode;
use crate::train::run::{placement, with_edges};
use compiler::graph::bind::{BindError, bind, symbols};
use compiler::graph::{Graph, order};
use compiler::op::NodeId;
use compiler::pass::batched_weight_grad::joins;
use compiler::pass::loss::{LOSS, Loss, LossError, SCALED_LOSS, attach, scaled};
use compiler::pass::minibatch_mean::{MinibatchMeans, by_minibatch};
use compiler::plan::schedule::Schedule;
use compiler::profile::recompute_scope;
use compiler::schedule::check::error::CheckError;
use compiler::schedule::check::verify::check;
use compiler::schedule::generators::schedule;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Pipeline, Program, ScheduleError, StageSpec};
use compiler::tensor::DType;
use compiler::tensor::dim::Bindings;
use compiler::tensor_parallel::cost::Machine;
use std::collections::HashMap;
use thiserror::Error;

#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum PrepareError {
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("dimension `{symbol}` has no size; give one with `--dim {symbol}=N`")]
    Open { symbol: String },
    #[error(transparent)]
    Loss(#[from] LossError),
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    #[error("bug in pipec: the generated program is not valid: {0}")]
    Program(CheckError),
    #[error("the plan has {planned} ops, the model has {found}; the plan may be for another model")]
    Ops { planned: usize, found: usize },
}

/// The loss, schedule and sizes of a run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Values of all symbolic dimensions; the batch dimension has the micro-batch size.
    pub dims: Bindings,
    pub loss: Loss,
    pub class_axis: Option<i64>,
    /// Means over labels are taken over the whole minibatch, by [`by_minibatch`].
    pub minibatch_means: bool,
    pub schedule: Schedule,
    /// Number of minibatches, and micro-batches per minibatch.
    pub count: StepCount,
}

impl Settings {
    /// Classes are found by shape, and means over labels are taken over micro-batches.
    pub fn new(dims: Bindings, loss: Loss, schedule: Schedule, count: StepCount) -> Settings {
        Settings { dims, loss, class_axis: None, minibatch_means: false, schedule, count }
    }
}

/// A compiled run.
pub struct Prepared {
    /// The graph with concrete shapes and its loss.
    pub graph: Graph,
    pub codes: Vec<StageCode>,
    /// The sharding of each parameter, with tensor parallelism.
    pub layouts: Layouts,
    pub program: Program,
    /// The pipeline that the program was generated for.
    pub pipeline: Pipeline,
    /// The means over labels that the loss takes over the whole minibatch.
    pub means: Option<MinibatchMeans>,
}

/// Prepares a run. `stages[i]` is the stage of op `i`; `pipeline` gives replicas, in-flight limits and times of the
/// stages.
pub fn prepare(
    graph: &Graph,
    stages: &[usize],
    pipeline: Pipeline,
    settings: &Settings,
) -> Result<Prepared, PrepareError> {
    prepare_shared(graph, stages, pipeline, settings, None)
}

/// Like [`prepare`], with stages that a group like `machine` shares.
pub fn prepare_shared(
    graph: &Graph,
    stages: &[usize],
    pipeline: Pipeline,
    settings: &Settings,
    machine: Option<&Machine>,
) -> Result<Prepared, PrepareError> {
    let generate = |pipeline: &Pipeline| schedule(settings.schedule, pipeline, settings.count);
    let splits = settings.schedule.splits_backward();
    prepare_with(graph, stages, pipeline, settings, RunTarget { device: &*cpu(), splits, program: &generate, machine })
}

/// What a run is compiled for.
#[derive(Clone, Copy)]
pub struct RunTarget<'a> {
    /// Makes the kernels.
    pub device: &'a dyn Device,
    /// True if any backward in the program is split.
    pub splits: bool,
    /// Generates the program for the pipeline with its edges.
    pub program: &'a dyn Fn(&Pipeline) -> Result<Program, ScheduleError>,
    /// The tensor-parallel group that shares every stage.
    pub machine: Option<&'a Machine>,
}

/// Like [`prepare`], for a target of the caller.
pub fn prepare_with(
    graph: &Graph,
    stages: &[usize],
    pipeline: Pipeline,
    settings: &Settings,
    RunTarget { device, splits, program, machine }: RunTarget<'_>,
) -> Result<Prepared, PrepareError> {
    let microbatches = settings.count.microbatches;
    let batches_grads_of =
        |stage: &StageSpec| joins(microbatches.div_ceil(stage.replicas.max(1)), stage.replicas, stage.zero);
    let batches_weight_grads: Vec<bool> =
        pipeline.stages.iter().map(|stage| machine.is_none() && batches_grads_of(stage)).collect();
    let bound = bind(graph, &settings.dims)?;
    if let Some(symbol) = symbols(&bound).into_iter().next() {
        return Err(PrepareError::Open { symbol });
    }
    let ops = order::numbered(&bound).len();
    if ops != stages.len() {
        return Err(PrepareError::Ops { planned: stages.len(), found: ops });
    }
    let mut training_graph = bound.clone();
    let loss = attach(&mut training_graph, settings.loss, settings.class_axis)?;
    let is_f16 = bound.outputs.first().is_some_and(|output| bound.fact(output.value).dtype == DType::F16);
    if is_f16 {
        scaled(&mut training_graph, loss);
    }
    let loss_name = if is_f16 { SCALED_LOSS } else { LOSS };
    let means = settings.minibatch_means.then(|| by_minibatch(&mut training_graph, loss)).flatten();
    let stage_of = placement(&bound, &training_graph, stages);
    let recomputation = recomputation(&bound, &training_graph, &stage_of, &pipeline);
    let options = PassOptions {
        device,
        splits,
        joins: &|stage| batches_weight_grads[stage],
        recomputation: &recomputation,
        machine,
    };
    let (mut codes, layouts) =
        compile_with(&training_graph, &stage_of, pipeline.stages.len(), Some(loss_name), options)?;
    let pipeline = with_edges(pipeline, &codes);
    let program = program(&pipeline)?;
    check(&program).map_err(PrepareError::Program)?;
    for (code, stage) in codes.iter_mut().zip(&program.stages) {
        code.recompute = stage.recompute && !code.recomputes_parts;
    }
    Ok(Prepared { graph: training_graph, codes, layouts, program, pipeline, means })
}

/// What recomputed stages repeat and save: their first ops by part, and the others. The loss is not an op of the plan.
fn recomputation(
    graph: &Graph,
    with_loss: &Graph,
    stage_of: &HashMap<NodeId, usize>,
    pipeline: &Pipeline,
) -> Recomputation {
    let all_ops = |stage: &StageSpec| stage.recompute.map(|_| u32::MAX);
    let mut remaining: Vec<Option<u32>> =
        pipeline.stages.iter().map(|stage| stage.recomputed_ops.or_else(|| all_ops(stage))).collect();
    let ops = order::numbered(graph);
    let modules: Vec<&str> = ops.iter().map(|op| graph.node(*op).origin.module.as_str()).collect();
    let parts = recompute_scope::parts(&modules);
    let mut recomputed: HashMap<NodeId, u32> = HashMap::new();
    for (at, op) in ops.into_iter().enumerate() {
        if let Some(remaining) = remaining[stage_of[&op]].as_mut().filter(|remaining| **remaining > 0) {
            *remaining -= 1;
            recomputed.insert(op, parts.as_ref().map_or(0, |parts| parts[at]));
        }
    }
    let nodes = order::executed(with_loss);
    let part = |node: &NodeId| recomputed.get(&with_loss.op_of(*node)).copied();
    let is_partial = |node: &NodeId| pipeline.stages[stage_of[node]].recomputed_ops.is_some();
    let is_saving = |node: &&NodeId| is_partial(node) && part(node).is_none();
    let saving = nodes.iter().filter(is_saving).copied().collect();
    let is_by_part = |node: &&NodeId| parts.is_some() && pipeline.stages[stage_of[*node]].recomputes_parts;
    let repeated = nodes.iter().filter(is_by_part).filter_map(|node| Some((*node, part(node)?)));
    Recomputation { parts: repeated.collect(), saving }
}
