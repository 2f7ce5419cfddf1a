//! Activation functions of recurrent layers, by their ONNX names.

use super::{LowerReason, Scope};
use crate::import::activation;
use crate::import::formula::{Expr, formula};
use crate::import::onnx::proto::attribute_proto::AttributeType;
use crate::op::{Unary, Value};

/// A function of the input, alpha and beta.
type Body = for<'f> fn(Expr<'f>, f64, f64) -> Expr<'f>;

#[derive(Clone, Debug)]
pub struct Function {
    name: &'static str,
    alpha: f64,
    beta: f64,
    body: Body,
}

/// Name, default alpha and beta where the function has them, and the function.
const FUNCTIONS: [(&str, Option<f64>, Option<f64>, Body); 11] = [
    ("affine", Some(1.0), Some(0.0), |x, alpha, beta| x * alpha + beta),
    ("elu", Some(1.0), None, |x, alpha, _| {
        let scaled = (x.min(0.0).exp() - 1.0) * alpha;
        x.greater(0.0).select(x, scaled)
    }),
    ("hardsigmoid", Some(0.2), Some(0.5), activation::ramp),
    ("leakyrelu", Some(0.01), None, |x, alpha, _| {
        let scaled = x * alpha;
        x.greater(0.0).select(x, scaled)
    }),
    ("relu", None, None, |x, _, _| x.unary(Unary::Relu)),
    ("scaledtanh", Some(1.0), Some(1.0), |x, alpha, beta| (x * beta).tanh() * alpha),
    ("sigmoid", None, None, |x, _, _| x.sigmoid()),
    ("softplus", None, None, |x, _, _| x.softplus()),
    ("softsign", None, None, |x, _, _| activation::softsign(x)),
    ("tanh", None, None, |x, _, _| x.tanh()),
    ("thresholdedrelu", Some(1.0), None, |x, alpha, _| {
        let zero = x.number(0.0);
        x.greater(alpha).select(x, zero)
    }),
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
        let known = FUNCTIONS.into_iter().find(|(candidate, ..)| name.eq_ignore_ascii_case(candidate));
        let Some((lower, alpha, beta, body)) = known else {
            return Err(LowerReason::Unsupported(format!("the activation `{name}` of a recurrent layer")));
        };
        let alpha = alpha.map_or(0.0, |defaults| alphas.next().unwrap_or(defaults));
        let beta = beta.map_or(0.0, |defaults| betas.next().unwrap_or(defaults));
        functions.push(Function { name: lower, alpha, beta, body });
    }
    Ok(functions.chunks(defaults.len().max(1)).map(<[Function]>::to_vec).collect())
}

impl Function {
    /// Compares the name, ignoring case.
    pub fn is(&self, name: &str) -> bool {
        self.name.eq_ignore_ascii_case(name)
    }

    pub fn apply(&self, scope: &mut Scope<'_>, x: Value) -> Result<Value, LowerReason> {
        formula(scope, [x], |[x]| (self.body)(x, self.alpha, self.beta))
    }
}

fn texts(scope: &Scope<'_>, name: &'static str) -> Result<Option<Vec<String>>, LowerReason> {
    let Some(attribute) = scope.node.attributes.iter().find(|a| a.name() == name) else { return Ok(None) };
    if !matches!(attribute.r#type(), AttributeType::Strings | AttributeType::Undefined) {
        let attribute = format!("of type {}", attribute.r#type().as_str_name());
        return Err(LowerReason::Attribute { name, found: attribute, expected: "a list of strings" });
    }
    Ok(Some(attribute.strings.iter().map(|s| String::from_utf8_lossy(s).into_owned()).collect()))
}
