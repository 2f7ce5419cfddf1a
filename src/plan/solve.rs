//! Computes the plan of a request.

use crate::costs::Costs;
use crate::error::Error;
use crate::events::EventSink;
use crate::plan::batch_search;
use crate::plan::custom_schedule;
use crate::plan::from_costs::solve;
use crate::plan::remedies::{Size, with_remedies};
use crate::plan::request::{GAP, PlanOptions, PlanRequest, ScheduleChoice};
use crate::plan::request_costs;
use crate::plan::result::PlanResult;
use crate::plan::tied_weights;
use compiler::export::target::{self, ExportInput, Need};
use compiler::partition::partitioners::Partitioner;
use compiler::plan::Plan;
use compiler::plan::problem::Target;

pub fn plan(request: &PlanRequest, events: &dyn EventSink) -> Result<PlanResult, Error> {
    let mut result = match batch_search::is_requested(request) {
        true => batch_search::plan(request, events)?,
        false => plan_once(request, events)?,
    };
    let plan = &mut result.planned.plan;
    if let Some(refusal) = request.options.target.and_then(|target| refusal(target, plan)) {
        plan.warnings.push(refusal);
    }
    Ok(result)
}

/// Why the export to a target refuses the plan. `None` if it does not, or if it needs more than the plan to tell: the
/// model, or the table of a custom schedule.
pub fn refusal(target: Target, plan: &Plan) -> Option<String> {
    let entry = target::find(target.name()).filter(|entry| entry.need == Need::Plan)?;
    if plan.schedule.kind.is_custom() {
        return None;
    }
    let refusal = (entry.write)(&ExportInput { plan, costs: None, model: None, table: None }).err()?;
    Some(format!("this plan cannot be exported to {}: {refusal}", target.name()))
}

/// Plans with one batch size and schedule.
fn plan_once(request: &PlanRequest, events: &dyn EventSink) -> Result<PlanResult, Error> {
    request.options.validate()?;
    if request.options.gap != GAP {
        return Err(Error::input("`--gap` needs `--batch` or `--schedule auto`"));
    }
    custom_schedule::open(request.options.schedule.as_ref().and_then(ScheduleChoice::file), events)?;
    let costs = request_costs::costs(request, events)?;
    request.protect_output(&costs.model)?;
    offer_baseline(request, &costs, events);
    let params = costs.graph.params.clone();
    let size = Size { ops: costs.graph.ops.len(), devices: costs.cluster.devices(), micro_batch: costs.micro_batch };
    let planned =
        solve(&request.model, costs, &request.options).map_err(|error| with_remedies(request, size, error))?;
    let untrainable = tied_weights::refused(&params, &planned.plan);
    tied_weights::aged(&params, &planned.plan).iter().for_each(|note| events.note(note));
    Ok(PlanResult { planned, untrainable, tried: Vec::new(), alternative: None, too_large: Vec::new() })
}

/// Offers a baseline that fits, in case the user ends the search early.
fn offer_baseline(request: &PlanRequest, costs: &Costs, events: &dyn EventSink) {
    let options = &request.options;
    let is_free = options.replicas.is_none() && options.cut_after.is_none() && options.pins.is_empty();
    if !is_free || options.partitioner != Partitioner::Pipec || options.tensor_parallel.is_some() {
        return;
    }
    let planned = |kind: Partitioner| {
        let options = PlanOptions { partitioner: kind, ..options.clone() };
        solve(&request.model, costs.clone(), &options).ok()
    };
    events.found(&|| {
        let kinds = [Partitioner::DataParallel, Partitioner::Uniform, Partitioner::Single];
        let planned = kinds.into_iter().find_map(planned)?;
        let untrainable = tied_weights::refused(&costs.graph.params, &planned.plan);
        Some((planned, untrainable))
    });
}
