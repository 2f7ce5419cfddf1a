//! What does not fit in memory in a search of configurations, and what would.

use crate::error::Error;
use crate::plan::configuration_search::Search;
use crate::plan::parallel::in_parallel;
use crate::plan::variant::Variant;
use compiler::partition::search::layouts::Layouts;
use compiler::plan::problem::Problem;
use compiler::plan::zero::Zero;
use compiler::text::quantity;

impl Search<'_> {
    /// Simple kinds of plans that do not fit, with what they need.
    pub fn too_large_kinds(&self) -> Vec<String> {
        let (variants, zero) = (&self.variants, self.smallest_zero());
        let alone = |variant: &&Variant| variant.groups.is_none();
        let Some(smallest) = variants.iter().find(alone) else { return Vec::new() };
        let fits = |is_pipeline: bool| {
            let mut estimates = variants.iter().filter(alone).flat_map(|variant| &variant.estimates);
            estimates.any(|estimate| (estimate.layout.ranks > 1) == is_pipeline)
        };
        let mut kinds = Vec::new();
        for (name, is_pipeline) in [("data parallelism", false), ("a pipeline without tensor parallelism", true)] {
            if fits(is_pipeline) || (is_pipeline && smallest.whole.cluster.devices() < 2) {
                continue;
            }
            let mut problem = smallest.whole.clone();
            if !is_pipeline {
                problem.constraints.most_stages = Some(1);
            }
            let least = Layouts::of(&problem).least_memory(&self.schedules, zero, self.request.options.chunks);
            if let Some((_, bytes)) = least {
                let (size, bytes) = (smallest.micro_batch, quantity::bytes(bytes));
                kinds.push(format!(
                    "{name} does not fit: it needs {bytes} per device, with micro-batches of {size} and ZeRO {zero}"
                ));
            }
        }
        kinds
    }

    /// The error if no layout fits: what the smallest one needs, and how many devices would do.
    pub fn too_large(&self) -> Option<Error> {
        let (schedules, zero, chunks) = (&self.schedules, self.smallest_zero(), self.request.options.chunks);
        let least_of = |problem: &Problem| Layouts::of(problem).least_memory(schedules, zero, chunks);
        let smallest = self.variants.iter().map(|variant| variant.micro_batch).min()?;
        let variants: Vec<&Variant> = self.variants.iter().filter(|variant| variant.micro_batch == smallest).collect();
        let needs = in_parallel(&variants, |variant| least_of(variant.problem()));
        let found = variants.into_iter().zip(needs).filter_map(|(variant, need)| Some((variant, need?)));
        let (variant, (layout, bytes)) = found.min_by_key(|(_, (_, bytes))| *bytes)?;
        let limit = variant.problem().limit_of(0..variant.problem().cluster.devices())?;
        let more = [2u32, 4, 8, 16].into_iter().find(|times| {
            let mut more = variant.problem().clone();
            if let Some(level) = more.cluster.levels.last_mut() {
                level.count = level.count.saturating_mul(*times);
            }
            least_of(&more).is_some_and(|(_, bytes)| bytes <= limit)
        });
        let degree = variant.whole.shared.first().map_or(1, |groups| groups.devices);
        let devices = variant.whole.cluster.devices();
        let more = more.map(|times| {
            format!("; {} of these devices are enough", quantity::count(u64::from(devices) * u64::from(times)))
        });
        let file = self.request.model.display();
        let why = format!(
            "no plan fits in {} per device: the smallest has micro-batches of {smallest}, tensor-parallel degree {degree}, \
             {} stages of {} replicas and ZeRO {zero}, and needs {}",
            quantity::bytes(limit),
            layout.ranks * layout.chunks,
            layout.replicas,
            quantity::bytes(bytes)
        );
        let help = format!(
            "`--memory {}` is the smallest memory limit for which a plan was found{}",
            quantity::at_least(bytes),
            more.unwrap_or_default()
        );
        Some(Error::infeasible(format!("no feasible plan for {file}")).because(why).with_help(help))
    }

    /// The ZeRO that needs the least memory.
    fn smallest_zero(&self) -> Zero {
        self.zero.least(self.request.options.target)
    }
}
