//! The shapes that ops infer, and what they refuse: `shapes.txt` has a case a line, `op attributes | inputs | result`.
//!
//! `PIPEC_BLESS=1` writes the results anew.

use compiler::op::table::{parse, rule};
use compiler::tensor::DType;
use compiler::tensor::dim::Dim;
use compiler::tensor::fact::Fact;
use std::path::Path;

/// A fact from its text: `f32[batch, 3]`.
fn fact(text: &str) -> Fact {
    let (dtype, shape) = text.trim_end_matches(']').split_once('[').unwrap();
    let dims = shape.split(", ").filter(|dim| !dim.is_empty()).map(|dim| Dim::parse(dim).unwrap());
    Fact::new(DType::parse(dtype).unwrap(), dims.collect())
}

fn result(op: &str, inputs: &str) -> String {
    let (name, attributes) = op.split_once(' ').unwrap_or((op, "{}"));
    let op = parse(name, serde_json::from_str(attributes).unwrap()).unwrap();
    let inputs: Vec<Fact> = inputs.split("; ").filter(|text| !text.is_empty()).map(fact).collect();
    match rule(&op).infer(&inputs.iter().collect::<Vec<_>>()) {
        Ok(facts) => facts.iter().map(Fact::to_string).collect::<Vec<_>>().join("; "),
        Err(error) => format!("error: {error}"),
    }
}

/// The lines with the results that are inferred now.
pub fn actual(text: &str) -> String {
    let line = |line: &str| match line.split(" | ").collect::<Vec<_>>()[..] {
        [op, inputs, _] => format!("{op} | {inputs} | {}\n", result(op, inputs)),
        _ => {
            assert!(line.is_empty() || line.starts_with('#'), "not a case: {line}");
            format!("{line}\n")
        }
    };
    text.lines().map(line).collect()
}

#[test]
fn shapes_are_those_on_record() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/shapes.txt");
    let text = std::fs::read_to_string(&path).unwrap();
    let actual = actual(&text);
    if std::env::var_os("PIPEC_BLESS").is_some() {
        return std::fs::write(&path, actual).unwrap();
    }
    for (expected, actual) in text.lines().zip(actual.lines()) {
        assert_eq!(actual, expected);
    }
}
