//! Module names of torchtitan's models. torchtitan only finds top-level modules and items of top-level lists, and its
//! models, as well as its backend for transformers models, have the modules `tok_embeddings`, `layers`, `norm` and
//! `lm_head`.
//!
//! ```text
//! model.embed_tokens  model.layers.3  model.norm  lm_head     transformers
//! tok_embeddings      layers.3        norm        lm_head     torchtitan
//! ```
//!
//! Names of a model that is flat already stay as they are.

use super::layers::are_shallow;
use super::refusal::Refusal;
use crate::profile::module_units::{longest, numbered};
use crate::text::name::short_name;
use std::collections::BTreeSet;

const KNOWN: [(&str, &[&str]); 3] = [
    ("tok_embeddings", &["tok_embeddings", "embed_tokens", "wte", "word_embeddings", "embed_in"]),
    ("norm", &["norm", "ln_f", "final_layernorm", "final_layer_norm"]),
    ("lm_head", &["lm_head", "embed_out"]),
];

const LAYERS: &str = "layers";

/// A module without parameters, which the backend for transformers models needs in every part. Other models have none.
const ROTARY: &str = "rotary_emb";

/// The modules of each part, with torchtitan's names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub parts: Vec<Vec<String>>,
    /// What was renamed.
    pub note: Option<String>,
}

pub fn rename_modules(parts: Vec<Vec<String>>, tool: &'static str) -> Result<Named, Refusal> {
    let Some((list, wrapper)) = nested_list(&parts) else {
        are_shallow(&parts, tool)?;
        return Ok(Named { parts, note: None });
    };
    let mut used_names = BTreeSet::new();
    let mut unknown = Vec::new();
    let mut is_rotary = false;
    let mut renamed = Vec::with_capacity(parts.len());
    for (stage, modules) in (0u32..).zip(&parts) {
        let mut names = Vec::with_capacity(modules.len());
        for module in modules {
            let inner = module.strip_prefix(wrapper).unwrap_or(module);
            let name = match numbered(module).filter(|(of, _)| *of == list) {
                Some((_, number)) => format!("{LAYERS}.{number}"),
                None => match KNOWN.iter().find(|(_, others)| others.contains(&inner)) {
                    Some((name, _)) => name.to_string(),
                    None if inner == ROTARY => continue,
                    None => {
                        unknown.push(inner.to_string());
                        inner.to_string()
                    }
                },
            };
            is_rotary |= inner == "embed_tokens";
            if !used_names.insert(name.clone()) {
                let why = format!("would be another `{}` in {tool}", short_name(&name));
                return Err(Refusal::Place { module: module.clone(), stage, why });
            }
            names.push(name);
        }
        renamed.push(names);
    }
    are_shallow(&renamed, tool)?;
    if is_rotary {
        renamed.iter_mut().for_each(|names| names.push(ROTARY.to_string()));
    }
    Ok(Named { note: Some(note(list, &unknown, tool)), parts: renamed })
}

/// The nested list with the most items, and the path of its wrapper with a dot at the end; ties are broken by name.
fn nested_list(parts: &[Vec<String>]) -> Option<(&str, &str)> {
    let lists = parts.iter().flatten().filter_map(|module| numbered(module)).map(|(list, _)| list);
    let (list, _) = longest(lists.filter(|list| list.contains('.')))?;
    Some((list, &list[..=list.rfind('.')?]))
}

fn note(list: &str, unknown: &[String], tool: &str) -> String {
    let renamed = format!("modules have the names of {tool}'s models: `{}.0` is `{LAYERS}.0`", short_name(list));
    let names: Vec<String> = unknown.iter().take(8).map(|name| format!("`{}`", short_name(name))).collect();
    match names.is_empty() {
        true => renamed,
        false => format!("{renamed}; its models have no {}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(text: &[&str]) -> Vec<Vec<String>> {
        text.iter().map(|part| part.split(' ').map(str::to_string).collect()).collect()
    }

    #[test]
    fn models_of_transformers_get_the_names_of_torchtitan() {
        let llama = parts(&["model.embed_tokens model.layers.0", "model.layers.1 model.norm lm_head"]);
        let named = rename_modules(llama, "torchtitan").unwrap();
        assert_eq!(named.parts, parts(&["tok_embeddings layers.0 rotary_emb", "layers.1 norm lm_head rotary_emb"]));
        assert_eq!(
            named.note.unwrap(),
            "modules have the names of torchtitan's models: `model.layers.0` is `layers.0`"
        );
    }

    #[test]
    fn other_modules_keep_their_names() {
        let gpt =
            parts(&["transformer.wte transformer.wpe transformer.h.0", "transformer.h.1 transformer.ln_f lm_head"]);
        let named = rename_modules(gpt, "torchtitan").unwrap();
        assert_eq!(named.parts, parts(&["tok_embeddings wpe layers.0", "layers.1 norm lm_head"]));
        assert!(named.note.unwrap().ends_with("its models have no `wpe`"));
        let flat = parts(&["wte blocks.0", "blocks.1 head"]);
        assert_eq!(super::rename_modules(flat.clone(), "torchtitan"), Ok(Named { parts: flat, note: None }));
    }

    #[test]
    fn two_wrappers_are_refused() {
        let both = parts(&["encoder.layers.0 encoder.layers.1", "decoder.layers.0"]);
        assert!(matches!(rename_modules(both, "torchtitan"), Err(Refusal::Nested { .. })));
    }
}
