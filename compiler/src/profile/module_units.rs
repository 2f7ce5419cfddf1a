//! The modules that frameworks keep whole: top-level modules, or the items of a numbered list.
//!
//! `layers.3.attention.wq` belongs to unit `layers.3`, and `norm.weight` to `norm`. Wrapper modules are no units: with
//! `transformer.h.0`, the units are `transformer.h.0`, `transformer.wte` and `transformer.ln_f`.

use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Units {
    /// Modules that enclose a numbered list below the first level.
    wrappers: BTreeSet<String>,
}

impl Units {
    pub fn of<'a>(modules: impl IntoIterator<Item = &'a str>) -> Units {
        let mut wrappers = BTreeSet::new();
        for module in modules {
            let parts = parts(module);
            let Some(number) = parts.iter().position(|part| is_number(part)) else { continue };
            // The list itself is the path component before its number.
            wrappers.extend((1..number).map(|count| parts[..count].join(".")));
        }
        Units { wrappers }
    }

    /// The unit of a module; empty for the model itself and for its wrappers.
    pub fn name(&self, module: &str) -> String {
        let parts = parts(module);
        let mut name = String::new();
        for part in &parts {
            if !name.is_empty() {
                name.push('.');
            }
            name.push_str(part);
            if is_number(part) {
                return name;
            }
        }
        let prefixes = (1..=parts.len()).map(|count| parts[..count].join("."));
        prefixes.into_iter().find(|name| !self.wrappers.contains(name)).unwrap_or_default()
    }
}

fn parts(module: &str) -> Vec<&str> {
    module.split(['.', '/']).filter(|part| !part.is_empty()).collect()
}

fn is_number(part: &str) -> bool {
    part.bytes().all(|byte| byte.is_ascii_digit())
}

/// Splits `layers.3` into list name and index.
pub fn numbered(module: &str) -> Option<(&str, u32)> {
    let (list, number) = module.rsplit_once('.').unwrap_or(("", module));
    let is_numeric = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    is_numeric.then(|| number.parse().ok().map(|number| (list, number)))?
}

/// The list with the most items, and their number; ties are broken by name. `lists` has the list of each item.
pub fn longest<'a>(lists: impl Iterator<Item = &'a str>) -> Option<(&'a str, u32)> {
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    lists.for_each(|list| *counts.entry(list).or_default() += 1);
    let max_count = counts.values().copied().max()?;
    counts.into_iter().find(|(_, count)| *count == max_count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_kept_whole_at_the_depth_that_frameworks_know() {
        let units = Units::of(["layers.3.attention.wq", "tok_embeddings"]);
        assert_eq!(units.name("layers.3.attention.wq"), "layers.3");
        assert_eq!(units.name("tok_embeddings"), "tok_embeddings");
        assert_eq!(units.name("layers"), "layers");
        assert_eq!(units.name(""), "");
    }

    #[test]
    fn what_wraps_a_model_is_looked_through() {
        let units = Units::of(["m.transformer.h.11.mlp", "m.transformer.wte", "m.lm_head"]);
        assert_eq!(units.name("m.transformer.h.11.mlp"), "m.transformer.h.11");
        assert_eq!(units.name("m.transformer.wte"), "m.transformer.wte");
        assert_eq!(units.name("m.lm_head.x"), "m.lm_head");
        assert_eq!(units.name("m.transformer"), "");
    }

    #[test]
    fn lists_and_numbers() {
        assert_eq!(numbered("transformer.h.11"), Some(("transformer.h", 11)));
        assert_eq!(numbered("3"), Some(("", 3)));
        assert_eq!(numbered("norm"), None);
        assert_eq!(numbered("a.99999999999"), None);
    }

    #[test]
    fn the_longest_list_is_the_first_by_name() {
        assert_eq!(longest(["b", "a", "c", "b", "a"].into_iter()), Some(("a", 2)));
        assert_eq!(longest(std::iter::empty()), None);
    }
}
