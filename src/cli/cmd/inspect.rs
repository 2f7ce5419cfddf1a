//! `pipec inspect`: summarises a model.

use crate::cli::args::Dims;
use crate::cli::screen::Screen;
use crate::cli::stage_table;
use clap::Args;
use compiler::graph::{Graph, order, text};
use compiler::import::import::Batch;
use compiler::import::training_warning::TrainingWarning;
use compiler::op::dropout::COUNTER;
use compiler::op::table::rule;
use compiler::op::{Op, Value};
use compiler::pass::analytic::node_cost;
use compiler::pass::attribution::{Training, attribute};
use compiler::text::name::short_name;
use compiler::text::quantity;
use pipec::error::Error;
use pipec::model::{self, LoadedModel};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Depth of the module path at which modules are summed up.
const DEPTH: usize = 2;

/// Name shown for ops outside all modules.
const NO_MODULE: &str = "(top level)";

/// The most modules that are listed as text.
const MAX_LISTED: usize = 40;

/// Arguments of `pipec inspect`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  pipec inspect model.onnx\n  pipec inspect model.pt2 --dim seq=128 --format json")]
pub struct Arguments {
    /// The model
    #[arg(value_name = "MODEL")]
    file: PathBuf,
    #[command(flatten)]
    dims: Dims,
    /// Print only the graph, in its text form
    #[arg(long)]
    text: bool,
}

/// Sums over the ops of one type, per sample.
#[derive(Default)]
struct Kind {
    ops: u64,
    flops: f64,
    bytes: f64,
}

#[derive(Default)]
struct Module {
    ops: u64,
    parameters: u64,
    flops: f64,
}

pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Error> {
    let loaded = model::load(&arguments.file, &arguments.dims.import.clone().into(), screen)?
        .with_micro_batch(arguments.dims.micro_batch);
    if arguments.text {
        let printed = text::print(&loaded.graph()?);
        screen.text(&printed);
        screen.json(&json!({"graph": printed}));
        return Ok(());
    }
    let graph = &loaded.graph()?;
    let ops = order::numbered(graph);
    let (parameters, parameter_bytes) = sizes(graph, |op| matches!(op, Op::Parameter(_)));
    let (states, state_bytes) = sizes(graph, |op| matches!(op, Op::State(_)));
    let tensors = graph.ids().filter(|id| matches!(graph.node(*id).op, Op::Parameter(_))).count();
    let micro_batch = loaded.micro_batch(None, screen);
    let bound = loaded.with_samples(micro_batch);
    let kinds = kinds(graph, bound.as_ref().ok(), micro_batch);
    let histogram: BTreeMap<&str, u64> = kinds.iter().map(|(name, kind)| (*name, kind.ops)).collect();
    let sum = |of: fn(&Kind) -> f64| bound.as_ref().ok().map(|_| kinds.values().map(of).sum::<f64>());
    let (flops, activations) = (sum(|kind| kind.flops), sum(|kind| kind.bytes));
    let reasons = training_obstacles(&loaded, &bound);
    let modules = modules(graph, bound.as_ref().ok(), micro_batch);
    let fact = |value: Value| graph.fact(value).to_string();
    let inputs: Vec<(String, String)> = graph
        .ids()
        .filter_map(|id| match &graph.node(id).op {
            // Training provides the dropout counter; it is not a user input.
            Op::Input(input) if input.name != COUNTER => {
                Some((input.name.clone(), fact(Value { node: id, output: 0 })))
            }
            _ => None,
        })
        .collect();
    let outputs: Vec<(String, String)> = graph.outputs.iter().map(|o| (o.name.clone(), fact(o.value))).collect();
    let batch = match &loaded.model.batch {
        Batch::Symbol { name, default: Some(size) } => format!("`{name}`, {size} in the file"),
        Batch::Symbol { name, default: None } => format!("`{name}`, symbolic"),
        Batch::Fixed { size: Some(size), why } => format!("fixed at {size}: {why}"),
        Batch::Fixed { size: None, why } => format!("none: {why}"),
    };
    let list = |facts: &[(String, String)]| {
        facts
            .iter()
            .map(|(name, fact)| format!("{} {fact}", short_name(name)))
            .collect::<Vec<_>>()
            .join("\n            ")
    };
    screen.prose(&format!(
        "model       {} ({})\nops         {} of {}\nparameters  {} in {}, {}\n",
        arguments.file.display(),
        if loaded.model.producer.is_empty() { "producer unknown" } else { &loaded.model.producer },
        quantity::count(ops.len() as u64),
        quantity::plural(kinds.len() as u64, "type", "types"),
        quantity::count(parameters),
        quantity::plural(tensors as u64, "tensor", "tensors"),
        quantity::bytes(parameter_bytes),
    ));
    if !loaded.model.constants.is_empty() {
        screen.text(&format!("constants   {}\n", loaded.model.constants_text()));
    }
    if states > 0 {
        screen.prose(&format!(
            "frozen      {} in parameters and buffers that are not trained, {}\n",
            quantity::count(states),
            quantity::bytes(state_bytes)
        ));
    }
    screen.prose(&format!(
        "forward     {} per sample (a multiply-add counts as two)\nactivations {} per sample (outputs of all ops)\ninputs      {}\noutputs     {}\nbatch       {batch}\ntrainable   {}\n",
        flops.map_or("unknown".to_string(), quantity::flops),
        activations.map_or("unknown".to_string(), |bytes| quantity::bytes(bytes.round() as u64)),
        list(&inputs),
        list(&outputs),
        match reasons.as_slice() {
            [] => "yes: every parameter".to_string(),
            reasons => format!("no: {}", reasons.join("\n            ")),
        },
    ));
    let tied = tied_parameters(graph);
    if !tied.is_empty() {
        let rows =
            tied.iter().take(MAX_LISTED).map(|(name, users)| format!("{}, used by {users} ops", short_name(name)));
        screen.prose(&format!("tied        {}\n", rows.collect::<Vec<_>>().join("\n            ")));
        if tied.len() > MAX_LISTED {
            screen.text(&format!("            … and {} more", tied.len() - MAX_LISTED));
        }
    }
    let mut by_flops: Vec<(&&str, &Kind)> = kinds.iter().collect();
    by_flops
        .sort_by(|(a, one), (b, other)| other.flops.total_cmp(&one.flops).then(other.ops.cmp(&one.ops)).then(a.cmp(b)));
    let rows = by_flops.into_iter().map(|(name, kind)| {
        let sizes = match &bound {
            Ok(_) => [quantity::flops(kind.flops), quantity::bytes(kind.bytes.round() as u64)],
            Err(_) => ["unknown".to_string(), "unknown".to_string()],
        };
        [(*name).to_string(), quantity::count(kind.ops)].into_iter().chain(sizes).collect()
    });
    screen.text(&format!(
        "\n{}",
        stage_table::table(&["type", "ops", "flops per sample", "output per sample"], &[1, 2, 3], rows.collect())
    ));
    if !modules.is_empty() {
        let rows = modules.iter().take(MAX_LISTED).map(|(name, module)| {
            let sums = [quantity::count(module.ops), quantity::count(module.parameters), quantity::flops(module.flops)];
            let name = if name.is_empty() { NO_MODULE.into() } else { short_name(name) };
            std::iter::once(name).chain(sums).collect()
        });
        screen.text(&format!(
            "\n{}",
            stage_table::table(&["module", "ops", "parameters", "flops per sample"], &[1, 2, 3], rows.collect())
        ));
        if modules.len() > MAX_LISTED {
            screen.text(&format!("… and {} more", modules.len() - MAX_LISTED));
        }
    }
    let facts_json = |list: &[(String, String)]| -> Vec<_> {
        list.iter().map(|(name, fact)| json!({"name": name, "fact": fact})).collect()
    };
    let modules: Vec<_> = modules
        .iter()
        .map(|(name, m)| json!({"module": name, "ops": m.ops, "parameters": m.parameters, "flops_per_sample": m.flops}))
        .collect();
    let operators: Vec<_> = kinds
        .iter()
        .map(|(op, k)| json!({"op": op, "ops": k.ops, "flops_per_sample": k.flops, "output_bytes_per_sample": k.bytes}))
        .collect();
    let doubts: Vec<_> = loaded.model.doubts.iter().map(describe).collect();
    let (symbol, size) = match &loaded.model.batch {
        Batch::Symbol { name, default } => (Some(name.clone()), *default),
        Batch::Fixed { size, .. } => (None, *size),
    };
    screen.json(&json!({
        "file": arguments.file.display().to_string(),
        "sha256": loaded.model.sha256,
        "producer": loaded.model.producer,
        "ops": ops.len(),
        "histogram": histogram,
        "constants": loaded.model.constants,
        "parameters": {"tensors": tensors, "count": parameters, "bytes": parameter_bytes},
        "states": {"count": states, "bytes": state_bytes},
        "flops_per_sample": flops,
        "flops_convention": "a multiply-add is two",
        "activation_bytes_per_sample": activations,
        "operators": operators,
        "micro_batch": micro_batch,
        "inputs": facts_json(&inputs),
        "outputs": facts_json(&outputs),
        "batch": batch,
        "batch_symbol": symbol,
        "batch_in_file": size,
        "trainable": reasons.is_empty(),
        "not_trainable_because": if reasons.is_empty() { None } else { Some(reasons.join("; ")) },
        "reasons": reasons,
        "doubts": doubts,
        "tied": tied.iter().map(|(name, users)| json!({"name": name, "users": users})).collect::<Vec<_>>(),
        "modules": modules,
        "warnings": loaded.model.warnings,
    }));
    Ok(())
}

/// Element and byte counts of the parameters or states; a tied parameter is one node and counts once.
fn sizes(graph: &Graph, is_wanted: impl Fn(&Op) -> bool) -> (u64, u64) {
    let facts = graph.ids().filter(|id| is_wanted(&graph.node(*id).op)).map(|id| &graph.node(id).facts[0]);
    facts.fold((0, 0), |(count, bytes), fact| {
        let size = fact.bytes().unwrap_or(0);
        (count + size / fact.dtype.size().max(1) as u64, bytes + size)
    })
}

/// The parameters that several ops read, with the number of those ops.
fn tied_parameters(graph: &Graph) -> Vec<(String, usize)> {
    let tied_parameter = |id| match &graph.node(id).op {
        Op::Parameter(parameter) => {
            let users = graph.successors(id).len();
            (users > 1).then(|| (parameter.name.clone(), users))
        }
        _ => None,
    };
    graph.ids().filter_map(tied_parameter).collect()
}

/// Sums over the ops of each type; without bound sizes, their number only.
fn kinds(graph: &Graph, bound: Option<&Graph>, samples: u64) -> BTreeMap<&'static str, Kind> {
    let mut kinds: BTreeMap<&str, Kind> = BTreeMap::new();
    for id in order::numbered(graph) {
        let kind = kinds.entry(rule(&graph.node(id).op).name()).or_default();
        kind.ops += 1;
        let Some(bound) = bound else { continue };
        let bytes = bound.node(id).facts.iter().map(|fact| fact.bytes().unwrap_or(0) as f64).sum::<f64>();
        kind.flops += node_cost(bound, id).flops / samples as f64;
        kind.bytes += bytes / samples as f64;
    }
    kinds
}

/// Reasons why the file cannot be trained, or would not train the model it was exported from.
fn training_obstacles(loaded: &LoadedModel, bound: &Result<Graph, Error>) -> Vec<String> {
    let mut reasons = Vec::new();
    match bound {
        Err(failure) => reasons.extend(failure.to_string().lines().skip(1).map(|line| line.trim().to_string())),
        Ok(bound) => match attribute(bound, Training::Gradient) {
            Err(error) => reasons.push(error.to_string()),
            Ok(attribution) if attribution.backward.is_none() => {
                reasons.push("no float output depends on a parameter".to_string());
            }
            Ok(_) => {}
        },
    }
    let missing = loaded.model.weights.len() - loaded.known_weights().len();
    if missing > 0 {
        reasons.push(format!(
            "{} without values: pass them with `--weights`",
            quantity::plural(missing as u64, "tensor", "tensors")
        ));
    }
    reasons.extend(loaded.model.doubts.iter().filter(|doubt| doubt.is_wrong()).map(ToString::to_string));
    reasons
}

fn describe(doubt: &TrainingWarning) -> serde_json::Value {
    let severity = if doubt.is_wrong() { "wrong" } else { "warning" };
    json!({
        "finding": doubt.name(), "severity": severity, "count": doubt.count, "first": doubt.first,
        "message": doubt.to_string(), "remedy": doubt.remedy(),
    })
}

/// Sums per module at `DEPTH`. Ops outside all modules come last under the empty name, if they have parameters.
/// Empty if no op is in a module.
fn modules(graph: &Graph, bound: Option<&Graph>, samples: u64) -> Vec<(String, Module)> {
    let mut modules: Vec<(String, Module)> = Vec::new();
    let mut index_of: BTreeMap<String, usize> = BTreeMap::new();
    let mut add = |id, ops, parameters, flops| {
        let name = graph.node(id).origin.module.split('.').take(DEPTH).collect::<Vec<_>>().join(".");
        let at = *index_of.entry(name.clone()).or_insert(modules.len());
        if at == modules.len() {
            modules.push((name, Module::default()));
        }
        let module = &mut modules[at].1;
        module.ops += ops;
        module.parameters += parameters;
        module.flops += flops;
    };
    for id in order::numbered(graph) {
        add(id, 1, 0, bound.map_or(0.0, |bound| node_cost(bound, id).flops / samples as f64));
    }
    for id in graph.ids() {
        let Op::Parameter(_) = &graph.node(id).op else { continue };
        let fact = &graph.node(id).facts[0];
        let first_reader = graph.consumers(Value { node: id, output: 0 }).first().map(|(reader, _)| *reader);
        add(first_reader.unwrap_or(id), 0, fact.bytes().unwrap_or(0) / fact.dtype.size().max(1) as u64, 0.0);
    }
    modules.sort_by_key(|(name, _)| name.is_empty());
    modules.retain(|(name, module)| !name.is_empty() || module.parameters > 0);
    if modules.iter().all(|(name, _)| name.is_empty()) { Vec::new() } else { modules }
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::graph::{Origin, Writer};
    use compiler::op::{Binary, Emit, Input, Parameter};
    use compiler::tensor::DType;
    use compiler::tensor::fact::Fact;

    #[test]
    fn what_stands_in_no_module_is_counted_too() {
        let mut graph = Graph::new("net");
        let fact = Fact::of(DType::F32, &[2, 3]);
        let mut emit = |op: Op, inputs: &[Value], module: &str| {
            Writer { graph: &mut graph, origin: Origin { source: String::new(), module: module.into() } }
                .emit(op, inputs)
        };
        let parameter = |name: &str| Op::Parameter(Parameter { name: name.into(), fact: fact.clone() });
        let x = emit(Op::Input(Input { name: "x".into(), fact: fact.clone() }), &[], "");
        let (position, scale) = (emit(parameter("position"), &[], ""), emit(parameter("scale"), &[], ""));
        let sum = emit(Op::Binary(Binary::Add), &[x, position], "");
        emit(Op::Binary(Binary::Mul), &[sum, scale], "block.0.norm");
        let describe = |graph: &Graph| -> Vec<(String, u64, u64)> {
            modules(graph, None, 1).into_iter().map(|(name, module)| (name, module.ops, module.parameters)).collect()
        };
        assert_eq!(describe(&graph), [("block.0".to_string(), 1, 6), (String::new(), 1, 6)]);
        let mut plain = Graph::new("plain");
        let mut writer = Writer { graph: &mut plain, origin: Origin::default() };
        let x = writer.emit(Op::Input(Input { name: "x".into(), fact: fact.clone() }), &[]);
        writer.emit(Op::Binary(Binary::Add), &[x, x]);
        assert!(describe(&plain).is_empty(), "a model without modules has no table of them");
    }
}
