//! Computes the plan of a request.

use crate::error::Error;
use crate::events::EventSink;
use crate::plan::batch_search;
use crate::plan::custom_schedule;
use crate::plan::from_costs::solve;
use crate::plan::remedies::{Size, with_remedies};
use crate::plan::request::{PlanRequest, ScheduleChoice};
use crate::plan::request_costs;
use crate::plan::result::PlanResult;
use crate::plan::tied_weights;

/// Plans a model.
pub fn plan(request: &PlanRequest, events: &dyn EventSink) -> Result<PlanResult, Error> {
    if batch_search::is_requested(request) {
        return batch_search::plan(request, events);
    }
    request.options.validate()?;
    custom_schedule::open(request.options.schedule.as_ref().and_then(ScheduleChoice::file), events)?;
    let costs = request_costs::costs(request, events)?;
    request.protect_output(&costs.model)?;
    let params = costs.graph.params.clone();
    let size = Size { ops: costs.graph.ops.len(), devices: costs.cluster.devices(), micro_batch: costs.micro_batch };
    let planned =
        solve(&request.model, costs, &request.options).map_err(|error| with_remedies(request, size, error))?;
    let untrainable = tied_weights::refused(&params, &planned.plan);
    tied_weights::aged(&params, &planned.plan).iter().for_each(|note| events.note(note));
    Ok(PlanResult { planned, untrainable, tried: Vec::new() })
}
