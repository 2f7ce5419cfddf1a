//! Sources: inputs, parameters, states and constants.

use super::*;
use serde::de::Error as _;
use serde::{Deserializer, Serializer};

fn none(inputs: &[&Fact], fact: &Fact) -> Result<Vec<Fact>, FactError> {
    if inputs.is_empty() { Ok(vec![fact.clone()]) } else { Err(FactError::Arity { expected: 0, got: inputs.len() }) }
}

macro_rules! given_from_outside {
    ($op:ty) => {
        impl OpRule for $op {
            fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
                none(inputs, &self.fact)
            }

            fn cost(&self, _: &[&Fact], _: &[Fact]) -> Cost {
                Cost::default()
            }

            // The executor binds the value; unbound, it is zero.
            fn reference(&self, _: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
                outputs[0].bytes_mut().fill(0);
                Ok(())
            }
        }
    };
}

given_from_outside!(Input);
given_from_outside!(Parameter);
given_from_outside!(State);

impl OpRule for Constant {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        none(inputs, &Fact::of(self.tensor.dtype(), self.tensor.shape()))
    }

    fn cost(&self, _: &[&Fact], _: &[Fact]) -> Cost {
        Cost::default()
    }

    fn reference(&self, _: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        outputs[0].bytes_mut().copy_from_slice(self.tensor.bytes());
        Ok(())
    }
}

/// Serialized constant: short ones as numbers, long or non-finite ones as hexadecimal bytes.
#[derive(Serialize, Deserialize)]
struct Written {
    dtype: DType,
    shape: Vec<usize>,
    value: Values,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Values {
    Integers(Vec<i64>),
    Floats(Vec<f64>),
    Hex(String),
}

impl Serialize for Constant {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let t = &self.tensor;
        // An integer loses the sign of -0, and JSON has no NaN.
        let plain = t.len() <= 16 && t.to_f64().iter().all(|v| v.is_finite());
        let value = match (plain, t.dtype().is_float()) {
            (true, true) => Values::Floats(t.to_f64()),
            (true, false) => Values::Integers(t.to_i64()),
            (false, _) => Values::Hex(to_hex(t.bytes())),
        };
        Written { dtype: t.dtype(), shape: t.shape().to_vec(), value }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Constant {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Constant, D::Error> {
        let w = Written::deserialize(deserializer)?;
        let bytes: Vec<u8> = match &w.value {
            Values::Hex(text) => hex(text).ok_or_else(|| D::Error::custom("constant bytes are not hexadecimal"))?,
            Values::Integers(v) if w.dtype.is_float() => {
                let floats: Vec<f64> = v.iter().map(|&i| i as f64).collect();
                Tensor::from_f64(&[floats.len()], &floats).cast(w.dtype).bytes().to_vec()
            }
            Values::Integers(v) => Tensor::from_i64(&[v.len()], v).cast(w.dtype).bytes().to_vec(),
            Values::Floats(v) => Tensor::from_f64(&[v.len()], v).cast(w.dtype).bytes().to_vec(),
        };
        let tensor = Tensor::new(w.dtype, w.shape, bytes.into()).map_err(D::Error::custom)?;
        Ok(Constant { tensor })
    }
}

// Constants may be megabytes, and every graph hash prints them: a formatter per byte would be slow.
fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

fn hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    digits
        .chunks_exact(2)
        .map(|pair| {
            let high = (pair[0] as char).to_digit(16)?;
            let low = (pair[1] as char).to_digit(16)?;
            Some((high * 16 + low) as u8)
        })
        .collect()
}

pub fn samples() -> Vec<Sample> {
    let fact = Fact::of(DType::F32, &[2, 3]);
    let source = |title, op| Sample::forward(title, op, vec![]);
    let constant = |tensor| Op::Constant(Constant { tensor });
    vec![
        source("given for every minibatch", Op::Input(Input { name: "x".into(), fact: fact.clone() })),
        source("trained", Op::Parameter(Parameter { name: "0.weight".into(), fact: fact.clone() })),
        source("kept", Op::State(State { name: "running_mean".into(), fact })),
        source("short", constant(Tensor::from_f32(&[3], &[0.1, -0.0, 3.0]))),
        source("integers as floats", constant(Tensor::from_f32(&[2], &[1.0, 2.0]))),
        source("integers", constant(Tensor::from_i64(&[2], &[i64::MIN, i64::MAX]))),
        source("not finite", constant(Tensor::from_f32(&[2], &[f32::NEG_INFINITY, f32::NAN]))),
        source("long", constant(Tensor::from_i64(&[20], &[7; 20]))),
        source("booleans", constant(Tensor::from_bool(&[2], &[true, false]))),
    ]
}
