//! Settings that determine the result of a run, besides its plan. A checkpoint records them as text, and a resumed run must match.

use crate::loss::CountedLoss;
use crate::train::prepared::Prepared;
use crate::train::task::Task;
use compiler::graph::hash::hash;
use compiler::text::name::short_name;
use runtime::data::RowOrder;
use runtime::exec::moving_average::Statistics;
use runtime::optim::lr_schedule::{Rate, Shape};
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::{LossScaling, Policy, Staleness};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

/// The setting that checkpoints of older versions do not have.
pub const DATA: &str = "sha256 of the data";

/// The hash of the graph.
pub const GRAPH: &str = "the graph of the model";
/// The learning-rate schedule. Checkpoints of older versions have it under this name.
pub const LEARNING_RATE: &str = "learning rate";
/// Names of parameters that are not trained.
pub const FROZEN: &str = "frozen parameters";
/// The element type of the run.
pub const PRECISION: &str = "precision";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunSetting {
    /// Its text in checkpoints.
    pub text: String,
    /// Its text in checkpoints of older versions.
    old_text: String,
}

impl RunSetting {
    fn new(text: impl ToString) -> RunSetting {
        RunSetting { text: text.to_string(), old_text: text.to_string() }
    }

    fn with_old_text(text: String, old_text: impl Debug) -> RunSetting {
        RunSetting { text, old_text: format!("{old_text:?}") }
    }
}

/// The settings of a run, by name.
pub fn run_settings(task: &Task<'_>, prepared: &Prepared) -> BTreeMap<String, RunSetting> {
    let Policy { clip_norm, statistics, loss_scaling, staleness } = task.policy;
    let Optimizer { rule, rate } = task.optimizer;
    let LossScaling { first: initial, every } = loss_scaling;
    let order = match task.order {
        RowOrder::InOrder => "in order",
        RowOrder::Shuffled { .. } => "shuffled",
    };
    let (loss, unbiased) = (prepared.loss, task.unbiased);
    let counted = CountedLoss::One(loss, task.class_dim).to_text().unwrap_or_default();
    let scale = format!("{} at first, doubled after {every} good steps", number_text(initial));
    let settings = [
        (GRAPH, RunSetting::new(hash(&task.loaded.model.graph))),
        ("optimizer", RunSetting::with_old_text(rule_text(rule), rule)),
        (LEARNING_RATE, RunSetting::with_old_text(rate_text(*rate), rate)),
        ("data rows", RunSetting::new(prepared.rows)),
        (DATA, RunSetting::new(prepared.data_digest().iter().map(|byte| format!("{byte:02x}")).collect::<String>())),
        ("batch", RunSetting::new(prepared.batch)),
        ("data order", RunSetting::new(order)),
        ("seed", RunSetting::new(task.request.seed)),
        ("loss", RunSetting { text: counted, old_text: format!("{loss:?}, axis of classes {:?}", task.class_dim) }),
        (PRECISION, RunSetting::new(task.dtype.map_or("the model's", |dtype| dtype.name()))),
        ("gradient clipping", RunSetting::new(clip_norm.map_or("none".to_string(), |norm| norm.to_string()))),
        (
            "running statistics",
            RunSetting {
                text: statistics_text(statistics, unbiased),
                old_text: format!("{statistics:?}, unbiased {unbiased}"),
            },
        ),
        ("loss scaling", RunSetting::with_old_text(scale, loss_scaling)),
        (FROZEN, RunSetting::new(task.loaded.frozen().join(","))),
        ("staleness", RunSetting::with_old_text(staleness_text(staleness), staleness)),
    ];
    settings.into_iter().map(|(name, setting)| (name.to_string(), setting)).collect()
}

/// Describes the differences.
pub fn differences(before: &BTreeMap<String, String>, now: &BTreeMap<String, RunSetting>) -> Vec<String> {
    let names: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
    let quote = |of: Option<&str>| match of {
        None => "nothing".to_string(),
        Some("") => "none".to_string(),
        Some(value) => format!("`{}`", short_name(value)),
    };
    let describe = |name: &String| {
        let (old, new) = (before.get(name), now.get(name));
        let is_same = old.zip(new).is_some_and(|(old, new)| *old == new.text || *old == new.old_text);
        let (old, new) = (quote(old.map(String::as_str)), quote(new.map(|setting| setting.text.as_str())));
        (!is_same).then(|| format!("{}: the checkpoint has {old}, this run {new}", short_name(name)))
    };
    names.into_iter().filter(|name| *name != DATA || before.contains_key(DATA)).filter_map(describe).collect()
}

/// The optimizer, in the terms of the flags.
fn rule_text(rule: &Rule) -> String {
    let with = |name: &str, numbers: &[(&str, f64)]| {
        let numbers = numbers.iter().map(|(name, value)| format!(", {name} {}", number_text(*value)));
        name.to_string() + &numbers.collect::<String>()
    };
    match *rule {
        Rule::Sgd { learning_rate, momentum, nesterov, weight_decay } => {
            let name = if nesterov { "sgd, nesterov" } else { "sgd" };
            with(name, &[("lr", learning_rate), ("momentum", momentum), ("weight decay", weight_decay)])
        }
        Rule::Adam { learning_rate, betas: (first, second), epsilon, weight_decay, decoupled } => {
            let name = if decoupled { "adamw" } else { "adam" };
            let betas = format!("{name}, betas {},{}", number_text(first), number_text(second));
            with(&betas, &[("lr", learning_rate), ("eps", epsilon), ("weight decay", weight_decay)])
        }
        Rule::RmsProp { learning_rate, alpha, epsilon, weight_decay, momentum } => {
            let more = [("momentum", momentum), ("eps", epsilon), ("weight decay", weight_decay)];
            with("rmsprop", &[&[("lr", learning_rate), ("alpha", alpha)][..], &more].concat())
        }
        Rule::Adagrad { learning_rate, decay, epsilon, weight_decay } => {
            let more = [("lr decay", decay), ("eps", epsilon), ("weight decay", weight_decay)];
            with("adagrad", &[&[("lr", learning_rate)][..], &more].concat())
        }
    }
}

/// The learning-rate schedule, in the form of `--lr-schedule`.
fn rate_text(Rate { warmup, shape }: Rate) -> String {
    let prefix = if warmup > 0 { format!("warmup:{warmup},") } else { String::new() };
    prefix
        + &match shape {
            Shape::Constant => "constant".to_string(),
            Shape::Step { every, factor } => format!("step:{every}:{}", number_text(factor)),
            Shape::Cosine { floor } => format!("cosine:{}", number_text(floor)),
            Shape::Linear { floor } => format!("linear:{}", number_text(floor)),
        }
}

fn statistics_text(statistics: Statistics, unbiased: bool) -> String {
    let frequency = match statistics {
        Statistics::Batch => "for each micro-batch",
        Statistics::Deferred { .. } => "once for each minibatch",
    };
    format!("{frequency}, variances as {} has them", if unbiased { "torch" } else { "onnx" })
}

fn staleness_text(staleness: Staleness) -> String {
    match staleness {
        Staleness::None => "as the schedule does".to_string(),
        Staleness::Predict => "predict".to_string(),
        Staleness::PipeMare { anneal } => format!("pipemare, anneal {anneal}"),
    }
}

/// A number with all significant digits.
fn number_text(value: f64) -> String {
    if value != 0.0 && value.abs() < 1e-3 { format!("{value:e}") } else { value.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> BTreeMap<String, RunSetting> {
        pairs.iter().map(|(name, value)| (name.to_string(), RunSetting::new(value))).collect()
    }

    fn to_texts(settings: &BTreeMap<String, RunSetting>) -> BTreeMap<String, String> {
        settings.iter().map(|(name, setting)| (name.clone(), setting.text.clone())).collect()
    }

    #[test]
    fn differences_have_both_values() {
        let before = to_texts(&settings(&[("batch", "4"), ("frozen parameters", ""), ("old", "1"), ("seed", "0")]));
        let now = settings(&[("batch", "8"), ("frozen parameters", "a"), ("seed", "0")]);
        let text = [
            "batch: the checkpoint has `4`, this run `8`",
            "frozen parameters: the checkpoint has none, this run `a`",
            "old: the checkpoint has `1`, this run nothing",
        ];
        assert_eq!(differences(&before, &now), text);
        assert!(differences(&to_texts(&now), &now).is_empty());
        let with = |data: &str| settings(&[("seed", "0"), (DATA, data)]);
        let text = format!("{DATA}: the checkpoint has `ab`, this run `cd`");
        assert_eq!(differences(&to_texts(&with("ab")), &with("cd")), [text]);
        assert!(
            differences(&to_texts(&settings(&[("seed", "0")])), &with("cd")).is_empty(),
            "an older version did not write it"
        );
    }

    #[test]
    fn words_are_those_of_the_flags() {
        let sgd = Rule::Sgd { learning_rate: 0.1, momentum: 0.9, nesterov: true, weight_decay: 1e-4 };
        assert_eq!(rule_text(&sgd), "sgd, nesterov, lr 0.1, momentum 0.9, weight decay 1e-4");
        let adam =
            Rule::Adam { learning_rate: 0.001, betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.0, decoupled: true };
        assert_eq!(rule_text(&adam), "adamw, betas 0.9,0.999, lr 0.001, eps 1e-8, weight decay 0");
        assert_eq!(rate_text(Rate { warmup: 20, shape: Shape::Cosine { floor: 0.1 } }), "warmup:20,cosine:0.1");
        assert_eq!(rate_text(Rate::CONSTANT), "constant");
        // A checkpoint of an older version has the same setting in another form.
        let now = BTreeMap::from([("optimizer".to_string(), RunSetting::with_old_text(rule_text(&adam), &adam))]);
        let older = BTreeMap::from([("optimizer".to_string(), format!("{adam:?}"))]);
        assert!(differences(&older, &now).is_empty());
    }
}
