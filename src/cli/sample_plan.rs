//! Plans for tests.

use compiler::cluster::read::gpus;
use compiler::plan::Plan;
use models::zoo;
use pipec::costs::cost_source::CostSource;
use pipec::model;
use pipec::plan::from_costs::solve;
use pipec::plan::request::PlanOptions;
use std::path::Path;

/// The plan of a model of the zoo for this many devices.
pub fn plan(name: &str, model: &zoo::Options, devices: u32, options: &PlanOptions) -> Plan {
    let (built, file) = (zoo::build(name, model).unwrap(), format!("{name}.onnx"));
    let loaded = model::of_zoo(&file, zoo::to_bytes(&built.model)).unwrap();
    let costs = CostSource::of_loaded(loaded, None).unwrap().on(gpus(devices, None).unwrap(), 4).unwrap();
    solve(Path::new(&file), costs, options).unwrap().plan
}
