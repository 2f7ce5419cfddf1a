//! Rewords parser errors for users: Rust type names become JSON or TOML terms.
//!
//! ```text
//! invalid type: integer `3`, expected struct PeakFile     integer `3`, expected a table
//! invalid value: integer `-1`, expected u32               integer `-1`, expected an integer from 0 to 4294967295
//! ```
//!
//! Only the expected part is reworded; the found part is quoted from the file. For an unknown name the nearest known
//! name is suggested ([`suggest`]).

pub mod name;
pub mod quantity;
pub mod suggest;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Json,
    Toml,
}

/// Rewords a parser message without Rust type names.
pub fn plainly(message: &str, format: Format) -> String {
    let group = match format {
        Format::Json => "an object",
        Format::Toml => "a table",
    };
    let message = message.replacen("EOF while parsing", "the file ends within", 1);
    let Some(at) = message.rfind(EXPECTED) else { return message };
    let (found, expected) = message.split_at(at);
    let expected = &expected[EXPECTED.len()..];
    // Keep the position that the parser may append.
    let (expected, position) = expected.find(" at line ").map_or((expected, ""), |at| expected.split_at(at));
    format!(
        "{}{EXPECTED}{}{}{position}",
        reword_found(found, group),
        reword_expected(expected, group),
        suggestion(found, expected)
    )
}

/// The suggestion for "unknown field `sped`, expected one of `speed`, `count`".
fn suggestion(found: &str, expected: &str) -> String {
    let is_name = |start: &&str| found.rfind(*start).is_some_and(|at| !found[at..].contains('\n'));
    let Some(start) = ["unknown field `", "unknown variant `"].into_iter().find(is_name) else { return String::new() };
    let name = found.rsplit(start).next().unwrap_or_default().trim_end_matches('`');
    crate::text::suggest::hint(name, expected.split('`').skip(1).step_by(2))
}

const EXPECTED: &str = ", expected ";

/// Rewords `invalid type: map` and the like at the start of a line.
fn reword_found(found: &str, group: &str) -> String {
    let (before, line) = match found.rfind('\n') {
        Some(at) => found.split_at(at + 1),
        None => ("", found),
    };
    let reworded = ["invalid type: ", "invalid value: ", "invalid length "].into_iter().find_map(|start| {
        let found_type = line.strip_prefix(start)?;
        Some(match found_type {
            "map" => group.to_string(),
            "sequence" => "a list".to_string(),
            "unit value" | "null" => "nothing".to_string(),
            _ if start == "invalid length " => format!("a list of {found_type}"),
            _ => found_type
                .strip_prefix("floating point")
                .map_or(found_type.to_string(), |found_type| format!("number{found_type}")),
        })
    });
    before.to_string() + reworded.as_deref().unwrap_or(line)
}

fn reword_expected(expected: &str, group: &str) -> String {
    let integer_up_to = |most: u64| format!("an integer from 0 to {most}");
    let is = |starts: &[&str]| starts.iter().any(|start| expected.starts_with(start));
    match expected {
        "u8" => integer_up_to(u8::MAX.into()),
        "u16" => integer_up_to(u16::MAX.into()),
        "u32" => integer_up_to(u32::MAX.into()),
        "u64" | "usize" => integer_up_to(u64::MAX),
        "i8" | "i16" | "i32" | "i64" | "isize" => "an integer".to_string(),
        "f32" | "f64" => "a number".to_string(),
        "unit" => "nothing".to_string(),
        "a map" => group.to_string(),
        "a sequence" => "a list".to_string(),
        "variant identifier" | "field identifier" | "string or map" => "a name".to_string(),
        _ if is(&["tuple ", "a tuple "]) => {
            let size = expected.split(' ').find_map(|word| word.parse::<u64>().ok());
            size.map_or("a list".to_string(), |size| format!("a list of {size}"))
        }
        _ if is(&["struct ", "internally tagged ", "adjacently tagged ", "untagged "]) => group.to_string(),
        _ if is(&["enum "]) => "a name".to_string(),
        _ if is(&["newtype "]) => "a value".to_string(),
        _ => expected.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[allow(dead_code)]
    struct Inner {
        number: u32,
        share: Option<f64>,
        pair: Option<(u32, u32)>,
        kind: Option<Kind>,
    }

    #[derive(Debug, Deserialize)]
    enum Kind {
        One,
    }

    #[test]
    fn no_type_is_named() {
        for (text, reworded) in [
            ("3", "integer `3`, expected an object at line 1 column 1"),
            ("{\"number\": -1}", "integer `-1`, expected an integer from 0 to 4294967295 at line 1 column 13"),
            ("{\"number\": 1.5}", "number `1.5`, expected an integer from 0 to 4294967295 at line 1 column 14"),
            ("{\"number\": 1, \"share\": \"f64\"}", "string \"f64\", expected a number at line 1 column 28"),
            ("{\"number\": {}}", "an object, expected an integer from 0 to 4294967295 at line 1 column 11"),
            ("{\"number\": 1, \"pair\": [1]}", "a list of 1, expected a list of 2 at line 1 column 25"),
            ("{\"number\": 1, \"kind\": \"Two\"}", "unknown variant `Two`, expected `One` at line 1 column 27"),
            (
                "{\"number\": 1, \"kind\": \"Onee\"}",
                "unknown variant `Onee`, expected `One`; did you mean `One`? at line 1 column 28",
            ),
            ("{}", "missing field `number` at line 1 column 2"),
            ("{", "the file ends within an object at line 1 column 1"),
        ] {
            let error = serde_json::from_str::<Inner>(text).unwrap_err().to_string();
            assert_eq!(plainly(&error, Format::Json), reworded, "{error}");
        }
    }

    #[test]
    fn what_was_found_stays() {
        let error = serde_json::from_str::<u32>("\"x, expected struct Y\"").unwrap_err().to_string();
        let reworded = plainly(&error, Format::Toml);
        assert!(reworded.starts_with("string \"x, expected struct Y\", expected an integer"), "{reworded}");
    }
}
