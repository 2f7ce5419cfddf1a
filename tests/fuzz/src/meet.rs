//! Runs a hostile model through decoding, import, binding, costing and planning. Nothing may panic or need memory out
//! of proportion to the file.

#![allow(dead_code)]

mod archive;
mod choices;
mod graph;
mod json;

use choices::Choices;
use compiler::cluster::read::gpus;
use compiler::graph::bind::{bind, symbols};
use compiler::import::fx::program::Program;
use compiler::import::import::{Model, Options, from_onnx, from_program};
use compiler::import::onnx::decode;
use compiler::partition::options::PlannerOptions;
use compiler::partition::planner::plan;
use compiler::pass::attribution::{Training, attribute};
use compiler::plan::problem::{CostModel, Problem};
use compiler::profile::cost_graph::CostGraph;
use prost::Message;
use prost::bytes::Bytes;

/// The stage that a case reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FuzzStage {
    /// Rejected by the importer.
    Refused,
    /// Imported, and rejected when binding sizes.
    Imported,
    /// Planned, or infeasible.
    Planned,
}

/// Maximum ops to cost and plan: the cost grows with the graph, and the importer is the target.
const MOST_OPS: usize = 3000;

pub fn onnx_bytes(data: &[u8]) -> FuzzStage {
    let Ok(source) = decode::parse(Bytes::copy_from_slice(data), None) else { return FuzzStage::Refused };
    from_onnx(&source, "case.onnx", &Options::default()).map_or(FuzzStage::Refused, |model| plan_model(&model))
}

/// The first byte selects the graph, the rest the edits.
pub fn onnx_graph(data: &[u8]) -> FuzzStage {
    let mut choices = Choices::of(data);
    let mut model = graph::seed(choices.below(graph::SEEDS.len()));
    graph::edit(&mut model, &mut choices);
    onnx_bytes(&model.encode_to_vec())
}

pub fn pt2_zip(data: &[u8]) -> FuzzStage {
    let Ok(program) = Program::read(&Bytes::copy_from_slice(data)) else { return FuzzStage::Refused };
    from_program(&program, "case.pt2", &Options::default()).map_or(FuzzStage::Refused, |model| plan_model(&model))
}

pub fn pt2_json(data: &[u8]) -> FuzzStage {
    let mut choices = Choices::of(data);
    let (mut model, mut weights) = json::seed();
    let edits = 1 + choices.below(4);
    for _ in 0..edits {
        let target = if choices.below(8) == 0 { &mut weights } else { &mut model };
        json::edit(target, &mut choices);
    }
    pt2_zip(&archive::write(&model, &weights))
}

/// A well-formed file of each format, for damaging its bytes.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let mut seeds: Vec<(&str, Vec<u8>)> =
        (0..graph::SEEDS.len()).map(|at| ("onnx", graph::seed(at).encode_to_vec())).collect();
    let (model, weights) = json::seed();
    seeds.push(("pt2", archive::write(&model, &weights)));
    seeds
}

fn plan_model(model: &Model) -> FuzzStage {
    let sizes = symbols(&model.graph).into_iter().map(|symbol| (symbol, 3)).collect();
    let Ok(graph) = bind(&model.graph, &sizes) else { return FuzzStage::Imported };
    if graph.len() > MOST_OPS {
        return FuzzStage::Imported;
    }
    let attribution = attribute(&graph, Training::Gradient).or_else(|_| attribute(&graph, Training::No));
    let Ok(attribution) = attribution else { return FuzzStage::Imported };
    let costs = compiler::pass::costs::cost_graph(&graph, &attribution);
    let Ok(cluster) = gpus(2, None) else { return FuzzStage::Imported };
    let problem = Problem::new(CostGraph { ..costs }, cluster, CostModel::Paper);
    let _ = plan(&problem, &PlannerOptions { budget: Some(200), ..PlannerOptions::default() });
    FuzzStage::Planned
}
