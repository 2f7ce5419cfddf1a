//! Declared types of graph inputs, outputs and intermediate tensors.

use std::collections::{BTreeSet, HashSet};

use crate::import::onnx::element;
use crate::import::onnx::error::Fault;
use crate::import::onnx::model::{Dim, ValueInfo};
use crate::import::onnx::proto::tensor_shape_proto::dimension::Value as DimValue;
use crate::import::onnx::proto::type_proto::Value as TypeValue;
use crate::import::onnx::proto::{GraphProto, ValueInfoProto};
use crate::import::onnx::warning::Warning;

pub struct Signature {
    /// Graph inputs without an initializer.
    pub inputs: Vec<ValueInfo>,
    /// Inputs that the caller may omit.
    pub optional: BTreeSet<String>,
    pub outputs: Vec<ValueInfo>,
    pub value_infos: Vec<ValueInfo>,
}

pub fn read(graph: &GraphProto, ir_version: i64, faults: &mut Vec<Fault>, warnings: &mut Vec<Warning>) -> Signature {
    let mut reader = Reader { faults, warnings };
    Signature {
        inputs: reader.inputs(graph, ir_version),
        optional: graph.input.iter().filter(|info| is_optional(info)).map(|info| info.name().to_owned()).collect(),
        outputs: reader.value_infos(&graph.output),
        value_infos: reader.value_infos(&graph.value_info),
    }
}

fn is_optional(info: &ValueInfoProto) -> bool {
    let kind = info.r#type.as_ref().and_then(|kind| kind.value.as_ref());
    matches!(kind, Some(TypeValue::OptionalType(_)))
}

struct Reader<'a> {
    faults: &'a mut Vec<Fault>,
    warnings: &'a mut Vec<Warning>,
}

impl Reader<'_> {
    /// Graph inputs without an initializer. Before IR version 4 every initializer is also listed as an input; later
    /// this is an input with a default value.
    fn inputs(&mut self, graph: &GraphProto, ir_version: i64) -> Vec<ValueInfo> {
        let with_values: HashSet<&str> = graph.initializer.iter().map(|tensor| tensor.name()).collect();
        let (mut seen, mut inputs, mut defaults) = (HashSet::new(), Vec::new(), Vec::new());
        for input in &graph.input {
            if !seen.insert(input.name()) {
                self.faults.push(Fault::DuplicateInput { name: input.name().to_owned() });
            } else if with_values.contains(input.name()) {
                defaults.push(input.name());
            } else {
                match self.value_info(input) {
                    Some(info) if info.elem_type != 0 => inputs.push(info),
                    _ => {
                        let kind = input.r#type.as_ref().and_then(|kind| kind.value.as_ref());
                        let other_kind = kind.is_some_and(|kind| !matches!(kind, TypeValue::TensorType(_)));
                        self.faults.push(Fault::InputType { name: input.name().to_owned(), other_kind });
                    }
                }
            }
        }
        if let (4.., Some(example)) = (ir_version, defaults.first()) {
            self.warnings.push(Warning::DefaultInputs { count: defaults.len(), example: (*example).to_owned() });
        }
        inputs
    }

    fn value_infos(&mut self, infos: &[ValueInfoProto]) -> Vec<ValueInfo> {
        let untyped = |info: &ValueInfoProto| ValueInfo { name: info.name().to_owned(), elem_type: 0, dims: None };
        infos.iter().map(|info| self.value_info(info).unwrap_or_else(|| untyped(info))).collect()
    }

    /// `None` if the declared type is not a tensor.
    fn value_info(&mut self, info: &ValueInfoProto) -> Option<ValueInfo> {
        let tensor = match info.r#type.as_ref()?.value.as_ref()? {
            TypeValue::TensorType(tensor) => tensor,
            // A given optional tensor is a tensor.
            TypeValue::OptionalType(optional) => match optional.elem_type.as_ref()?.value.as_ref()? {
                TypeValue::TensorType(tensor) => tensor,
                _ => return None,
            },
            _ => return None,
        };
        let (name, elem_type) = (info.name().to_owned(), tensor.elem_type());
        if elem_type != 0 && !element::known(elem_type) {
            self.faults.push(Fault::ElementType { name: name.clone(), code: elem_type });
        }
        let shape = tensor.shape.as_ref().map(|shape| shape.dim.iter().enumerate());
        let dims = shape.map(|shape| shape.map(|(axis, dim)| self.dim(&name, axis, dim.value.as_ref())).collect());
        Some(ValueInfo { name, elem_type, dims })
    }

    fn dim(&mut self, name: &str, axis: usize, value: Option<&DimValue>) -> Dim {
        match value {
            Some(DimValue::DimValue(-1)) => {
                self.warnings.push(Warning::MinusOne { name: name.to_owned() });
                Dim::Unknown
            }
            Some(&DimValue::DimValue(dim)) => {
                if dim < 0 {
                    self.faults.push(Fault::NegativeDim { name: name.to_owned(), axis, dim });
                }
                Dim::Known(dim)
            }
            Some(DimValue::DimParam(param)) if !param.is_empty() => Dim::Param(param.clone()),
            Some(DimValue::DimParam(_)) | None => Dim::Unknown,
        }
    }
}
