//! Activation functions of recurrent layers, by their ONNX names.

use super::{LowerReason, Scope};
use crate::import::build::Build;
use crate::import::onnx::proto::attribute_proto::AttributeType;
use crate::op::{Binary, Compare, Unary, Value};

#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    name: String,
    alpha: f64,
    beta: f64,
}

/// Name, and default alpha and beta where the function has them.
const FUNCTIONS: [(&str, Option<f64>, Option<f64>); 11] = [
    ("affine", Some(1.0), Some(0.0)),
    ("elu", Some(1.0), None),
    ("hardsigmoid", Some(0.2), Some(0.5)),
    ("leakyrelu", Some(0.01), None),
    ("relu", None, None),
    ("scaledtanh", Some(1.0), Some(1.0)),
    ("sigmoid", None, None),
    ("softplus", None, None),
    ("softsign", None, None),
    ("tanh", None, None),
    ("thresholdedrelu", Some(1.0), None),
];

/// The activation functions of each direction: from the attribute, or `defaults`. The lists of alphas and betas have
/// one entry for each function that takes one, in order.
pub fn functions(scope: &Scope<'_>, defaults: &[&str], directions: usize) -> Result<Vec<Vec<Function>>, LowerReason> {
    let names_given = texts(scope, "activations")?;
    let names: Vec<String> = match names_given {
        Some(names_given) if !names_given.is_empty() => names_given,
        _ => defaults.iter().cycle().take(defaults.len() * directions).map(|name| (*name).to_string()).collect(),
    };
    if names.len() != defaults.len() * directions {
        let found = format!("{names:?}");
        return Err(LowerReason::Attribute { name: "activations", found, expected: "one per function of the layer" });
    }
    let mut alphas = scope.floats("activation_alpha")?.unwrap_or_default().into_iter().map(f64::from);
    let mut betas = scope.floats("activation_beta")?.unwrap_or_default().into_iter().map(f64::from);
    let mut functions = Vec::with_capacity(names.len());
    for name in names {
        let lower = name.to_ascii_lowercase();
        let Some((_, alpha, beta)) = FUNCTIONS.iter().find(|(candidate, ..)| *candidate == lower) else {
            return Err(LowerReason::Unsupported(format!("the activation `{name}` of a recurrent layer")));
        };
        let alpha = alpha.map_or(0.0, |defaults| alphas.next().unwrap_or(defaults));
        let beta = beta.map_or(0.0, |defaults| betas.next().unwrap_or(defaults));
        functions.push(Function { name: lower, alpha, beta });
    }
    Ok(functions.chunks(defaults.len().max(1)).map(<[Function]>::to_vec).collect())
}

impl Function {
    /// Compares the name, ignoring case.
    pub fn is(&self, name: &str) -> bool {
        self.name.eq_ignore_ascii_case(name)
    }

    pub fn apply(&self, scope: &mut Scope<'_>, x: Value) -> Result<Value, LowerReason> {
        let (alpha, beta) = (self.alpha, self.beta);
        match self.name.as_str() {
            "affine" => line(scope, x, alpha, beta),
            "elu" => {
                let below = scope.with_number(Binary::Min, x, 0.0)?;
                let exp = scope.unary(Unary::Exp, below)?;
                let shifted = scope.with_number(Binary::Sub, exp, 1.0)?;
                let scaled = scope.with_number(Binary::Mul, shifted, alpha)?;
                select_above(scope, x, 0.0, scaled)
            }
            "hardsigmoid" => {
                let line = line(scope, x, alpha, beta)?;
                let below = scope.with_number(Binary::Min, line, 1.0)?;
                scope.with_number(Binary::Max, below, 0.0)
            }
            "leakyrelu" => {
                let scaled = scope.with_number(Binary::Mul, x, alpha)?;
                select_above(scope, x, 0.0, scaled)
            }
            "relu" => scope.unary(Unary::Relu, x),
            "scaledtanh" => {
                let inner = scope.with_number(Binary::Mul, x, beta)?;
                let tanh = scope.unary(Unary::Tanh, inner)?;
                scope.with_number(Binary::Mul, tanh, alpha)
            }
            "sigmoid" => scope.unary(Unary::Sigmoid, x),
            "softplus" => scope.unary(Unary::Softplus, x),
            "softsign" => {
                let size = scope.unary(Unary::Abs, x)?;
                let below = scope.with_number(Binary::Add, size, 1.0)?;
                scope.binary(Binary::Div, x, below)
            }
            "thresholdedrelu" => {
                let zero = scope.scalar(scope.fact(x).dtype, 0.0)?;
                select_above(scope, x, alpha, zero)
            }
            _ => scope.unary(Unary::Tanh, x),
        }
    }
}

/// `alpha·x + beta`
fn line(scope: &mut Scope<'_>, x: Value, alpha: f64, beta: f64) -> Result<Value, LowerReason> {
    let scaled = scope.with_number(Binary::Mul, x, alpha)?;
    scope.with_number(Binary::Add, scaled, beta)
}

/// `x > bound ? x : replacement`
fn select_above(scope: &mut Scope<'_>, x: Value, bound: f64, replacement: Value) -> Result<Value, LowerReason> {
    let bound = scope.scalar(scope.fact(x).dtype, bound)?;
    let large = scope.compare(Compare::Less, bound, x)?;
    scope.select(large, x, replacement)
}

fn texts(scope: &Scope<'_>, name: &'static str) -> Result<Option<Vec<String>>, LowerReason> {
    let Some(attribute) = scope.node.attributes.iter().find(|a| a.name() == name) else { return Ok(None) };
    if !matches!(attribute.r#type(), AttributeType::Strings | AttributeType::Undefined) {
        let attribute = format!("of type {}", attribute.r#type().as_str_name());
        return Err(LowerReason::Attribute { name, found: attribute, expected: "a list of strings" });
    }
    Ok(Some(attribute.strings.iter().map(|s| String::from_utf8_lossy(s).into_owned()).collect()))
}
