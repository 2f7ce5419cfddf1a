//! Short descriptions of a stage: layers, replicas, devices.

use crate::plan::{Plan, RecomputedOps, Stage};
use crate::text::name::short_name;
use std::collections::BTreeMap;

/// Default maximum length of a layer description, in characters.
pub const LAYERS: usize = 44;

/// The stage's layers by module name, shortened to the path depth that fits.
pub fn layers(stage: &Stage) -> String {
    layers_within(stage, LAYERS)
}

/// Like [`layers`], with at most `max_chars` characters (at least 8).
pub fn layers_within(stage: &Stage, max_chars: usize) -> String {
    let max_chars = max_chars.max(8);
    let names: Vec<&str> = stage.modules.iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
    if names.is_empty() {
        let (first, last) = (stage.op_names.first(), stage.op_names.last());
        return match (first, last) {
            (Some(first), Some(last)) if first != last => span(first, last, max_chars),
            (Some(first), _) => cut(first, max_chars),
            _ => String::new(),
        };
    }
    let depth = names.iter().map(|name| name.split('.').count()).max().unwrap_or(1);
    // Prefers depths that name individual layers over their containers.
    let at = |depth: usize, layers: bool| {
        let paths: Vec<String> = names.iter().map(|name| cut_path(name, depth, layers)).collect();
        runs(&leaf_paths(paths)).join(", ")
    };
    let deepest_first =
        (1..=depth).rev().map(|depth| (depth, true)).chain((1..=depth).rev().map(|depth| (depth, false)));
    for (depth, layers) in deepest_first {
        let text = at(depth, layers);
        if text.chars().count() <= max_chars {
            return short_name(&text);
        }
    }
    span(names[0], names[names.len() - 1], max_chars)
}

/// The first `depth` components of a module path; with `layers`, at least up to its first number.
fn cut_path(name: &str, depth: usize, layers: bool) -> String {
    let parts: Vec<&str> = name.split('.').collect();
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let layer_index = parts.iter().position(is_number).filter(|_| layers);
    parts[..parts.len().min(depth.max(layer_index.map_or(0, |at| at + 1)))].join(".")
}

/// Unique names without containers of other names: ops outside the layers do not describe a stage.
fn leaf_paths(names: Vec<String>) -> Vec<String> {
    let is_prefix = |outer: &str, inner: &str| inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with('.'));
    let mut leaf_names: Vec<String> = Vec::new();
    for name in &names {
        if !leaf_names.contains(name) && !names.iter().any(|other| is_prefix(name, other)) {
            leaf_names.push(name.clone());
        }
    }
    leaf_names
}

/// Merges consecutive numbers: `blocks.0, blocks.1, blocks.2` becomes `blocks.0-2`.
fn runs(names: &[String]) -> Vec<String> {
    let number = |name: &str| {
        let (module, number) = name.rsplit_once('.')?;
        // A number with leading zeros is a name.
        number.parse::<u32>().ok().filter(|n| n.to_string() == number).map(|number| (module.to_string(), number))
    };
    // The first name, and the module with the last number.
    let mut runs: Vec<(&String, Option<(String, u32)>)> = Vec::new();
    for name in names {
        let numbered = number(name);
        match (runs.last_mut(), numbered) {
            (Some((_, Some((module, last)))), Some((other, next))) if *module == other && *last + 1 == next => {
                *last = next
            }
            (_, numbered) => runs.push((name, numbered)),
        }
    }
    let format_runs = |(first, last): (&String, Option<(String, u32)>)| match last {
        Some((module, last)) if *first != format!("{module}.{last}") => format!("{first}-{last}"),
        _ => first.clone(),
    };
    runs.into_iter().map(format_runs).collect()
}

/// The replicas of the stage: `2`, or `2 of 8` for tensor-parallel groups of 8 devices.
pub fn replicas(stage: &Stage) -> String {
    match stage.degree() {
        1 => stage.replicas.to_string(),
        degree => format!("{} of {degree}", stage.replicas),
    }
}

fn span(first: &str, last: &str, max_chars: usize) -> String {
    format!("{} … {}", cut(first, max_chars / 2 - 2), cut(last, max_chars / 2 - 2))
}

fn cut(name: &str, max_chars: usize) -> String {
    let name = short_name(name);
    match name.chars().count() {
        length if length <= max_chars => name,
        length => format!("…{}", name.chars().skip(length + 1 - max_chars).collect::<String>()),
    }
}

/// The numbers of the stages with as many replicas.
pub fn by_replicas(plan: &Plan) -> BTreeMap<u32, Vec<u32>> {
    let mut stages: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    plan.stages.iter().for_each(|stage| stages.entry(stage.replicas).or_default().push(stage.id.0));
    stages
}

/// Merges consecutive device numbers: `0-3, 8`.
pub fn ranges(devices: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &device in devices {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == device => *last = device,
            _ => parts.push((device, device)),
        }
    }
    let show = |&(from, to): &(u32, u32)| if from == to { from.to_string() } else { format!("{from}-{to}") };
    parts.iter().map(show).collect::<Vec<_>>().join(", ")
}

/// The most stages whose numbers are listed one by one.
const LISTED: usize = 12;

/// The most runs of stages in a folded list.
const MOST_RUNS: usize = 6;

/// One number per stage, if there are many stages folded into runs.
///
/// ```text
/// 64 in stages 0-960, 63 down to 1 in stages 961-1023
/// ```
pub fn per_stage(numbers: &[u32]) -> String {
    if numbers.len() <= LISTED {
        return numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    }
    let runs = number_runs(numbers);
    let describe = |&(from, to): &(usize, usize)| {
        let what = match (numbers[from], numbers[to]) {
            (first, last) if first == last => first.to_string(),
            (first, last) if first > last => format!("{first} down to {last}"),
            (first, last) => format!("{first} up to {last}"),
        };
        place(what, from, to)
    };
    match &runs[..] {
        [_] if numbers[0] == numbers[numbers.len() - 1] => numbers[0].to_string(),
        runs if runs.len() <= MOST_RUNS => runs.iter().map(describe).collect::<Vec<_>>().join(", "),
        [first, .., last] => {
            let (from, to) = (first.1 + 1, last.0 - 1);
            let middle = &numbers[from..=to];
            let (min, max) = (middle.iter().min().unwrap_or(&0), middle.iter().max().unwrap_or(&0));
            [describe(first), place(format!("{min} to {max}"), from, to), describe(last)].join(", ")
        }
        _ => String::new(),
    }
}

fn place(what: String, from: usize, to: usize) -> String {
    if from == to { format!("{what} in stage {from}") } else { format!("{what} in stages {from}-{to}") }
}

/// Runs of equal numbers, and of at least three that rise or fall by one; first and last index.
fn number_runs(numbers: &[u32]) -> Vec<(usize, usize)> {
    let (mut runs, mut from) = (Vec::new(), 0);
    while from < numbers.len() {
        let end = |step: i64| {
            let follows = |to: &usize| i64::from(numbers[to + 1]) - i64::from(numbers[*to]) == step;
            (from..numbers.len() - 1).take_while(follows).last().map_or(from, |to| to + 1)
        };
        let slope = [-1, 1].map(end).into_iter().max().filter(|to| to - from >= 2);
        let to = slope.unwrap_or(from).max(end(0));
        runs.push((from, to));
        from = to + 1;
    }
    runs
}

/// The memory-saving options of a stage: `, recomputed, ZeRO 1`, or nothing. `, 40 of 162 ops recomputed` for a part.
pub fn sparing(stage: &Stage) -> String {
    let zero = if stage.zero > 0 { format!(", ZeRO {}", stage.sharding()) } else { String::new() };
    match recomputed(stage) {
        text if text.is_empty() => zero,
        text => format!(", {text}{zero}"),
    }
}

/// What a stage recomputes: `recomputed`, `40 of 162 ops recomputed`, `3 layers recomputed`, or nothing.
pub fn recomputed(stage: &Stage) -> String {
    match stage.recomputed.filter(|_| stage.recompute) {
        Some(RecomputedOps { layers: Some(1), .. }) => "1 layer recomputed".to_string(),
        Some(RecomputedOps { layers: Some(layers), .. }) => format!("{layers} layers recomputed"),
        Some(RecomputedOps { ops, .. }) => format!("{ops} of {} ops recomputed", stage.op_ids().count()),
        None if stage.recompute => "recomputed".to_string(),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_devices_are_merged() {
        assert_eq!(ranges(&[0, 1, 2, 3, 8, 10, 11]), "0-3, 8, 10-11");
        assert_eq!(ranges(&[]), "");
    }

    #[test]
    fn numbers_of_many_stages_are_folded() {
        let warmup = |stages: u32, most: u32| (0..stages).map(|at| most.min(stages - at)).collect::<Vec<_>>();
        assert_eq!(per_stage(&[4, 3, 2, 1]), "4, 3, 2, 1");
        assert_eq!(per_stage(&[1; 1000]), "1");
        assert_eq!(per_stage(&warmup(1024, 64)), "64 in stages 0-960, 63 down to 1 in stages 961-1023");
        assert_eq!(per_stage(&warmup(16, 100)), "16 down to 1 in stages 0-15");
        let two = [vec![2; 10], vec![5], vec![1; 5]].concat();
        assert_eq!(per_stage(&two), "2 in stages 0-9, 5 in stage 10, 1 in stages 11-15");
        let mixed: Vec<u32> = (0..100).map(|at| if at % 2 == 0 { 7 } else { at }).collect();
        assert_eq!(per_stage(&mixed), "7 in stage 0, 1 to 97 in stages 1-98, 99 in stage 99");
        assert_eq!(per_stage(&[]), "");
    }

    #[test]
    fn consecutive_layers_are_merged() {
        let format_runs = |names: &[&str]| runs(&names.iter().map(ToString::to_string).collect::<Vec<_>>()).join(", ");
        assert_eq!(format_runs(&["wte", "blocks.0", "blocks.1", "blocks.2", "ln_f"]), "wte, blocks.0-2, ln_f");
        assert_eq!(format_runs(&["a.0", "b.1", "b.3", "b.4", "a.1"]), "a.0, b.1, b.3-4, a.1");
        assert_eq!(format_runs(&["a-b.9", "a-b.10", "a.01", "a.02", "3", "4"]), "a-b.9-10, a.01, a.02, 3, 4");
    }

    #[test]
    fn stages_are_named_by_layers_not_containers() {
        let paths = [
            "model",
            "model.embed_tokens",
            "model.layers.0.self_attn.q_proj",
            "model.layers.0.mlp.act",
            "model.layers.1.mlp",
        ];
        let format_runs =
            |depth| runs(&leaf_paths(paths.iter().map(|name| cut_path(name, depth, true)).collect())).join(", ");
        assert_eq!(format_runs(1), "model.layers.0-1");
        assert_eq!(format_runs(2), "model.embed_tokens, model.layers.0-1");
        assert_eq!(
            format_runs(4),
            "model.embed_tokens, model.layers.0.self_attn, model.layers.0.mlp, model.layers.1.mlp"
        );
        assert_eq!(cut_path("model.layers.0.mlp", 1, false), "model");
    }

    #[test]
    fn long_names_keep_their_ends() {
        assert_eq!(cut("abcdefgh", 4), "…fgh");
        assert_eq!(cut("abc", 4), "abc");
    }
}
