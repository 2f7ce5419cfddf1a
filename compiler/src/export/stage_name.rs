//! What a stage holds, in few words: its layers, its devices.

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
        let text = kept.join(", ");
        if text.chars().count() <= most {
            return shown(&text).into_owned();
        }
    }
    span(names[0], names[names.len() - 1], most)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_devices_are_drawn_together() {
        assert_eq!(ranges(&[0, 1, 2, 3, 8, 10, 11]), "0-3, 8, 10-11");
        assert_eq!(ranges(&[]), "");
    }

    #[test]
    fn long_names_keep_their_ends() {
        assert_eq!(cut("abcdefgh", 4), "…fgh");
        assert_eq!(cut("abc", 4), "abc");
    }
}
