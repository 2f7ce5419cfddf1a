//! The differences between two plans in words.

use compiler::plan::diff::Diff;
use compiler::plan::{Plan, Stage};
use compiler::text::quantity;

/// What differs: the request first, then the stages, then what follows from them.
pub fn words(left: &Plan, right: &Plan, diff: &Diff) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut add = |word: String| {
        if !words.contains(&word) {
            words.push(word);
        }
    };
    let known_field = |field: &str| {
        let object = field.split('.').next().unwrap_or_default();
        let exact = FIELD_WORDS.iter().find(|(name, _)| *name == field);
        exact.or_else(|| FIELD_WORDS.iter().find(|(name, _)| *name == object)).map(|(name, _)| *name)
    };
    for (name, word) in FIELD_WORDS {
        let fields = diff.fields.iter().filter(|field| known_field(field) == Some(name));
        for field in fields {
            match name {
                "stages" => stage_words(left, right, diff).into_iter().map(str::to_string).for_each(&mut add),
                "options" => add(option_words(field.strip_prefix("options.").unwrap_or_default())),
                _ => add(word.to_string()),
            }
        }
    }
    diff.fields.iter().filter(|field| known_field(field).is_none()).for_each(|field| add(format!("`{field}`")));
    words
}

/// Fields of a plan, or the objects that hold them, and the words for them.
const FIELD_WORDS: [(&str, &str); 36] = [
    ("schema", "version of the file"),
    ("model", "model"),
    ("model.import", "import settings"),
    ("profile", "costs"),
    ("cluster", "cluster"),
    ("cluster.memory_per_device", "memory limit"),
    ("cost", "cost model"),
    ("objective", "objective"),
    ("dtype", "precision"),
    ("element_types", "precision"),
    ("optimizer", "optimizer"),
    ("schedule", "schedule"),
    ("schedule.micro_batch", "micro-batch"),
    ("schedule.microbatches", "micro-batches"),
    ("schedule.chunks", "stages per rank"),
    ("options", ""),
    ("seed", "seed"),
    ("stages", ""),
    ("schedule.in_flight", "in-flight limits"),
    ("schedule.weight_versions", "weight versions"),
    ("schedule.pending_weight_grads", "delayed weight gradients"),
    ("cluster.idle", "devices without a stage"),
    ("edges", "messages"),
    ("predicted", "predicted time"),
    ("predicted.minibatch_us", "predicted time"),
    ("predicted.throughput_per_s", "predicted throughput"),
    ("predicted.flops", "operations"),
    ("predicted.recomputed_flops", "operations"),
    ("predicted.bottleneck", "bottleneck"),
    ("predicted.busiest_link", "busiest link"),
    ("predicted.bubble", "bubble"),
    ("lower_bound_us", "lower bound"),
    ("proven_optimal", "proof of optimality"),
    ("baselines", "baselines"),
    ("search", "search"),
    ("warnings", "warnings"),
];

/// An option as its flag, or in words if it has none.
fn option_words(name: &str) -> String {
    match name {
        "costs" => "costs".to_string(),
        "optimizer_state" => "optimizer".to_string(),
        "bucket_bytes" => "bucket size".to_string(),
        "shard_degree" => "`--zero`".to_string(),
        _ => format!("`--{}`", name.replace('_', "-")),
    }
}

fn stage_words(left: &Plan, right: &Plan, diff: &Diff) -> Vec<&'static str> {
    let mut words = Vec::new();
    if left.stages.len() != right.stages.len() {
        words.push("number of stages");
    }
    if !diff.moved.is_empty() {
        words.push("cuts");
    }
    let pairs = || left.stages.iter().zip(&right.stages);
    let differ = |is_same: &dyn Fn(&Stage, &Stage) -> bool| !pairs().all(|(before, after)| is_same(before, after));
    type Differs<'a> = &'a dyn Fn(&Stage, &Stage) -> bool;
    let properties: [(&str, Differs<'_>); 7] = [
        ("replicas", &|before, after| before.replicas == after.replicas),
        ("tensor-parallel degree", &|before, after| before.degree() == after.degree()),
        ("devices of stages", &|before, after| before.devices == after.devices),
        ("recomputation", &|before, after| before.recomputed_op_ids().eq(after.recomputed_op_ids())),
        ("ZeRO", &|before, after| before.sharding() == after.sharding()),
        ("times of stages", &|before, after| (before.fwd_us, before.bwd_us) == (after.fwd_us, after.bwd_us)),
        ("memory of stages", &|before, after| before.memory == after.memory),
    ];
    words.extend(properties.into_iter().filter(|(_, is_same)| differ(is_same)).map(|(word, _)| word));
    if words.is_empty() {
        words.push("details of stages");
    }
    words
}

/// Which plan is faster, by samples per second; batches may differ.
pub fn faster(plans: [&Plan; 2], names: [&str; 2]) -> Option<String> {
    let [before, after] = plans.map(|plan| plan.predicted.throughput_per_s);
    if !(before > 0.0 && after > 0.0) || before == after {
        return None;
    }
    let [first, second] = names;
    let (faster_name, slower_name, ratio) =
        if after > before { (second, first, after / before) } else { (first, second, before / after) };
    let [slower_rate, faster_rate] = [before.min(after), before.max(after)].map(quantity::samples);
    let ratio = quantity::short(ratio);
    Some(format!(
        "{faster_name} is {ratio} times as fast as {slower_name}: {faster_rate} samples/s in place of {slower_rate}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::sample_plan;
    use compiler::plan::diff::diff;
    use models::zoo;
    use pipec::plan::request::PlanOptions;
    use serde_json::Value;

    #[test]
    fn every_field_of_a_plan_has_words() {
        let plan = sample_plan::plan("mlp", &zoo::Options::default(), 4, &PlanOptions::default());
        let words_of = |diff: &Diff| words(&plan, &plan, diff).join(", ");
        let Value::Object(fields) = serde_json::to_value(&plan).unwrap() else { panic!() };
        for (name, value) in fields {
            let names = match &value {
                Value::Object(object) if name != "options" => {
                    object.keys().map(|object| format!("{name}.{object}")).collect()
                }
                _ => vec![name],
            };
            for name in names.into_iter().filter(|name| name != "options") {
                let words = words_of(&Diff { fields: vec![name.clone()], ..Diff::default() });
                assert!(!words.is_empty() && !words.contains('_'), "{name}: {words}");
            }
        }
        let fields = ["options.target", "options.bucket_bytes"].map(str::to_string).to_vec();
        assert_eq!(words_of(&Diff { fields, ..Diff::default() }), "`--target`, bucket size");
        let mut changed = plan.clone();
        changed.stages[0].memory.total += 1;
        let diff = diff(&plan, &changed);
        assert_eq!(words(&plan, &changed, &diff), ["memory of stages"]);
        assert_eq!(faster([&plan, &changed], ["a", "b"]), None);
        changed.predicted.throughput_per_s = plan.predicted.throughput_per_s * 2.0;
        assert!(faster([&plan, &changed], ["a", "b"]).unwrap().starts_with("b is 2.000 times as fast as a: "));
    }
}
