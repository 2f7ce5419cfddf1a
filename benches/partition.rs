//! Plan quality and search cost: tables against published optima and bounds, then timings.
//!
//! ```text
//! cargo bench --bench partition                        the tables on standard output, then the timings
//! PIPEC_TABLES=1 cargo bench --bench partition         the tables also into benches/results/partition.md
//! cargo bench --bench partition -- chain               of the timings only those with "chain" in their name
//! cargo bench --bench partition -- --pins [FILTER]     the planner's choice against stages pinned by hand
//! ```
//!
//! Published profiles and instances are read from `$PIPEC_DATA`, by default `../shared/data`; without them their rows
//! say `skipped`. `published` has the external figures and their sources.
//!
//! | column | |
//! | --- | --- |
//! | published | result of the published program, or the optimum |
//! | ours, ratio | result of pipec, and its ratio to the published one: below 1 is better |
//! | bound, gap | lower bound, and the gap to it; `proven` if the plan is optimal |
//! | states | sets, shapes or nodes searched |
//! | CPU-s, MiB | processor seconds, and peak memory of the process |

#[path = "partition/pins.rs"]
mod pins;
#[allow(dead_code)] // Tests use the rest.
#[path = "../tests/support/problems.rs"]
mod problems;
#[path = "partition/published.rs"]
mod published;
#[path = "partition/table.rs"]
mod table;

use compiler::cluster::Cluster;
use compiler::cluster::read::levels;
use compiler::import::pipedream;
use compiler::partition::options::PlannerOptions;
use compiler::partition::partitioners::Partitioner;
use compiler::partition::planned::Planned;
use compiler::partition::planner::plan;
use compiler::plan::Plan;
use compiler::plan::problem::{CostModel, Problem};
use compiler::profile::cost_graph::CostGraph;
use criterion::Criterion;
use instances::placement::read::{read, read_with_hosts};
use instances::placement::solve::{Request, solve};
use problems::{Random, add, chain, parallel, transformer};
use published::{ANYWHERE, Golden, Optimum, PIPEDREAM, PLACEMENTS, WHOLE_SERVERS};
use std::path::PathBuf;
use std::time::Duration;
use table::{ResourceUsage, Table, measure_usage};

const COLUMNS: [&str; 9] = ["instance", "published", "ours", "ratio", "bound", "gap", "states", "CPU-s", "MiB"];

fn data() -> PathBuf {
    std::env::var_os("PIPEC_DATA").map_or_else(|| PathBuf::from("../shared/data"), PathBuf::from)
}

fn profile(name: &str) -> Option<CostGraph> {
    let path = data().join(format!("partition/pipedream/profiles/{name}.graph.txt"));
    let text = std::fs::read_to_string(path).ok()?;
    Some(pipedream::read(&text).expect("published profiles can be read"))
}

fn problem(graph: CostGraph, cluster: Cluster, cost: CostModel) -> Problem {
    let mut problem = Problem::new(graph, cluster, cost);
    problem.activation_compression = Some(1.0);
    problem
}

fn cluster(spec: &str) -> Cluster {
    levels(spec).expect("the levels of this bench can be read")
}

fn with(problem: &Problem, partitioner: Partitioner) -> Planned {
    plan(problem, &PlannerOptions { partitioner, ..PlannerOptions::default() }).expect("there is no limit to exceed")
}

/// Replicas by stage, as in "13-2-1".
fn replicas(plan: &Plan) -> String {
    let counts: Vec<u32> = plan.stages.iter().map(|stage| stage.replicas).collect();
    if counts.len() > 8 { format!("{} stages", counts.len()) } else { pins::joined(&counts) }
}

/// A row; times are in units of `unit` microseconds.
fn row(table: &mut Table, name: String, published: Option<f64>, plan: &Plan, unit: f64, usage: ResourceUsage) {
    let (ours, bound) = (plan.predicted.minibatch_us / unit, plan.lower_bound_us / unit);
    let gap = match plan.proven_optimal {
        true => "proven".to_string(),
        false => format!("{:.2} %", (ours / bound - 1.0) * 100.0),
    };
    let [cpu, mib] = usage.cells();
    table.row(&[
        name,
        published.map_or("–".to_string(), |value| format!("{value:.4}")),
        format!("{ours:.4}"),
        published.map_or("–".to_string(), |value| format!("{:.4}", ours / value)),
        format!("{bound:.4}"),
        gap,
        plan.search.states.to_string(),
        cpu,
        mib,
    ]);
}

fn golden(table: &mut Table, golden: &Golden, partitioner: Partitioner) {
    let name = format!("{} on {}", golden.profile, golden.levels);
    let Some(graph) = profile(golden.profile) else { return table.skipped_row(&name) };
    let problem = problem(graph, golden.cluster(), CostModel::Pipedream);
    let (planned, usage) = measure_usage(|| with(&problem, partitioner));
    let name = format!("{name}, {} ({})", partitioner.name(), replicas(&planned.plan));
    row(table, name, Some(golden.minibatch_ms), &planned.plan, 1e3, usage);
}

fn against_pipedream() -> String {
    let mut table = Table::new("PipeDream's profiles, cost `pipedream`, ms per minibatch", &COLUMNS);
    for entry in &PIPEDREAM {
        golden(&mut table, entry, Partitioner::Pipedream);
        golden(&mut table, entry, Partitioner::Pipec);
    }
    let mut text = table.text();
    let mut table = Table::new("Stages that span servers, cost `pipedream`, ms per minibatch", &COLUMNS);
    WHOLE_SERVERS.iter().for_each(|entry| golden(&mut table, entry, Partitioner::Pipec));
    text += &table.text();
    text
}

fn large_profiles() -> String {
    let mut table = Table::new("Larger profiles compared with their lower bound, ms per minibatch", &COLUMNS);
    for name in ["resnext50", "inception_v3", "nasnetamobile"] {
        for (cost, label) in
            [(CostModel::Paper, "paper"), (CostModel::Pipedream, "pipedream"), (CostModel::Pipec, "pipec")]
        {
            let title = format!("{name} on 16:1.25GB/s, cost {label}");
            let Some(graph) = profile(name) else {
                table.skipped_row(&title);
                continue;
            };
            let problem = problem(graph, cluster("16:1.25GB/s"), cost);
            let (planned, usage) = measure_usage(|| with(&problem, Partitioner::Pipec));
            row(&mut table, format!("{title} ({})", replicas(&planned.plan)), None, &planned.plan, 1e3, usage);
        }
    }
    table.text()
}

fn placements() -> String {
    let mut table = Table::new("Device placement, largest load in the unit of the files", &COLUMNS);
    let folder = data().join("partition/dnn-partitioning/throughput-inputs");
    let best = Optimum { instance: ANYWHERE.0, load: ANYWHERE.1, has_cpu: false };
    let optima = PLACEMENTS.iter().map(|optimum| (optimum, false)).chain([(&best, true)]);
    for (&Optimum { instance: name, load: published, has_cpu }, anywhere) in optima {
        let Ok(text) = std::fs::read_to_string(folder.join(format!("{name}.json"))) else {
            table.skipped_row(name);
            continue;
        };
        let placement = if has_cpu { read_with_hosts(&text) } else { read(&text) };
        let placement = placement.expect("published instances can be read");
        let request = Request { anywhere, ..Request::default() };
        let (plan, usage) =
            measure_usage(|| solve(&placement, &request).expect("published instances have a placement"));
        let label = match (anywhere, has_cpu) {
            (true, _) => ", not contiguous",
            (false, true) => ", with the CPU of the file",
            (false, false) => "",
        };
        row(&mut table, format!("{name}{label}"), Some(published), &plan, 1.0, usage);
    }
    table.text()
}

/// Up to eight ops, each of which reads up to two earlier ones.
fn random_graph(random: &mut Random) -> CostGraph {
    let mut graph = CostGraph::default();
    for id in 0..3 + random.below(6) {
        let mut reads: Vec<u32> = (0..random.below(3).min(id)).map(|_| random.below(id) as u32).collect();
        reads.sort_unstable();
        reads.dedup();
        let weights = if random.below(3) == 0 { random.below(4_000_000) } else { random.below(20_000) };
        add(&mut graph, "op", &reads, random.below(1000) as f64, random.below(400_000), weights);
    }
    graph
}

fn against_everything() -> String {
    let columns = [
        "cost",
        "graphs",
        "equal to the optimum",
        "worst ratio",
        "proven",
        "CPU-s",
        "CPU-s of exhaustive \
        search",
    ];
    let mut table =
        Table::new("Random graphs of up to 8 ops on up to 4 devices, compared with exhaustive search", &columns);
    for (cost, label) in [(CostModel::Paper, "paper"), (CostModel::Pipedream, "pipedream"), (CostModel::Pipec, "pipec")]
    {
        let (mut equal, mut worst, mut proven) = (0, 1.0f64, 0);
        let (mut ours_seconds, mut exhaustive_seconds) = (0.0, 0.0);
        const GRAPHS: u64 = 200;
        for seed in 0..GRAPHS {
            let mut random = Random(seed);
            let spec = ["2:1GB/s", "3:1GB/s", "4:0.2GB/s", "4:10GB/s"][random.below(4) as usize];
            let problem = problem(random_graph(&mut random), cluster(spec), cost);
            let (ours, usage) = measure_usage(|| with(&problem, Partitioner::Pipec).plan);
            let (best, exhaustive_usage) = measure_usage(|| with(&problem, Partitioner::Exhaustive).plan);
            ours_seconds += usage.cpu_seconds;
            exhaustive_seconds += exhaustive_usage.cpu_seconds;
            let best_us = best.predicted.minibatch_us;
            let ratio = if best_us > 0.0 { ours.predicted.minibatch_us / best_us } else { 1.0 };
            equal += usize::from(ratio <= 1.0 + 1e-9);
            worst = worst.max(ratio);
            proven += usize::from(ours.proven_optimal);
        }
        let percent = 100.0 * equal as f64 / GRAPHS as f64;
        table.row(&[
            label.to_string(),
            GRAPHS.to_string(),
            format!("{percent:.1} %"),
            format!("{worst:.4}"),
            proven.to_string(),
            format!("{ours_seconds:.2}"),
            format!("{exhaustive_seconds:.2}"),
        ]);
    }
    table.text()
}

fn large() -> Vec<(&'static str, Problem)> {
    let of = |graph: CostGraph, spec: &str, cost| problem(graph, cluster(spec), cost);
    vec![
        (
            "transformer of 5,000 ops on 1,024 devices, cost paper",
            of(transformer(5000, 2048, 4096), "8:300GB/s,128:25GB/s", CostModel::Paper),
        ),
        (
            "transformer of 5,000 ops on 1,024 devices, cost pipec",
            of(transformer(5000, 2048, 4096), "8:300GB/s,128:25GB/s", CostModel::Pipec),
        ),
        ("chain of 30,000 ops, cost pipedream", of(chain(30_000), "4:10GB/s,4:1GB/s", CostModel::Pipedream)),
        (
            "24 chains of 24 ops side by side, cost pipedream",
            of(parallel(24, 24), "4:10GB/s,4:1GB/s", CostModel::Pipedream),
        ),
    ]
}

fn large_problems() -> String {
    let mut table = Table::new("Large problems compared with their lower bound, ms per minibatch", &COLUMNS);
    for (name, problem) in large() {
        let (planned, usage) = measure_usage(|| with(&problem, Partitioner::Pipec));
        row(&mut table, format!("{name} ({})", replicas(&planned.plan)), None, &planned.plan, 1e3, usage);
    }
    table.text()
}

fn shared_problems() -> Vec<(String, Option<Problem>)> {
    let of = |graph: Option<CostGraph>, spec: &str, cost| graph.map(|graph| problem(graph, cluster(spec), cost));
    vec![
        ("vgg16 on 4:1.25GB/s, cost pipedream".into(), of(profile("vgg16"), "4:1.25GB/s", CostModel::Pipedream)),
        ("alexnet on 4:1.25GB/s, cost pipec".into(), of(profile("alexnet"), "4:1.25GB/s", CostModel::Pipec)),
        ("gnmt on 4:1.25GB/s, cost paper".into(), of(profile("gnmt"), "4:1.25GB/s", CostModel::Paper)),
        (
            "transformer of 40 ops on 4:100GB/s, cost paper".into(),
            of(Some(transformer(40, 1024, 2048)), "4:100GB/s", CostModel::Paper),
        ),
        ("chain of 24 ops on 6:50GB/s, cost pipedream".into(), of(Some(chain(24)), "6:50GB/s", CostModel::Pipedream)),
    ]
}

fn partitioners() -> String {
    let columns =
        ["instance", "partitioner", "replicas", "ms", "relative to pipec", "bound", "proven", "states", "CPU-s", "MiB"];
    let mut table = Table::new("Partitioners on the same problem, ms per minibatch", &columns);
    for (name, problem) in shared_problems() {
        let Some(problem) = problem else {
            table.skipped_row(&name);
            continue;
        };
        let best_us = with(&problem, Partitioner::Pipec).plan.predicted.minibatch_us;
        let compared = [
            Partitioner::Pipec,
            Partitioner::Pipedream,
            Partitioner::Milp,
            Partitioner::Uniform,
            Partitioner::DataParallel,
            Partitioner::Single,
        ];
        for partitioner in compared {
            let (planned, usage) = measure_usage(|| with(&problem, partitioner));
            let plan = &planned.plan;
            let [cpu, mib] = usage.cells();
            table.row(&[
                name.clone(),
                partitioner.name().to_string(),
                replicas(plan),
                format!("{:.4}", plan.predicted.minibatch_us / 1e3),
                format!("{:.4}", plan.predicted.minibatch_us / best_us),
                format!("{:.4}", plan.lower_bound_us / 1e3),
                if plan.proven_optimal { "yes" } else { "no" }.to_string(),
                plan.search.states.to_string(),
                cpu,
                mib,
            ]);
        }
    }
    table.text()
}

fn tables() {
    let parts: [fn() -> String; 6] =
        [against_pipedream, large_profiles, placements, against_everything, large_problems, partitioners];
    let mut report = String::from("# Plans: quality and search time\n");
    println!("{report}");
    for part in parts {
        let text = part();
        println!("{text}");
        report += &text;
    }
    if std::env::var_os("PIPEC_TABLES").is_some() {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("benches/results");
        let path = folder.join("partition.md");
        let outcome = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&path, report));
        match outcome {
            Ok(()) => println!("wrote {}", path.display()),
            Err(error) => eprintln!("cannot write {}: {error}", path.display()),
        }
    }
}

fn timings(c: &mut Criterion) {
    let mut group = c.benchmark_group("partition");
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(3));
    let mut time = |name: &str, problem: &Problem, partitioner: Partitioner| {
        group.bench_function(format!("{name}, {}", partitioner.name()), |b| b.iter(|| with(problem, partitioner)));
    };
    for golden in &PIPEDREAM[..4] {
        let Some(graph) = profile(golden.profile) else { continue };
        let problem = problem(graph, golden.cluster(), CostModel::Pipedream);
        let name = format!("{} on {}", golden.profile, golden.levels);
        time(&name, &problem, Partitioner::Pipedream);
        time(&name, &problem, Partitioner::Pipec);
    }
    let small = problem(transformer(200, 1024, 2048), cluster("8:25GB/s"), CostModel::Pipec);
    time("transformer of 200 ops on 8 devices", &small, Partitioner::Pipec);
    let short = problem(chain(24), cluster("4:50GB/s"), CostModel::Pipedream);
    time("chain of 24 ops on 4 devices", &short, Partitioner::Milp);
    let long = problem(chain(3000), cluster("4:10GB/s,4:1GB/s"), CostModel::Pipedream);
    time("chain of 3,000 ops on 16 devices", &long, Partitioner::Pipec);
    group.finish();
}

fn main() {
    // `cargo test --benches` only runs the timings; a filter selects timings.
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--pins") {
        let filter = arguments.iter().find(|argument| !argument.starts_with("--")).map_or("", String::as_str);
        println!("{}", pins::table(filter));
        return;
    }
    if arguments.iter().all(|argument| argument == "--bench") {
        tables();
    }
    let mut criterion = Criterion::default().configure_from_args();
    timings(&mut criterion);
    criterion.final_summary();
}
