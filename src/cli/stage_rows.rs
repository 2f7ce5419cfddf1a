//! The rows of a stage table: one per stage, or for many stages one for those alike.
//!
//! The first, the last, the busiest and the fullest stage have rows of their own. Stages are alike if they differ only in
//! their layers, their devices and their memory, of which stages with more micro-batches in flight need more; times may
//! differ by one percent.

use crate::cli::stage_table::device_kinds;
use compiler::plan::{Plan, Stage};

/// The most stages, or workers, with a row each.
pub const MAX_UNFOLDED: usize = 24;

pub const MAX_ROWS: usize = 40;

/// The rows before the omitted ones in a table that would have more.
pub const LEADING_ROWS: usize = 24;

/// Relative difference up to which times are alike.
const MAX_DIFFERENCE: f64 = 0.01;

/// Stages in one row.
#[derive(Clone, Debug)]
pub struct Row<'a> {
    /// In order of the plan.
    pub stages: Vec<&'a Stage>,
    /// Their indices in the plan.
    pub indices: Vec<usize>,
    /// The largest time per replica relative to that of the busiest stage.
    pub load: f64,
}

/// The rows of a plan whose stages have these link times.
pub fn rows<'a>(plan: &'a Plan, links: &[[f64; 2]]) -> Vec<Row<'a>> {
    let load = |stage: &Stage| (stage.fwd_us + stage.bwd_us) / f64::from(stage.replicas.max(1));
    let max_load = plan.stages.iter().map(load).fold(0.0, f64::max);
    let share = |stage: &Stage| if max_load > 0.0 { load(stage) / max_load } else { 0.0 };
    let notable = notable_stages(plan, &load);
    let mut rows: Vec<Row<'a>> = Vec::new();
    let add = |rows: &mut Vec<Row<'a>>, at: usize, only_last: bool| {
        let stage = &plan.stages[at];
        let start = if only_last { rows.len().saturating_sub(1) } else { 0 };
        let similar_row = rows[start..].iter_mut().find(|row| {
            let first_stage = row.indices[0];
            !notable.contains(&first_stage) && !notable.contains(&at) && are_alike(plan, links, first_stage, at)
        });
        match similar_row.filter(|_| plan.stages.len() > MAX_UNFOLDED) {
            Some(row) => {
                row.load = row.load.max(share(stage));
                row.stages.push(stage);
                row.indices.push(at);
            }
            None => rows.push(Row { stages: vec![stage], indices: vec![at], load: share(stage) }),
        }
    };
    (0..plan.stages.len()).for_each(|at| add(&mut rows, at, true));
    if rows.len() > MAX_ROWS {
        rows.clear();
        (0..plan.stages.len()).for_each(|at| add(&mut rows, at, false));
    }
    if rows.len() > MAX_ROWS {
        let mut index = 0;
        rows.retain(|row| {
            index += 1;
            index <= LEADING_ROWS || row.indices.iter().any(|at| notable.contains(at))
        });
    }
    rows
}

pub fn omitted_count(plan: &Plan, rows: &[Row<'_>]) -> usize {
    plan.stages.len() - rows.iter().map(|row| row.stages.len()).sum::<usize>()
}

/// The first, the last, the busiest and the fullest stage.
fn notable_stages(plan: &Plan, load: &dyn Fn(&Stage) -> f64) -> Vec<usize> {
    let largest = |value: &dyn Fn(&Stage) -> f64| {
        let stages = plan.stages.iter().enumerate();
        stages.reduce(|best, next| if value(next.1) > value(best.1) { next } else { best }).map(|(at, _)| at)
    };
    let ends = [0, plan.stages.len().saturating_sub(1)];
    let largest = [largest(load), largest(&|stage| stage.memory.total as f64)];
    ends.into_iter().chain(largest.into_iter().flatten()).collect()
}

fn are_alike(plan: &Plan, links: &[[f64; 2]], first: usize, second: usize) -> bool {
    let are_close = |a: f64, b: f64| (a - b).abs() <= MAX_DIFFERENCE * a.abs().max(b.abs());
    let (left, right) = (&plan.stages[first], &plan.stages[second]);
    let shape = |stage: &Stage| {
        (
            stage.op_ids().count(),
            stage.replicas,
            stage.degree(),
            stage.recompute,
            stage.sharding(),
            device_kinds(plan, stage),
        )
    };
    let times = links.get(first).zip(links.get(second));
    shape(left) == shape(right)
        && are_close(left.fwd_us + left.bwd_us, right.fwd_us + right.bwd_us)
        && times.is_none_or(|(left, right)| are_close(left[0], right[0]) && are_close(left[1], right[1]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::sample_plan;
    use models::choice::Setting;
    use models::zoo;
    use pipec::plan::request::{PlanOptions, ScheduleChoice};

    fn plan(stages: u32) -> Plan {
        let options = zoo::Options { structure: true, ..zoo::Options::default() };
        let model = options.with("layers", Setting::Number(80));
        let schedule = Some(ScheduleChoice::Named(compiler::plan::schedule::Schedule::OneFOneB));
        let options = PlanOptions {
            replicas: Some(vec![1; stages as usize]),
            microbatches: 8,
            schedule,
            ..PlanOptions::default()
        };
        sample_plan::plan("gpt", &model, stages, &options)
    }

    #[test]
    fn stages_alike_share_a_row() {
        let small_plan = plan(8);
        assert_eq!(rows(&small_plan, &[]).len(), 8);
        let mut plan_of_40 = plan(40);
        let table = rows(&plan_of_40, &[]);
        let indices: Vec<usize> = table.iter().flat_map(|row| row.indices.clone()).collect();
        assert_eq!(indices, (0..40).collect::<Vec<_>>());
        assert!(table.len() < 20, "{}", table.len());
        let has_own_row = |rows: &[Row<'_>], at: usize| rows.iter().any(|row| row.indices == [at]);
        assert!(has_own_row(&table, 0) && has_own_row(&table, 39));
        // A stage that is slower is not alike, and the busiest has its own row.
        plan_of_40.stages[17].fwd_us *= 3.0;
        plan_of_40.stages[23].memory.total *= 2;
        let table = rows(&plan_of_40, &[]);
        assert!(has_own_row(&table, 17) && has_own_row(&table, 23));
        assert_eq!(table.iter().find(|row| row.indices == [17]).unwrap().load, 1.0);
    }

    #[test]
    fn a_table_has_a_limit() {
        let mut plan_of_200 = plan(40);
        let stages = (0..200).map(|at| plan_of_200.stages[at % 40].clone()).collect::<Vec<_>>();
        plan_of_200.stages = stages;
        let set_times = |plan_of_200: &mut Plan, kinds: usize| {
            (0..200).for_each(|at| plan_of_200.stages[at].fwd_us = 1000.0 * (1 + at % kinds) as f64);
        };
        set_times(&mut plan_of_200, 2);
        plan_of_200.stages.iter_mut().for_each(|stage| stage.ops = vec![(0, 9)]);
        let table = rows(&plan_of_200, &[]);
        assert!(table.len() < 10 && omitted_count(&plan_of_200, &table) == 0, "{}", table.len());
        set_times(&mut plan_of_200, 199);
        let table = rows(&plan_of_200, &[]);
        assert!(table.len() <= LEADING_ROWS + 4);
        assert_eq!(omitted_count(&plan_of_200, &table), 200 - table.len());
    }
}
