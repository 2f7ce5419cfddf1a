//! Operators that pick elements by index.

use super::{Outputs, Scope, one};
use crate::import::build::Build;
use crate::import::onnx::lower::gather::{count, further, scaled, steps};
use crate::import::onnx::name::shown;
use crate::import::reason::Reason;
use crate::op::{Gather, Op, Value};
use crate::tensor::DType;
use crate::tensor::dim::{Dim, volume};

/// Rows of a table.
pub fn embedding(scope: &mut Scope<'_>) -> Outputs {
    let (table, index) = (scope.value("weight")?, scope.value("indices")?);
    if scope.int("padding_idx", -1)? >= 0 {
        let node = shown(&scope.origin.source).into_owned();
        scope.ledger.warnings.push(format!(
            "node `{node}`: the padding row of the embedding is trained like any other; PyTorch leaves it as it is"
        ));
    }
    one(scope.add(Op::Gather(Gather { axis: 0 }), &[table, index])?)
}

/// Slices along one axis.
pub fn select(scope: &mut Scope<'_>) -> Outputs {
    let (x, index) = (scope.value("self")?, scope.value("index")?);
    let rank = scope.fact(x).rank();
    let axis = scope.axis("dim", 0, rank)?;
    one(scope.add(Op::Gather(Gather { axis }), &[x, index])?)
}

/// `y[i, j, …] = x[i, index[i, j, …], …]`, with the index at one axis.
pub fn gather(scope: &mut Scope<'_>) -> Outputs {
    let (x, index) = (scope.value("self")?, scope.value("index")?);
    let (dims, picked) = (scope.fact(x).shape, scope.fact(index).shape);
    let along = scope.axis("dim", 0, dims.len())?;
    if picked.len() != dims.len() || dims.is_empty() {
        return Err(Reason::Inputs(format!("an index of rank {} for an input of rank {}", picked.len(), dims.len())));
    }
    let index = scope.cast(index, DType::I64)?;
    let mut place = None;
    for at in 0..dims.len() {
        let stride = volume(&dims[at + 1..])?;
        let steps = match at == along {
            true => steps(scope, index, &dims[at], &stride)?,
            false => {
                let count = count(scope, dims.len(), at, &picked[at])?;
                scaled(scope, count, &stride)?
            }
        };
        place = further(scope, place, steps)?;
    }
    from_flat(scope, x, vec![volume(&dims)?], 0, place)
}

/// `x[…, index, …]` as NumPy has it, with whole numbers for axes that follow one another.
pub fn index(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let dims = scope.fact(x).shape;
    let indices = scope.optional_values("indices")?;
    let first = indices.iter().position(Option::is_some).unwrap_or(0);
    let given: Vec<Value> = indices.iter().skip(first).map_while(|i| *i).collect();
    if given.len() != indices.iter().flatten().count() {
        return Err(Reason::Unsupported("an index of axes that do not follow one another".to_string()));
    }
    if first + given.len() > dims.len() || given.is_empty() {
        return Err(Reason::Inputs(format!("{} indices for an input of rank {}", given.len(), dims.len())));
    }
    if given.iter().any(|i| !scope.fact(*i).dtype.is_integer()) {
        return Err(Reason::Unsupported("an index of truths, whose result has no fixed size,".to_string()));
    }
    if let [only] = given.as_slice() {
        return one(scope.add(Op::Gather(Gather { axis: first }), &[x, *only])?);
    }
    let indexed = &dims[first..first + given.len()];
    let mut place = None;
    for (at, index) in given.into_iter().enumerate() {
        let index = scope.cast(index, DType::I64)?;
        let steps = steps(scope, index, &indexed[at], &volume(&indexed[at + 1..])?)?;
        place = further(scope, place, steps)?;
    }
    let mut flat = dims[..first].to_vec();
    flat.push(volume(indexed)?);
    flat.extend_from_slice(&dims[first + indexed.len()..]);
    from_flat(scope, x, flat, first, place)
}

fn from_flat(scope: &mut Scope<'_>, x: Value, flat: Vec<Dim>, axis: usize, place: Option<Value>) -> Outputs {
    let place = place.ok_or_else(|| Reason::Inputs("nothing is indexed".to_string()))?;
    let flat = scope.reshape(x, flat)?;
    one(scope.add(Op::Gather(Gather { axis }), &[flat, place])?)
}
