//! A prepared run: its compiled stages, programs and data, before training.

use crate::train::task::Task;
use crate::train::tensor_parallel::Sharing;
use crate::train::{data_digest, memory};
use compiler::pass::batch_dependence::BatchDependence;
use compiler::pass::loss::Loss;
use compiler::plan::{Plan, Stage};
use compiler::schedule::generators::schedule;
use compiler::schedule::resume::period;
use compiler::schedule::semantics::StepCount;
use compiler::simulate::run::{Machine, simulate};
use compiler::tensor::Tensor;
use runtime::checkpoint::manifest::ShardLayout;
use runtime::checkpoint::points::Cuts;
use runtime::checkpoint::resume_point::ResumePoint;
use runtime::data::{Batches, Dataset};
use runtime::exec::stage_code::StageCode;
use runtime::optim::policy::Policy;
use runtime::train::job::TrainJob;
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// Maximum number of minibatches simulated for a prediction.
const MAX_SIMULATED_MINIBATCHES: u32 = 2000;

/// A prepared run, compiled and checked.
pub struct Prepared {
    /// The compiled stages and the programs.
    pub compiled: runtime::train::prepare::Prepared,
    /// The minibatches of training data.
    pub batches: Batches,
    /// Clipping, running statistics, loss scaling and weight staleness.
    pub policy: Policy,
    /// Total number of minibatches.
    pub steps: u32,
    /// Samples per minibatch.
    pub batch: u64,
    /// Minibatches per epoch.
    pub per_epoch: usize,
    /// Training rows of the data.
    pub rows: usize,
    /// Training rows with only ignored labels.
    pub ignored: usize,
    pub loss: Loss,
    /// The output that is the loss, if another one might be.
    pub loss_output: Option<String>,
    /// How the model's own loss depends on its micro-batches, if it does.
    pub batch_dependence: Option<BatchDependence>,
    /// True if the evaluation averages the losses of batches, and the loss of all rows is another.
    pub has_averaged_evaluation: bool,
    /// The parameters to which the loss gives no gradient.
    pub without_gradient: Vec<String>,
    /// Held-out rows, if any.
    pub held_out: Option<Dataset>,
    /// The digest of the data, once it is computed.
    pub data: OnceLock<[u8; 32]>,
    /// The state that the run resumes from, if any.
    pub resumed: Option<ResumedState>,
    /// Tensor parallelism, if the degree is above 1.
    pub sharing: Option<Sharing>,
    /// Settings and work that differ from the plan's, so that its times do not apply.
    pub differs_from_plan: Vec<&'static str>,
}

/// The state that a run resumes from.
pub struct ResumedState {
    /// The weights of the run, including those of the checkpoint.
    pub weights: BTreeMap<String, Tensor>,
    /// The rest of the state.
    pub start: ResumePoint,
}

impl Prepared {
    /// The job of the workers.
    pub fn job<'a>(&'a self, task: &Task<'a>) -> TrainJob<'a> {
        TrainJob {
            codes: &self.compiled.codes,
            program: &self.compiled.program,
            weights: self.resumed.as_ref().map_or(task.weights, |resumed| &resumed.weights),
            batches: &self.batches,
            optimizer: task.optimizer,
            policy: self.policy,
            keep_gradients: task.request.save_gradients.is_some(),
        }
    }

    /// The job with unsharded tensors, as in checkpoints.
    pub fn unsharded_job<'a>(&'a self, task: &Task<'a>) -> TrainJob<'a> {
        let job = self.job(task);
        TrainJob { codes: self.sharing.as_ref().map_or(job.codes, |sharing| &sharing.unsharded), ..job }
    }

    /// Minibatches completed before a resumed run.
    pub fn first_step(&self) -> usize {
        self.resumed.as_ref().map_or(0, |resumed| resumed.start.minibatches as usize)
    }

    /// The digest of the data, computed on first use.
    pub fn data_digest(&self) -> &[u8; 32] {
        self.data.get_or_init(|| data_digest::data(&self.batches))
    }

    /// The distribution of parameters and work over workers.
    pub fn layout(&self) -> ShardLayout {
        ShardLayout::of(&self.compiled.program, &self.compiled.codes, self.policy.staleness)
    }

    /// The steps at which the run writes checkpoints.
    pub fn cuts(&self, task: &Task<'_>) -> Cuts {
        Cuts { every: task.checkpoint_interval(), period: period(&self.compiled.program), minibatches: self.steps }
    }

    /// The names of all parameters and states.
    pub fn names(&self) -> Vec<String> {
        let named = self.compiled.codes.iter().flat_map(|code| code.parameters.iter().chain(&code.states));
        named.map(|named| named.name.clone()).collect()
    }

    /// The schedule's name, and the micro-batches per minibatch.
    pub fn order(&self) -> (&'static str, u32) {
        (self.compiled.program.schedule.name(), self.compiled.program.microbatches.max(1))
    }

    /// Estimated peak bytes of one replica of each stage, from the compiled code and the program.
    pub fn memory_estimate(&self, task: &Task<'_>) -> Vec<u64> {
        memory::of_stages(&self.compiled.codes, &self.compiled.program, task.optimizer)
    }

    /// Peak bytes of one replica of each stage: those of the plan, with the arenas of the compiled code.
    pub fn planned_memory(&self, plan: &Plan) -> Vec<u64> {
        let of = |(stage, code): (&Stage, &StageCode)| {
            let memory = &stage.memory;
            memory.total.saturating_sub(memory.workspace).saturating_add(code.arena_bytes as u64)
        };
        plan.stages.iter().zip(&self.compiled.codes).map(of).collect()
    }

    /// Simulated samples per second with workers sharing this number of cores; `None` if it cannot be simulated.
    pub fn predict_throughput(&self, cores: Option<u32>) -> Option<f64> {
        let count = StepCount {
            minibatches: self.steps.min(MAX_SIMULATED_MINIBATCHES),
            microbatches: self.compiled.program.microbatches,
        };
        let program = schedule(self.compiled.program.schedule, &self.compiled.pipeline, count).ok()?;
        let machine = Machine { cores, ..Machine::of(&self.compiled.pipeline) };
        let timeline = simulate(&program, &self.compiled.pipeline, &machine).ok()?;
        let samples = f64::from(count.minibatches) * self.batch as f64;
        (timeline.makespan > 0.0).then(|| samples * 1e6 / timeline.makespan)
    }
}
