//! What a stage holds, in few words: its layers, its replicas, its devices.

use crate::import::onnx::name::shown;
use crate::plan::Stage;

/// Characters that the layers of a stage may take where there is room.
pub const LAYERS: usize = 44;

/// The stage's layers in the user's module names, cut to the depth at which they fit.
pub fn layers(stage: &Stage) -> String {
    layers_within(stage, LAYERS)
}

/// The same in at most so many characters, or a few where there are fewer.
pub fn layers_within(stage: &Stage, most: usize) -> String {
    let most = most.max(8);
    let names: Vec<&str> = stage.modules.iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
    if names.is_empty() {
        let (first, last) = (stage.op_names.first(), stage.op_names.last());
        return match (first, last) {
            (Some(first), Some(last)) if first != last => span(first, last, most),
            (Some(first), _) => cut(first, most),
            _ => String::new(),
        };
    }
    let depth = names.iter().map(|name| name.split('.').count()).max().unwrap_or(1);
    for depth in (1..=depth).rev() {
        let mut kept: Vec<String> = Vec::new();
        for name in &names {
            let name = name.split('.').take(depth).collect::<Vec<_>>().join(".");
            if !kept.contains(&name) {
                kept.push(name);
            }
        }
        let text = runs(&kept).join(", ");
        if text.chars().count() <= most {
            return shown(&text).into_owned();
        }
    }
    span(names[0], names[names.len() - 1], most)
}

/// Names with those that count on drawn together: `blocks.0, blocks.1, blocks.2` is `blocks.0-2`.
fn runs(names: &[String]) -> Vec<String> {
    let number = |name: &str| {
        let (module, number) = name.rsplit_once('.')?;
        // A number with zeros ahead is a name.
        number.parse::<u32>().ok().filter(|n| n.to_string() == number).map(|number| (module.to_string(), number))
    };
    // The first name, and the module with the last number.
    let mut runs: Vec<(&String, Option<(String, u32)>)> = Vec::new();
    for name in names {
        let found = number(name);
        match (runs.last_mut(), found) {
            (Some((_, Some((module, last)))), Some((other, next))) if *module == other && *last + 1 == next => {
                *last = next
            }
            (_, found) => runs.push((name, found)),
        }
    }
    let told = |(first, last): (&String, Option<(String, u32)>)| match last {
        Some((module, last)) if *first != format!("{module}.{last}") => format!("{first}-{last}"),
        _ => first.clone(),
    };
    runs.into_iter().map(told).collect()
}

/// The stage's replicas: `2`, or `2 of 8` where so many devices share each.
pub fn replicas(stage: &Stage) -> String {
    match stage.degree() {
        1 => stage.replicas.to_string(),
        degree => format!("{} of {degree}", stage.replicas),
    }
}

fn span(first: &str, last: &str, most: usize) -> String {
    format!("{} … {}", cut(first, most / 2 - 2), cut(last, most / 2 - 2))
}

fn cut(name: &str, most: usize) -> String {
    let name = shown(name);
    match name.chars().count() {
        length if length <= most => name.into_owned(),
        length => format!("…{}", name.chars().skip(length + 1 - most).collect::<String>()),
    }
}

/// Device numbers with runs drawn together: `0-3, 8`.
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

/// What a stage does to hold less, behind the bytes that it holds: `, recomputed, ZeRO 1`, or nothing.
pub fn sparing(stage: &Stage) -> String {
    let zero = if stage.zero > 0 { format!(", ZeRO {}", stage.zero) } else { String::new() };
    if stage.recompute { format!(", recomputed{zero}") } else { zero }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_devices_are_drawn_together() {
        assert_eq!(ranges(&[0, 1, 2, 3, 8, 10, 11]), "0-3, 8, 10-11");
        assert_eq!(ranges(&[]), "");
    }

    #[test]
    fn layers_that_count_on_are_drawn_together() {
        let told = |names: &[&str]| runs(&names.iter().map(ToString::to_string).collect::<Vec<_>>()).join(", ");
        assert_eq!(told(&["wte", "blocks.0", "blocks.1", "blocks.2", "ln_f"]), "wte, blocks.0-2, ln_f");
        assert_eq!(told(&["a.0", "b.1", "b.3", "b.4", "a.1"]), "a.0, b.1, b.3-4, a.1");
        assert_eq!(told(&["a-b.9", "a-b.10", "a.01", "a.02", "3", "4"]), "a-b.9-10, a.01, a.02, 3, 4");
    }

    #[test]
    fn long_names_keep_their_ends() {
        assert_eq!(cut("abcdefgh", 4), "…fgh");
        assert_eq!(cut("abc", 4), "abc");
    }
}
