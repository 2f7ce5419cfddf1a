//! Edits of a JSON document that keep it valid JSON.

use super::choices::Choices;
use serde_json::{Value, json};

/// A `torch.export` program with convolution, normalisation, attention and a recurrent layer, and its weight index.
pub fn seed() -> (Value, Value) {
    let read = |text: &str| serde_json::from_str(text).expect("the seed is JSON");
    (read(include_str!("../seeds/small.model.json")), read(include_str!("../seeds/small.weights.json")))
}

/// One edit: a number, a text from elsewhere, or an entry dropped, duplicated, moved or replaced by another subtree.
pub fn edit(document: &mut Value, choices: &mut Choices<'_>) {
    let [donor, text] = [random_pointer(document, choices), random_pointer(document, choices)];
    let donor = document.pointer(&donor).cloned().unwrap_or_default();
    let text = document.pointer(&text).and_then(Value::as_str).unwrap_or_default().to_string();
    let number = choices.number();
    let target = random_pointer(document, choices);
    let Some(target) = document.pointer_mut(&target) else { return };
    match (choices.below(4), target) {
        (0, target) => *target = donor,
        (1, target) => *target = json!(null),
        (_, Value::Number(value)) => *value = number.into(),
        (_, Value::String(value)) => *value = text,
        (_, Value::Bool(value)) => *value = !*value,
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

/// A random JSON pointer (RFC 6901).
fn random_pointer(document: &Value, choices: &mut Choices<'_>) -> String {
    let (mut value, mut pointer) = (document, String::new());
    loop {
        let (step, next) = match value {
            Value::Array(list) if !list.is_empty() => {
                let index = choices.below(list.len());
                (index.to_string(), &list[index])
            }
            Value::Object(map) if !map.is_empty() => {
                let (key, value) = map.iter().nth(choices.below(map.len())).expect("an entry below the length");
                (key.replace('~', "~0").replace('/', "~1"), value)
            }
            _ => return pointer,
        };
        if choices.below(12) == 1 {
            return pointer;
        }
        pointer += "/";
        pointer += &step;
        value = next;
    }
}
