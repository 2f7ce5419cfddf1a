//! What a plan states besides its times and memory: names, modules, operations and the bottleneck. As all checks, this
//! shares no code with the planner.

use crate::plan::Plan;
use crate::plan::check::error::PlanFault;
use crate::plan::check::verify::differs;
use crate::plan::problem::Problem;
use std::collections::HashSet;

/// The faults of a plan that is a solution of `problem` with this bottleneck.
pub fn faults(problem: &Problem, plan: &Plan, bottleneck: &str) -> Vec<PlanFault> {
    let ops = &problem.graph.ops;
    let mut faults = Vec::new();
    let mut compare = |what: String, said: String, found: String| {
        if said != found {
            faults.push(PlanFault::Figure { what, said, found });
        }
    };
    // Matrix products, which are nearly all operations, have two gradients of the same size.
    let has_backward = problem.schedule.trains() && ops.iter().any(|op| op.bwd_us > 0.0);
    let mut operations = 0.0;
    for (at, stage) in plan.stages.iter().enumerate() {
        let (mut seen, mut modules, mut names) = (HashSet::new(), Vec::new(), Vec::new());
        for op in stage.op_ids().map(|op| &ops[op as usize]) {
            names.push(if op.name.is_empty() { op.id.to_string() } else { op.name.clone() });
            modules.extend((!op.module.is_empty() && seen.insert(&op.module)).then_some(&*op.module));
            let gradients = if has_backward { 2 - op.omitted_grads.min(2) } else { 0 };
            operations += op.flops * f64::from(1 + gradients);
        }
        compare(format!("op_names of stage {at}"), stage.op_names.join(", "), names.join(", "));
        compare(format!("modules of stage {at}"), stage.modules.join(", "), modules.join(", "));
    }
    // Without its own limits a pipeline would have another bottleneck, which follows theirs.
    let said = plan.predicted.bottleneck.rsplit("; with higher limits: ").next().unwrap_or_default();
    compare("predicted.bottleneck".to_string(), said.to_string(), bottleneck.to_string());
    let flops = f64::from(plan.schedule.microbatches) * operations;
    if differs(plan.predicted.flops, flops) {
        compare("predicted.flops".to_string(), plan.predicted.flops.to_string(), flops.to_string());
    }
    faults
}
