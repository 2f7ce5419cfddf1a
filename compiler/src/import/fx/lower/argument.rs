//! Reads a node's arguments by their ATen names. The file omits arguments that equal their default.

use super::{Known, Scope};
use crate::import::build::Build;
use crate::import::fx::program::tensor_name;
use crate::import::fx::schema::{Argument, Float, OptionalTensor, SymArgument, SymInt};
use crate::import::fx::weight::dtype_of;
use crate::import::lower_error::LowerReason;
use crate::import::norm::filled;
use crate::import::onnx::lower::attribute;
use crate::op::Value;
use crate::tensor::dim::Dim;
use crate::tensor::fact::Fact;
use crate::tensor::{DType, Tensor};

/// A Python number; its type decides promotion with tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Number {
    Bool(bool),
    Int(i64),
    Float(f64),
}

impl Number {
    pub fn tensor(self, dtype: DType) -> Tensor {
        match self {
            Number::Bool(value) => Tensor::from_bool(&[], &[value]).cast(dtype),
            Number::Int(value) => Tensor::from_i64(&[], &[value]).cast(dtype),
            Number::Float(value) => Tensor::from_f64(&[], &[value]).cast(dtype),
        }
    }

    pub fn float(self) -> f64 {
        match self {
            Number::Bool(value) => f64::from(u8::from(value)),
            Number::Int(value) => value as f64,
            Number::Float(value) => value,
        }
    }

    /// The element type of a tensor filled with this number.
    pub fn dtype(self) -> DType {
        match self {
            Number::Bool(_) => DType::Bool,
            Number::Int(_) => DType::I64,
            Number::Float(_) => DType::F32,
        }
    }
}

/// An operand of an elementwise operator.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Operand {
    Tensor(Value),
    Number(Number),
    Size(Dim),
}

impl Scope<'_> {
    /// The argument, unless omitted or `None`.
    pub fn argument(&self, name: &str) -> Option<&Argument> {
        let argument = &self.node.inputs.iter().find(|input| input.name == name)?.arg;
        match argument {
            Argument::AsNone(_) | Argument::AsOptionalTensor(OptionalTensor::AsNone(_)) => None,
            argument => Some(argument),
        }
    }

    pub fn has(&self, name: &str) -> bool {
        self.argument(name).is_some()
    }

    fn wrong(&self, name: &'static str, expected: &'static str) -> LowerReason {
        let kind = |arg: &Argument| format!("{arg:?}").split(['(', '{', ' ']).next().unwrap_or("").to_string();
        let found = self.argument(name).map_or("missing".to_string(), kind);
        LowerReason::Attribute { name, found, expected }
    }

    /// A tensor argument, without adding a weight to the graph.
    pub fn known(&self, name: &'static str) -> Result<Known, LowerReason> {
        match self.argument(name) {
            Some(Argument::AsTensor(tensor) | Argument::AsOptionalTensor(OptionalTensor::AsTensor(tensor))) => {
                self.named(&tensor.name)
            }
            _ => Err(self.wrong(name, "a tensor")),
        }
    }

    fn named(&self, name: &str) -> Result<Known, LowerReason> {
        let known = self.names.tensors.get(name).copied();
        known.ok_or_else(|| LowerReason::Inputs("it reads a value that is not a tensor".to_string()))
    }

    /// A required tensor argument.
    pub fn value(&mut self, name: &'static str) -> Result<Value, LowerReason> {
        let known = self.known(name)?;
        self.read(known)
    }

    /// An optional tensor argument.
    pub fn optional(&mut self, name: &'static str) -> Result<Option<Value>, LowerReason> {
        if self.has(name) { self.value(name).map(Some) } else { Ok(None) }
    }

    /// An optional tensor argument; if omitted, a tensor of `shape` filled with a number.
    pub fn optional_or(
        &mut self,
        name: &'static str,
        dtype: DType,
        shape: &[Dim],
        value: f64,
    ) -> Result<Value, LowerReason> {
        self.optional(name)?.map_or_else(|| filled(self, dtype, shape, value), Ok)
    }

    pub fn values(&mut self, name: &'static str) -> Result<Vec<Value>, LowerReason> {
        let list = self.optional_values(name)?;
        list.into_iter()
            .map(|v| v.ok_or_else(|| LowerReason::Inputs(format!("`{name}` with a missing tensor"))))
            .collect()
    }

    pub fn optional_values(&mut self, name: &'static str) -> Result<Vec<Option<Value>>, LowerReason> {
        let list: Vec<Option<String>> = match self.argument(name) {
            Some(Argument::AsTensors(list)) => list.iter().map(|n| Some(n.name.clone())).collect(),
            Some(Argument::AsOptionalTensors(list)) => {
                list.iter().map(|t| tensor_name(t).map(str::to_string)).collect()
            }
            _ => return Err(self.wrong(name, "a list of tensors")),
        };
        let mut values = Vec::with_capacity(list.len());
        for name in list {
            values.push(match name {
                Some(name) => {
                    let known = self.named(&name)?;
                    Some(self.read(known)?)
                }
                None => None,
            });
        }
        Ok(values)
    }

    /// Element type and shape of a tensor argument.
    pub fn fact_of(&self, name: &'static str) -> Result<Fact, LowerReason> {
        match self.known(name)? {
            Known::Value(value) | Known::Complex(value, _) => Ok(self.fact(value)),
            Known::Weight(at) => Ok(self.ledger.weights[at].fact.clone()),
            Known::Absent(what) => Err(LowerReason::Unsupported(what.to_string())),
        }
    }

    /// Strides of a tensor argument in elements, for the exported sizes.
    pub fn strides(&self, name: &str) -> Option<Vec<i64>> {
        let Some(Argument::AsTensor(tensor)) = self.argument(name) else { return None };
        self.metas.get(&tensor.name)?.strides.iter().map(SymInt::known).collect()
    }

    /// Storage offset of a tensor argument in elements.
    pub fn storage_offset(&self, name: &str) -> Option<i64> {
        let Some(Argument::AsTensor(tensor)) = self.argument(name) else { return None };
        self.metas.get(&tensor.name)?.storage_offset.as_ref().map_or(Some(0), SymInt::known)
    }

    pub fn number(&self, name: &'static str) -> Result<Option<Number>, LowerReason> {
        match self.argument(name) {
            None => Ok(None),
            Some(Argument::AsInt(value)) => Ok(Some(Number::Int(*value))),
            Some(Argument::AsBool(value)) => Ok(Some(Number::Bool(*value))),
            Some(Argument::AsFloat(value)) => match value.value() {
                Some(value) => Ok(Some(Number::Float(value))),
                None => Err(self.wrong(name, "a number")),
            },
            Some(Argument::AsSymInt(_)) => match self.dim(name)?.and_then(|d| d.known()) {
                Some(value) => Ok(Some(Number::Int(value))),
                None => Err(LowerReason::Unsupported(format!("a symbolic size as `{name}`"))),
            },
            _ => Err(self.wrong(name, "a number")),
        }
    }

    pub fn operand(&mut self, name: &'static str) -> Result<Option<Operand>, LowerReason> {
        match self.argument(name) {
            None => Ok(None),
            Some(Argument::AsTensor(_) | Argument::AsOptionalTensor(_)) => {
                self.value(name).map(|v| Some(Operand::Tensor(v)))
            }
            Some(Argument::AsSymInt(_)) => Ok(self.dim(name)?.map(|dim| match dim.known() {
                Some(value) => Operand::Number(Number::Int(value)),
                None => Operand::Size(dim),
            })),
            _ => Ok(self.number(name)?.map(Operand::Number)),
        }
    }

    pub fn float(&self, name: &'static str, default: f64) -> Result<f64, LowerReason> {
        Ok(self.number(name)?.map_or(default, Number::float))
    }

    pub fn int(&self, name: &'static str, default: i64) -> Result<i64, LowerReason> {
        match self.number(name)? {
            None => Ok(default),
            Some(Number::Int(value)) => Ok(value),
            Some(_) => Err(self.wrong(name, "an integer")),
        }
    }

    pub fn flag(&self, name: &'static str, default: bool) -> Result<bool, LowerReason> {
        match self.argument(name) {
            None => Ok(default),
            Some(Argument::AsBool(value)) => Ok(*value),
            _ => Err(self.wrong(name, "a boolean")),
        }
    }

    pub fn text(&self, name: &'static str, default: &str) -> Result<String, LowerReason> {
        match self.argument(name) {
            None => Ok(default.to_string()),
            Some(Argument::AsString(word)) => Ok(word.clone()),
            _ => Err(self.wrong(name, "a word")),
        }
    }

    pub fn dtype(&self, name: &'static str) -> Result<Option<DType>, LowerReason> {
        match self.argument(name) {
            None => Ok(None),
            Some(Argument::AsScalarType(code)) => {
                let known = dtype_of(*code).map(Some);
                known.ok_or_else(|| LowerReason::Unsupported(format!("element type code {code}")))
            }
            _ => Err(self.wrong(name, "an element type")),
        }
    }

    fn size(&self, size: &SymArgument) -> Result<Dim, LowerReason> {
        match size {
            SymArgument::AsInt(value) => Ok(Dim::Known(*value)),
            SymArgument::AsName(name) => {
                let stored = self.names.sizes.get(name).cloned();
                stored.ok_or_else(|| LowerReason::Inputs("it reads a size that is not a size".to_string()))
            }
        }
    }

    pub fn dim(&self, name: &'static str) -> Result<Option<Dim>, LowerReason> {
        match self.argument(name) {
            None => Ok(None),
            Some(Argument::AsInt(value)) => Ok(Some(Dim::Known(*value))),
            Some(Argument::AsSymInt(size)) => self.size(size).map(Some),
            _ => Err(self.wrong(name, "a size")),
        }
    }

    pub fn dims(&self, name: &'static str) -> Result<Option<Vec<Dim>>, LowerReason> {
        match self.argument(name) {
            None => Ok(None),
            Some(Argument::AsInts(list)) => Ok(Some(list.iter().map(|&v| Dim::Known(v)).collect())),
            Some(Argument::AsSymInts(list)) => list.iter().map(|s| self.size(s)).collect::<Result<_, _>>().map(Some),
            Some(Argument::AsInt(value)) => Ok(Some(vec![Dim::Known(*value)])),
            _ => Err(self.wrong(name, "a list of sizes")),
        }
    }

    /// A required list of sizes.
    pub fn shape(&self, name: &'static str) -> Result<Vec<Dim>, LowerReason> {
        self.dims(name)?.ok_or_else(|| self.wrong(name, "a list of sizes"))
    }

    pub fn ints(&self, name: &'static str) -> Result<Option<Vec<i64>>, LowerReason> {
        let Some(dims) = self.dims(name)? else { return Ok(None) };
        let numbers: Option<Vec<i64>> = dims.iter().map(Dim::known).collect();
        numbers.map(Some).ok_or_else(|| self.wrong(name, "a list of integers"))
    }

    pub fn floats(&self, name: &'static str) -> Result<Option<Vec<f64>>, LowerReason> {
        match self.argument(name) {
            None => Ok(None),
            Some(Argument::AsFloats(list)) => {
                let numbers: Option<Vec<f64>> = list.iter().map(Float::value).collect();
                numbers.map(Some).ok_or_else(|| self.wrong(name, "a list of numbers"))
            }
            _ => Err(self.wrong(name, "a list of numbers")),
        }
    }

    /// An axis argument, normalised to be non-negative.
    pub fn axis(&self, name: &'static str, default: i64, rank: usize) -> Result<usize, LowerReason> {
        // A scalar is treated as a vector of one element.
        attribute::axis(self.int(name, default)?, rank.max(1))
    }

    /// Sorted axes; all axes if the argument is omitted or empty.
    pub fn axes(&self, name: &'static str, rank: usize) -> Result<Vec<usize>, LowerReason> {
        match self.ints(name)? {
            Some(list) if !list.is_empty() && rank > 0 => attribute::axes(&list, rank),
            _ => Ok((0..rank).collect()),
        }
    }
}
