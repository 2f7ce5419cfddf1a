//! Edits of a JSON document that keep it JSON.

use super::choices::Choices;
use serde_json::{Value, json};

/// A program of `torch.export` with convolution, normalisation, attention and a recurrent layer, and its weights' places.
pub fn seed() -> (Value, Value) {
    let read = |text: &str| serde_json::from_str(text).expect("the seed is JSON");
    (read(include_str!("../seeds/small.model.json")), read(include_str!("../seeds/small.weights.json")))
}

/// One edit somewhere: a number, a text from elsewhere, an entry dropped, doubled, moved, or another subtree.
pub fn edit(document: &mut Value, choices: &mut Choices<'_>) {
    let donor = pick(document, choices).clone();
    let text = match pick(document, choices) {
        Value::String(text) => text.clone(),
        _ => String::new(),
    };
    let number = choices.number();
    let target = pick_mut(document, choices);
    match (choices.below(4), target) {
        (0, target) => *target = donor,
        (1, target) => *target = json!(null),
        (_, Value::Number(held)) => *held = number.into(),
        (_, Value::String(held)) => *held = text,
        (_, Value::Bool(held)) => *held = !*held,
        (2, Value::Array(list)) if !list.is_empty() => {
            let at = choices.below(list.len());
            list.remove(at);
        }
        (_, Value::Array(list)) if !list.is_empty() => {
            let (from, to) = (choices.below(list.len()), choices.below(list.len()));
            let copy = list[from].clone();
            list.insert(to, copy);
        }
        (2, Value::Object(map)) => {
            if let Some(key) = map.keys().nth(choices.below(map.len())).cloned() {
                map.remove(&key);
            }
        }
        (_, target) => *target = json!(number),
    }
}

/// Walks down a random way, and stops somewhere.
fn pick<'a>(document: &'a Value, choices: &mut Choices<'_>) -> &'a Value {
    let mut at = document;
    loop {
        let next = match at {
            Value::Array(list) => choices.of_list(list),
            Value::Object(map) => map.values().nth(choices.below(map.len())),
            _ => None,
        };
        match next {
            Some(next) if choices.below(12) != 1 => at = next,
            _ => return at,
        }
    }
}

fn pick_mut<'a>(document: &'a mut Value, choices: &mut Choices<'_>) -> &'a mut Value {
    let goes_on = choices.below(12) != 1;
    match document {
        Value::Array(list) if goes_on && !list.is_empty() => {
            let at = choices.below(list.len());
            pick_mut(&mut list[at], choices)
        }
        Value::Object(map) if goes_on && !map.is_empty() => {
            let at = choices.below(map.len());
            pick_mut(map.values_mut().nth(at).expect("an entry below the length"), choices)
        }
        at => at,
    }
}
