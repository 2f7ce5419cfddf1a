//! The pipec side of the benchmark: profiles each model, plans with the profile, and trains under the plan.

use crate::figures::{Round, process_cpu_seconds, together};
use crate::subjects::Subject;
use compiler::graph::bind::bind;
use compiler::graph::hash::hash;
use compiler::import::import::{Batch, Model, Weight};
use compiler::partition::options::PlannerOptions;
use compiler::partition::planner::plan;
use compiler::pass::attribution::{Training as Trains, attribute};
use compiler::pass::costs::{cost_graph, fill};
use compiler::pass::loss::Loss;
use compiler::plan::problem::{CostModel, InFlight, Problem, Recomputation};
use compiler::plan::schedule::Schedule;
use compiler::plan::{Edge, Plan, PlannedModel, PlannedProfile, Stage};
use compiler::profile::{Profile, ProfiledModel};
use compiler::schedule::action::Phase;
use compiler::schedule::pipeline::{generated, pipeline, pipeline_of};
use compiler::schedule::semantics::StepCount;
use compiler::simulate::one_f_one_b_rr::{Steady, steady};
use compiler::tensor::Tensor;
use compiler::tensor::dim::Bindings;
use profiler::machine::cluster_of_this_cpu;
use profiler::measure::{self, Settings as Measuring, measure};
use runtime::data::synthetic::synthetic;
use runtime::data::{Batches, Dataset, RowOrder};
use runtime::device::cpu::device::cpu;
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::Policy;
use runtime::stage::worker::Work;
use runtime::train::job::{TrainJob, Trained};
use runtime::train::prepare::{Prepared, Settings, prepare};
use runtime::train::run::{feeds, train};
use std::collections::BTreeMap;

const TRAINS: Trains = Trains::Loss(Loss::CrossEntropy, None);

/// Minibatches of synthetic data, used repeatedly.
const MINIBATCHES: usize = 8;

/// Steps before the measurement, for pipec and PyTorch. After them, memory allocation is in steady state.
const WARM_UP: u32 = 8;

const RULE: Rule = Rule::Sgd { learning_rate: 0.01, momentum: 0.9, nesterov: false, weight_decay: 0.0 };

/// A training mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Parallelism {
    pub workers: u32,
    pub microbatches: u32,
}

impl Parallelism {
    /// The schedule; without micro-batches, one without a flush.
    fn kind(self) -> Schedule {
        if self.microbatches == 1 { Schedule::OneFOneBRr } else { Schedule::OneFOneB }
    }

    /// Replicas of each stage. 1F1B-RR leaves them to the planner; PyTorch's 1F1B has one stage per worker.
    fn replicas(self) -> Option<Vec<u32>> {
        (self.microbatches > 1).then(|| vec![1; self.workers as usize])
    }
}

/// A model with its profiles.
pub struct ProfiledSubject<'a> {
    subject: &'a Subject,
    model: &'a Model,
    weights: BTreeMap<String, Tensor>,
    profiles: BTreeMap<Parallelism, Profile>,
}

impl<'a> ProfiledSubject<'a> {
    /// Profiles the model for each of these degrees.
    pub fn of(
        subject: &'a Subject,
        model: &'a Model,
        parallelisms: impl Iterator<Item = Parallelism>,
    ) -> ProfiledSubject<'a> {
        let named_tensor = |(name, weight): (&String, &Weight)| match weight {
            Weight::Given(tensor) => Some((name.clone(), tensor.clone())),
            Weight::Missing { .. } => None,
        };
        let weights = model.weights.iter().filter_map(named_tensor).collect();
        let mut profiled = ProfiledSubject { subject, model, weights, profiles: BTreeMap::new() };
        for parallelism in parallelisms {
            let profile = profiled.profile(parallelism);
            profiled.profiles.insert(parallelism, profile);
        }
        profiled
    }

    fn rows(&self, microbatches: u32) -> usize {
        self.subject.batch / microbatches as usize
    }

    fn graph(&self, microbatches: u32) -> compiler::graph::Graph {
        let Batch::Symbol { name, .. } = &self.model.batch else { panic!("the zoo's batch is symbolic") };
        let dims = Bindings::from([(name.clone(), self.rows(microbatches) as i64)]);
        bind(&self.model.graph, &dims).expect("the batch is the only symbol")
    }

    fn profile(&self, Parallelism { workers, microbatches }: Parallelism) -> Profile {
        let (file, sha256) = (self.model.file.clone(), self.model.sha256.clone());
        let model = measure::Model {
            graph: &self.graph(microbatches),
            training: TRAINS,
            loss: Some("cross-entropy".to_string()),
            model: ProfiledModel { file, sha256, ops: 0 },
            micro_batch: self.rows(microbatches) as u64,
            weights: &self.weights,
        };
        measure(&model, &cpu(), &Measuring { workers, ..Measuring::default() }, None, &mut |_| {})
            .expect("the zoo's models can be measured")
            .profile
    }

    /// The plan for these workers.
    pub fn plan(&self, parallelism: Parallelism) -> Plan {
        let graph = self.graph(parallelism.microbatches);
        let attribution = attribute(&graph, TRAINS).expect("the zoo's models have gradients");
        let mut costs = cost_graph(&graph, &attribution);
        let profile = &self.profiles[&parallelism];
        fill(&mut costs, profile, None).expect("the profile is that of this graph");
        let cluster = cluster_of_this_cpu(parallelism.workers).expect("there is a worker");
        let mut problem = Problem::new(costs, cluster, CostModel::Pipec);
        problem.model = PlannedModel { graph_hash: hash(&self.model.graph), ..problem.model };
        problem.profile = PlannedProfile::of(profile, String::new());
        problem.schedule = parallelism.kind();
        problem.in_flight = InFlight::Auto;
        problem.micro_batch = self.rows(parallelism.microbatches) as u64;
        problem.microbatches = parallelism.microbatches;
        problem.optimizer = "sgd-momentum".to_string();
        problem.optimizer_state = 1.0;
        problem.count_updates();
        problem.recompute = Recomputation::Never;
        problem.constraints.replicas = parallelism.replicas();
        let levels = &problem.cluster.levels;
        let efficiency = |stages: &[Stage], edges: &[Edge], caps: &[u32]| {
            let steady_state =
                pipeline_of(levels, stages, edges, caps).ok().and_then(|pipeline| steady(&pipeline).ok());
            steady_state.unwrap_or_else(|| Steady { share: 1.0, held: vec![false; stages.len()], pieces: 0 })
        };
        let options = PlannerOptions { efficiency: Some(&efficiency), ..PlannerOptions::default() };
        plan(&problem, &options).expect("there is no limit to exceed").plan
    }

    /// Prepares training under the plan.
    pub fn prepare_run(&self, parallelism: Parallelism, plan: Plan, steps: u32) -> PreparedRun<'_> {
        let schedule: Schedule = generated(plan.schedule.kind).expect("these schedules are generated");
        // Steps before the measured ones fill the pipeline, and steps after them keep it full.
        let filling = plan.schedule.in_flight.iter().copied().max().unwrap_or(1).max(2);
        // Replicas end a round of minibatches at almost the same time.
        let round = plan.stages.iter().map(|stage| stage.replicas).max().unwrap_or(1);
        let (first, steps) = (filling.max(WARM_UP).next_multiple_of(round), steps.next_multiple_of(round));
        let minibatches = first + steps + filling;
        let count = StepCount { minibatches, microbatches: parallelism.microbatches };
        let settings = Settings::new(Bindings::new(), Loss::CrossEntropy, schedule, count);
        let mut stages = vec![0; plan.model.ops as usize];
        for (at, stage) in plan.stages.iter().enumerate() {
            stage.op_ids().for_each(|op| stages[op as usize] = at);
        }
        let pipeline = pipeline(&plan).expect("the plan is consistent");
        let graph = self.graph(parallelism.microbatches);
        let prepared = prepare(&graph, &stages, pipeline, &settings).expect("the zoo's models can be partitioned");
        let (item_rows, rows) = (self.rows(parallelism.microbatches), self.subject.batch * MINIBATCHES);
        let feeds = feeds(&prepared.codes);
        let arrays = synthetic(&prepared.graph, &feeds, item_rows, rows, 1);
        let data = Dataset::new(arrays, &feeds, item_rows).expect("the data is made for the model");
        let microbatches = parallelism.microbatches as usize;
        let batches = Batches::new(data, self.subject.batch, microbatches, minibatches as usize, RowOrder::InOrder);
        let batches = batches.expect("there are several minibatches of data");
        PreparedRun { profiled: self, plan, prepared, batches, steps, first }
    }
}

/// A model that can be trained repeatedly under one plan.
pub struct PreparedRun<'a> {
    profiled: &'a ProfiledSubject<'a>,
    pub plan: Plan,
    prepared: Prepared,
    batches: Batches,
    steps: u32,
    /// Steps before the measurement.
    first: u32,
}

/// Seconds per minibatch of a worker, by activity.
#[derive(Clone, Copy, Debug, Default)]
pub struct ActivitySeconds {
    pub forward: f64,
    pub backward: f64,
    pub step: f64,
    pub wait: f64,
}

/// The result of a round.
pub struct Outcome {
    pub round: Round,
    /// Peak bytes, by worker.
    pub peak_memory_bytes: Vec<u64>,
    pub spent: Vec<ActivitySeconds>,
}

/// Wall and CPU time at a point of a run.
#[derive(Clone, Copy)]
struct Moment {
    wall: f64,
    processors: Option<f64>,
}

impl PreparedRun<'_> {
    /// Two of these runs at the same time: what the machine gives two workers that share nothing.
    pub fn run_twice(&self) -> Round {
        std::thread::scope(|scope| {
            let runs = [(); 2].map(|()| scope.spawn(|| self.run().round));
            together(runs.map(|run| run.join().expect("a run does not panic")))
        })
    }

    /// Trains from the initial weights. Time is measured between the losses of two minibatches.
    pub fn run(&self) -> Outcome {
        let training = TrainJob {
            codes: &self.prepared.codes,
            program: &self.prepared.program,
            weights: &self.profiled.weights,
            batches: &self.batches,
            optimizer: &Optimizer::from(RULE),
            policy: Policy::default(),
            keep_gradients: false,
        };
        let first = self.first as usize - 1;
        let ends = [first, first + self.steps as usize];
        let mut moments = Vec::new();
        let trained = train(&training, &mut |progress| {
            if ends.contains(&progress.step) {
                moments.push(Moment { wall: progress.seconds, processors: process_cpu_seconds() });
            }
        });
        let trained = trained.expect("the program was checked");
        assert!(
            trained.losses.iter().all(|loss| loss.is_finite()),
            "{}: {:?}",
            self.profiled.subject.name,
            trained.losses
        );
        let [begin, end] = moments[..] else { panic!("there are steps before and after the measured ones") };
        let seconds = end.wall - begin.wall;
        // If the system does not report CPU time, every worker counts as busy.
        let cpu_seconds =
            begin.processors.zip(end.processors).map_or(seconds * trained.spans.len() as f64, |(a, b)| b - a);
        let spent = spent(&trained, [begin.wall, end.wall], self.steps);
        let round = Round::of(seconds, cpu_seconds, self.steps, self.profiled.subject.batch);
        Outcome { round, peak_memory_bytes: trained.peak_memory_bytes, spent }
    }
}

/// Each worker's activity between two points in time, per minibatch.
fn spent(trained: &Trained, [begin, end]: [f64; 2], steps: u32) -> Vec<ActivitySeconds> {
    let of = |spans: &Vec<runtime::stage::worker::Span>| {
        let mut spent = ActivitySeconds::default();
        for span in spans {
            let seconds = (span.end.min(end) - span.start.max(begin)).max(0.0) / f64::from(steps);
            match span.work {
                Work::Compute(work) if work.part == Phase::Forward => spent.forward += seconds,
                Work::Compute(_) | Work::Recompute(..) => spent.backward += seconds,
                Work::Step(..) => spent.step += seconds,
                Work::Wait => spent.wait += seconds,
            }
        }
        spent
    };
    trained.spans.iter().map(of).collect()
}
