//! Strict JSON: no duplicate keys at any depth, and errors with the path of the value.
//!
//! Duplicate keys are rejected, because different parsers would use different values. The parser itself rejects NaN and
//! infinity and limits nesting to 128.

use crate::text::{Format, plainly};
use serde::Deserialize;
use serde::de::{self, DeserializeOwned, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use std::collections::HashSet;
use std::fmt;

/// Reasons why a JSON file is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    /// Invalid JSON, duplicate key or number out of range; the message gives line and column.
    #[error("{0}")]
    Syntax(String),
    /// Valid JSON of the wrong shape.
    #[error("at `{path}`: {message}")]
    Shape {
        /// For example `stages[2].replicas`.
        path: String,
        message: String,
    },
}

/// Parses `text` as a `T`. A byte order mark before it is ignored (RFC 8259, section 8.1).
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, JsonError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let syntax = |error: serde_json::Error| JsonError::Syntax(plainly(&error.to_string(), Format::Json));
    let mut strict = serde_json::Deserializer::from_str(text);
    NoDuplicates.deserialize(&mut strict).map_err(syntax)?;
    strict.end().map_err(syntax)?;
    let mut typed = serde_json::Deserializer::from_str(text);
    serde_path_to_error::deserialize(&mut typed).map_err(|error| {
        let (path, message) = (error.path().to_string(), plainly(&error.inner().to_string(), Format::Json));
        // serde_path_to_error gives "." for the root.
        if path == "." { JsonError::Syntax(message) } else { JsonError::Shape { path, message } }
    })
}

/// Prints `value` with two-space indentation, fields in declaration order, and a final newline. Deterministic. Fails
/// only if a map key is not a string or serialization fails.
pub fn print<T: serde::Serialize>(value: &T) -> Result<String, JsonError> {
    let mut text = serde_json::to_string_pretty(value).map_err(|error| JsonError::Syntax(error.to_string()))?;
    text.push('\n');
    Ok(text)
}

/// Visits a value without building it, and fails at the first duplicate key of an object.
struct NoDuplicates;

impl<'de> DeserializeSeed<'de> for NoDuplicates {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for NoDuplicates {
    type Value = ();
    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("JSON")
    }
    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }
    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }
    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }
    fn visit_f64<E: de::Error>(self, value: f64) -> Result<(), E> {
        if value.is_finite() { Ok(()) } else { Err(E::custom("a number is not finite")) }
    }
    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while list.next_element_seed(NoDuplicates)?.is_some() {}
        Ok(())
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut keys = HashSet::new();
        while let Some(Key(key)) = map.next_key()? {
            map.next_value_seed(NoDuplicates)?;
            if !keys.insert(key.clone()) {
                let shown: String = key.chars().take(60).map(|c| if c.is_control() { '?' } else { c }).collect();
                return Err(de::Error::custom(format!("duplicate key `{shown}`")));
            }
        }
        Ok(())
    }
}

#[derive(Deserialize)]
#[serde(transparent)]
struct Key(String);

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn duplicates_are_errors_at_any_depth() {
        assert!(read::<Value>("{\"a\": [1, {\"b\": 2, \"c\": null}]}").is_ok());
        for text in ["{\"a\":1,\"a\":1}", "[{\"x\":{\"b\":1,\"c\":2,\"b\":3}}]", "{\"a\":1,\"\\u0061\":2}"] {
            let error = read::<Value>(text).unwrap_err().to_string();
            assert!(error.contains("duplicate key"), "{error}");
        }
    }

    #[test]
    fn broken_text_is_an_error() {
        for text in ["", "{", "NaN", "1e999", "{} x", "[1,]", "{\"a\":Infinity}", &"[".repeat(100_000)] {
            assert!(matches!(read::<Value>(text), Err(JsonError::Syntax(_))), "{:.20}", text);
        }
    }
}
