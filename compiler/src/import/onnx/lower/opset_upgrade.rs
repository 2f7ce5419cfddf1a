//! Converts operators of sets 1 to 6 to set 7: attributes that became inputs, were renamed or removed, and explicit
//! broadcasting.
//!
//! Nodes are converted before lowering, so each lowering function handles one form of its operator.

use crate::import::build::Build;
use crate::import::onnx::lower::{Known, LowerReason, Scope};
use crate::import::onnx::model::Node;
use crate::import::onnx::proto::AttributeProto;
use crate::import::onnx::proto::attribute_proto::AttributeType;
use crate::import::onnx::proto::tensor_proto::DataType;
use crate::tensor::Tensor;
use crate::tensor::dim::Dim;

/// The first operator set that needs no conversion.
pub const MODERN: i64 = 7;

/// Converts the attributes of a node; `None` if nothing changes.
pub fn node(node: &Node) -> Result<Option<Node>, LowerReason> {
    let mut upgraded = node.clone();
    let find = |name: &str| node.attributes.iter().find(|a| a.name() == name);
    let number = |name: &str| find(name).and_then(|a| a.i).unwrap_or(0);
    match node.op_type.as_str() {
        "BatchNormalization" if number("is_test") != 0 => upgraded.outputs.truncate(1),
        "BatchNormalization" if find("spatial").is_some() && number("spatial") == 0 => {
            return Err(LowerReason::Unsupported("BatchNormalization with per-position statistics".to_string()));
        }
        "Cast" => {
            let to = find("to").and_then(|a| a.s.as_ref()).map(|s| String::from_utf8_lossy(s).into_owned());
            let Some(to) = to else { return Ok(None) };
            let code = DataType::from_str_name(&to.to_ascii_uppercase());
            let code = code.ok_or_else(|| LowerReason::Unsupported(format!("a cast to element type {to:?}")))?;
            set(&mut upgraded, int("to", code as i64));
        }
        "Concat" if find("axis").is_none() => set(&mut upgraded, int("axis", 1)),
        // Without `is_test` a Dropout is in training mode, as with `training_mode` later.
        "Dropout" if number("is_test") == 0 => {
            return Err(LowerReason::Unsupported("Dropout in training mode before operator set 12".to_string()));
        }
        "GlobalLpPool" | "LpPool" | "LpNormalization" => {
            let Some(p) = find("p").and_then(|a| a.f) else { return Ok(None) };
            if p.fract() != 0.0 || !(1.0..=64.0).contains(&p) {
                return Err(LowerReason::Attribute { name: "p", found: p.to_string(), expected: "an integer" });
            }
            set(&mut upgraded, int("p", p as i64));
        }
        "Pad" if find("pads").is_none() => match find("paddings") {
            Some(paddings) => set(&mut upgraded, AttributeProto { name: Some("pads".to_string()), ..paddings.clone() }),
            None => return Ok(None),
        },
        "Selu" => {
            // The first definition has rounded defaults.
            for (name, value) in [("alpha", 1.6732), ("gamma", 1.0507)] {
                if find(name).is_none() {
                    set(&mut upgraded, float(name, value));
                }
            }
        }
        "Upsample" if find("scales").is_none() => {
            let scale = |name: &str| find(name).and_then(|a| a.f);
            let (Some(height), Some(width)) = (scale("height_scale"), scale("width_scale")) else { return Ok(None) };
            set(
                &mut upgraded,
                AttributeProto {
                    name: Some("scales".to_string()),
                    r#type: Some(AttributeType::Floats as i32),
                    floats: vec![1.0, 1.0, height, width],
                    ..AttributeProto::default()
                },
            );
        }
        _ => return Ok(None),
    }
    Ok(Some(upgraded))
}

/// Converts the inputs of a node.
pub fn inputs(scope: &mut Scope<'_>) -> Result<(), LowerReason> {
    match scope.node.op_type.as_str() {
        "Add" | "And" | "Div" | "Equal" | "Greater" | "Less" | "Mul" | "Or" | "Pow" | "Sub" | "Xor" => aligned(scope),
        "PRelu" => {
            // One slope per channel (axis 1).
            let (rank, slope) = (scope.fact_of(0)?.rank(), scope.fact_of(1)?);
            if slope.rank() != 1 || slope.shape[0].is(1) || rank < 2 {
                return Ok(());
            }
            insert_expand(scope, [slope.shape, vec![Dim::Known(1); rank - 2]].concat())
        }
        "Tile" if scope.inputs.len() == 3 => {
            let mut repeats = vec![1; scope.fact_of(0)?.rank()];
            let first = |list: Option<Vec<i64>>| list.and_then(|list| list.first().copied());
            let tiles = first(scope.integers(1, "the number of repeats")?).ok_or(LowerReason::Missing { slot: 1 })?;
            let axis = first(scope.integers(2, "the axis")?).ok_or(LowerReason::Missing { slot: 2 })?;
            let at = crate::import::onnx::lower::attribute::axis(axis, repeats.len())?;
            repeats[at] = tiles;
            scope.inputs.truncate(1);
            scope.inputs.push(Some(Known::Tensor(Tensor::from_i64(&[repeats.len()], &repeats))));
            Ok(())
        }
        _ => Ok(()),
    }
}

/// With `broadcast`, the second operand is aligned to the axes of the first that begin at `axis`, or to its last axes.
fn aligned(scope: &mut Scope<'_>) -> Result<(), LowerReason> {
    if !scope.flag("broadcast", false)? || !scope.is_set("axis") {
        return Ok(());
    }
    let (rank, small) = (scope.fact_of(0)?.rank(), scope.fact_of(1)?);
    let at = crate::import::onnx::lower::attribute::axis(scope.int("axis", 0)?, rank)?;
    let trailing = rank.checked_sub(at + small.rank());
    let trailing =
        trailing.ok_or_else(|| LowerReason::Inputs(format!("{small} does not match axes from {at} of rank {rank}")))?;
    insert_expand(scope, [small.shape, vec![Dim::Known(1); trailing]].concat())
}

fn insert_expand(scope: &mut Scope<'_>, shape: Vec<Dim>) -> Result<(), LowerReason> {
    let value = scope.value(1)?;
    let value = scope.reshape(value, shape)?;
    scope.inputs[1] = Some(Known::Value(value));
    Ok(())
}

fn set(node: &mut Node, attribute: AttributeProto) {
    node.attributes.retain(|a| a.name() != attribute.name());
    node.attributes.push(attribute);
}

fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: Some(name.to_string()),
        r#type: Some(AttributeType::Int as i32),
        i: Some(value),
        ..AttributeProto::default()
    }
}

fn float(name: &str, value: f32) -> AttributeProto {
    AttributeProto {
        name: Some(name.to_string()),
        r#type: Some(AttributeType::Float as i32),
        f: Some(value),
        ..AttributeProto::default()
    }
}
