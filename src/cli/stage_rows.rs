//! The rows of a stage table: one per stage, or for many stages one for those alike.
//!
//! The first, the last, the busiest and the fullest stage have rows of their own. Stages are alike if they differ only in
//! their layers, their devices and their memory, of which stages with more micro-batches in flight need more; times may
//! differ by one percent.

use crate::cli::stage_table::kinds;
use compiler::plan::{Plan, Stage};

/// The most stages with a row each.
const FOLDED: usize = 24;

/// The most rows of a table.
const MOST: usize = 40;

/// The rows before the omitted ones in a table that would have more.
const FIRST: usize = 24;

/// Relative difference up to which times are alike.
const ALIKE: f64 = 0.01;

/// Stages in one row.
#[derive(Clone, Debug)]
pub struct Row<'a> {
    /// In order of the plan.
    pub stages: Vec<&'a Stage>,
    /// Their indices in the plan.
    pub places: Vec<usize>,
    /// The largest time per replica relative to that of the busiest stage.
    pub load: f64,
}

/// The rows of a plan whose stages have these link times.
pub fn rows<'a>(plan: &'a Plan, links: &[[f64; 2]]) -> Vec<Row<'a>> {
    let load = |stage: &Stage| (stage.fwd_us + stage.bwd_us) / f64::from(stage.replicas.max(1));
    let most = plan.stages.iter().map(load).fold(0.0, f64::max);
    let share = |stage: &Stage| if most > 0.0 { load(stage) / most } else { 0.0 };
    let kept = kept(plan, &load);
    let mut rows: Vec<Row<'a>> = Vec::new();
    let add = |rows: &mut Vec<Row<'a>>, at: usize, nearby: bool| {
        let stage = &plan.stages[at];
        let start = if nearby { rows.len().saturating_sub(1) } else { 0 };
        let found = rows[start..].iter_mut().find(|row| {
            let first = row.places[0];
            !kept.contains(&first) && !kept.contains(&at) && are_alike(plan, links, first, at)
        });
        match found.filter(|_| plan.stages.len() > FOLDED) {
            Some(row) => {
                row.load = row.load.max(share(stage));
                row.stages.push(stage);
                row.places.push(at);
            }
            None => rows.push(Row { stages: vec![stage], places: vec![at], load: share(stage) }),
        }
    };
    (0..plan.stages.len()).for_each(|at| add(&mut rows, at, true));
    if rows.len() > MOST {
        rows.clear();
        (0..plan.stages.len()).for_each(|at| add(&mut rows, at, false));
    }
    if rows.len() > MOST {
        let mut place = 0;
        rows.retain(|row| {
            place += 1;
            place <= FIRST || row.places.iter().any(|at| kept.contains(at))
        });
    }
    rows
}

/// The number of stages without a row.
pub fn omitted(plan: &Plan, rows: &[Row<'_>]) -> usize {
    plan.stages.len() - rows.iter().map(|row| row.stages.len()).sum::<usize>()
}

/// The first, the last, the busiest and the fullest stage.
fn kept(plan: &Plan, load: &dyn Fn(&Stage) -> f64) -> Vec<usize> {
    let largest = |of: &dyn Fn(&Stage) -> f64| {
        let all = plan.stages.iter().enumerate();
        all.reduce(|best, next| if of(next.1) > of(best.1) { next } else { best }).map(|(at, _)| at)
    };
    let ends = [0, plan.stages.len().saturating_sub(1)];
    let largest = [largest(load), largest(&|stage| stage.memory.total as f64)];
    ends.into_iter().chain(largest.into_iter().flatten()).collect()
}

fn are_alike(plan: &Plan, links: &[[f64; 2]], first: usize, second: usize) -> bool {
    let near = |a: f64, b: f64| (a - b).abs() <= ALIKE * a.abs().max(b.abs());
    let (one, other) = (&plan.stages[first], &plan.stages[second]);
    let shape = |stage: &Stage| {
        (stage.op_ids().count(), stage.replicas, stage.degree(), stage.recompute, stage.zero, kinds(plan, stage))
    };
    let times = links.get(first).zip(links.get(second));
    shape(one) == shape(other)
        && near(one.fwd_us + one.bwd_us, other.fwd_us + other.bwd_us)
        && times.is_none_or(|(one, other)| near(one[0], other[0]) && near(one[1], other[1]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::cluster::read::gpus;
    use models::choice::Setting;
    use models::zoo;
    use pipec::costs::cost_source::CostSource;
    use pipec::model;
    use pipec::plan::from_costs::solve;
    use pipec::plan::request::{PlanOptions, ScheduleChoice};
    use std::path::Path;

    fn plan(stages: u32) -> Plan {
        let options = zoo::Options { structure: true, ..zoo::Options::default() };
        let built = zoo::build("gpt", &options.with("layers", Setting::Number(80))).unwrap();
        let loaded = model::of_zoo("gpt.onnx", zoo::to_bytes(&built.model)).unwrap();
        let costs = CostSource::of_loaded(loaded, None).unwrap().on(gpus(stages, None).unwrap(), 4).unwrap();
        let schedule = Some(ScheduleChoice::Named(compiler::plan::schedule::Schedule::OneFOneB));
        let options = PlanOptions {
            replicas: Some(vec![1; stages as usize]),
            microbatches: 8,
            schedule,
            ..PlanOptions::default()
        };
        solve(Path::new("gpt.onnx"), costs, &options).unwrap().plan
    }

    #[test]
    fn stages_alike_share_a_row() {
        let few = plan(8);
        assert_eq!(rows(&few, &[]).len(), 8);
        let mut many = plan(40);
        let all = rows(&many, &[]);
        let found: Vec<usize> = all.iter().flat_map(|row| row.places.clone()).collect();
        assert_eq!(found, (0..40).collect::<Vec<_>>());
        assert!(all.len() < 20, "{}", all.len());
        let alone = |rows: &[Row<'_>], at: usize| rows.iter().any(|row| row.places == [at]);
        assert!(alone(&all, 0) && alone(&all, 39));
        // A stage that is slower is not alike, and the busiest has its own row.
        many.stages[17].fwd_us *= 3.0;
        many.stages[23].memory.total *= 2;
        let all = rows(&many, &[]);
        assert!(alone(&all, 17) && alone(&all, 23));
        assert_eq!(all.iter().find(|row| row.places == [17]).unwrap().load, 1.0);
    }

    #[test]
    fn a_table_has_a_limit() {
        let mut many = plan(40);
        let all = (0..200).map(|at| many.stages[at % 40].clone()).collect::<Vec<_>>();
        many.stages = all;
        let alternating = |many: &mut Plan, kinds: usize| {
            (0..200).for_each(|at| many.stages[at].fwd_us = 1000.0 * (1 + at % kinds) as f64);
        };
        alternating(&mut many, 2);
        many.stages.iter_mut().for_each(|stage| stage.ops = vec![(0, 9)]);
        let all = rows(&many, &[]);
        assert!(all.len() < 10 && omitted(&many, &all) == 0, "{}", all.len());
        alternating(&mut many, 199);
        let all = rows(&many, &[]);
        assert!(all.len() <= FIRST + 4);
        assert_eq!(omitted(&many, &all), 200 - all.len());
    }
}
