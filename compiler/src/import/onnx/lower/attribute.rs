//! Access to node attributes with default values, and normalisation of axes.
//!
//! A missing value field of an attribute is read as zero, because encoders may omit zeros.

use super::weight::dtype_of;
use super::{LowerReason, Scope};
use crate::import::onnx::model::Tensor;
use crate::import::onnx::payload;
use crate::import::onnx::proto::AttributeProto;
use crate::import::onnx::proto::attribute_proto::AttributeType;
use crate::tensor::DType;

impl Scope<'_> {
    fn attribute(&self, name: &'static str, kind: AttributeType) -> Result<Option<&AttributeProto>, LowerReason> {
        let Some(attribute) = self.node.attributes.iter().find(|a| a.name() == name) else { return Ok(None) };
        if attribute.ref_attr_name.as_ref().is_some_and(|name| !name.is_empty()) {
            return Err(LowerReason::Unsupported(format!("attribute `{name}`, set by the enclosing function,")));
        }
        match attribute.r#type() {
            AttributeType::Undefined => Ok(Some(attribute)),
            given if given == kind => Ok(Some(attribute)),
            given => Err(LowerReason::Attribute {
                name,
                found: format!("of type {}", given.as_str_name()),
                expected: "the type defined by the operator",
            }),
        }
    }

    pub fn is_set(&self, name: &str) -> bool {
        self.node.attributes.iter().any(|a| a.name() == name)
    }

    pub fn int(&self, name: &'static str, default: i64) -> Result<i64, LowerReason> {
        Ok(self.attribute(name, AttributeType::Int)?.map_or(default, |a| a.i.unwrap_or(0)))
    }

    pub fn flag(&self, name: &'static str, default: bool) -> Result<bool, LowerReason> {
        Ok(self.int(name, i64::from(default))? != 0)
    }

    /// A finite number, converted to f64 through the shortest decimal of its `f32`: `1e-5` in the source stays `1e-5`.
    pub fn float(&self, name: &'static str, default: f64) -> Result<f64, LowerReason> {
        let Some(value) = self.attribute(name, AttributeType::Float)?.map(|a| a.f.unwrap_or(0.0)) else {
            return Ok(default);
        };
        if !value.is_finite() {
            return Err(LowerReason::Attribute { name, found: value.to_string(), expected: "a finite number" });
        }
        Ok(value.to_string().parse().unwrap_or(f64::from(value)))
    }

    pub fn ints(&self, name: &'static str) -> Result<Option<Vec<i64>>, LowerReason> {
        Ok(self.attribute(name, AttributeType::Ints)?.map(|a| a.ints.clone()))
    }

    pub fn floats(&self, name: &'static str) -> Result<Option<Vec<f32>>, LowerReason> {
        Ok(self.attribute(name, AttributeType::Floats)?.map(|a| a.floats.clone()))
    }

    pub fn text(&self, name: &'static str, default: &str) -> Result<String, LowerReason> {
        let found = self.attribute(name, AttributeType::String)?.map(|a| a.s.clone().unwrap_or_default());
        Ok(found.map_or(default.to_string(), |bytes| String::from_utf8_lossy(&bytes).into_owned()))
    }

    pub fn value_of(&self, name: &'static str) -> Result<Option<Tensor>, LowerReason> {
        Ok(self.attribute(name, AttributeType::Tensor)?.and_then(|a| a.t.as_ref()).map(payload::tensor))
    }

    /// The element type that an attribute names; `what` has it, in the message if it is not supported.
    pub fn element_type(&self, name: &'static str, default: i64, what: &str) -> Result<DType, LowerReason> {
        let code = self.int(name, default)?;
        let dtype = i32::try_from(code).ok().and_then(dtype_of);
        dtype.ok_or_else(|| LowerReason::Unsupported(format!("{what} element type {code}")))
    }

    /// One value per spatial axis, each at least `minimum`; `default` for all axes if the attribute is absent.
    pub fn sizes_of(
        &self,
        name: &'static str,
        axes: usize,
        default: usize,
        minimum: i64,
    ) -> Result<Vec<usize>, LowerReason> {
        let Some(list) = self.ints(name)? else { return Ok(vec![default; axes]) };
        if list.len() != axes {
            let expected = "one number for each spatial axis";
            return Err(LowerReason::Attribute { name, found: format!("{list:?}"), expected });
        }
        let expected = if minimum == 0 { "numbers of at least 0" } else { "numbers of at least 1" };
        let fits = |v: i64| u32::try_from(v).ok().filter(|_| v >= minimum).map(|v| v as usize);
        let sizes: Option<Vec<usize>> = list.iter().map(|&v| fits(v)).collect();
        sizes.ok_or_else(|| LowerReason::Attribute { name, found: format!("{list:?}"), expected })
    }
}

/// Normalises an axis of a tensor of rank `rank`; -1 is the last axis.
pub fn axis(given: i64, rank: usize) -> Result<usize, LowerReason> {
    let ranks = i64::try_from(rank).unwrap_or(i64::MAX);
    let wrapped = if given < 0 { given.saturating_add(ranks) } else { given };
    match usize::try_from(wrapped) {
        Ok(axis) if axis < rank => Ok(axis),
        _ => Err(LowerReason::Inputs(format!("axis {given} does not exist in a tensor of rank {rank}"))),
    }
}

/// Normalises and sorts axes. Duplicates are an error.
pub fn axes(axis_list: &[i64], rank: usize) -> Result<Vec<usize>, LowerReason> {
    let mut list = axis_list.iter().map(|&a| axis(a, rank)).collect::<Result<Vec<_>, _>>()?;
    list.sort_unstable();
    if list.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(LowerReason::Inputs(format!("the axes {axis_list:?} repeat an axis")));
    }
    Ok(list)
}
