//! Operators that gather elements by index.

use super::movement::stopped;
use super::{Outputs, Scope, one};
use crate::import::batched;
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::gather::{add_offset, count, scaled, steps};
use crate::import::onnx::lower::movement::{met, transposed};
use crate::import::symbolic_batch::with_batch_of;
use crate::op::{Compare, Gather, Op, Value};
use crate::tensor::DType;
use crate::tensor::dim::{Dim, volume};

pub fn embedding(scope: &mut Scope<'_>) -> Outputs {
    let (table, index) = (scope.value("weight")?, scope.value("indices")?);
    let rows = scope.add(Op::Gather(Gather { axis: 0 }), &[table, index])?;
    let padding = scope.int("padding_idx", -1)?;
    if padding < 0 {
        return one(rows);
    }
    // The padding row gets no gradient.
    let number = scope.scalar(scope.fact(index).dtype, padding as f64)?;
    let is = scope.compare(Compare::Equal, index, number)?;
    let mut column = scope.fact(is).shape;
    column.push(Dim::Known(1));
    let is = scope.reshape(is, column)?;
    let without_gradient = stopped(scope, rows)?;
    one(scope.select(is, without_gradient, rows)?)
}

/// `index_select`.
pub fn select(scope: &mut Scope<'_>) -> Outputs {
    let (x, index) = (scope.value("self")?, scope.value("index")?);
    let rank = scope.fact(x).rank();
    let axis = scope.axis("dim", 0, rank)?;
    one(scope.add(Op::Gather(Gather { axis }), &[x, index])?)
}

/// Flat indices of the elements that `index` selects along an axis of a tensor of shape `dims`; the other coordinates
/// are those of the index.
pub fn flat_place(scope: &mut Scope<'_>, dims: &[Dim], index: Value, along: usize) -> Result<Value, LowerReason> {
    let picked = scope.fact(index).shape;
    if picked.len() != dims.len() || dims.is_empty() {
        return Err(LowerReason::Inputs(format!(
            "an index of rank {} for an input of rank {}",
            picked.len(),
            dims.len()
        )));
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
        place = add_offset(scope, place, steps)?;
    }
    place.ok_or_else(|| LowerReason::Inputs("it has no index".to_string()))
}

/// `y[i, j, …] = x[i, index[i, j, …], …]`, with the index at one axis.
pub fn gather(scope: &mut Scope<'_>) -> Outputs {
    let (x, index) = (scope.value("self")?, scope.value("index")?);
    let dims = scope.fact(x).shape;
    let along = scope.axis("dim", 0, dims.len())?;
    // On the other axes the coordinates are those of the index: a batch axis there is a batch axis of `x`.
    let mut wide = scope.fact(index).shape;
    if let (Some(size), Some(own)) = (wide.get_mut(along), dims.get(along)) {
        size.clone_from(own);
    }
    let x = with_batch_of(scope, x, &wide)?;
    let dims = scope.fact(x).shape;
    if let Some(slices) = batched::slices(scope, &dims, index, along)? {
        return one(batched::gather(scope, x, slices, along)?);
    }
    let place = flat_place(scope, &dims, index, along)?;
    from_flat(scope, x, vec![volume(&dims)?], 0, place)
}

/// `take_along_dim`: a gather whose index and input are broadcast along the other axes.
pub fn take_along(scope: &mut Scope<'_>) -> Outputs {
    let (x, index) = (scope.value("self")?, scope.value("indices")?);
    if !scope.has("dim") {
        return take_from(scope, x, index);
    }
    let (mut own, mut picked) = (scope.fact(x).shape, scope.fact(index).shape);
    let along = scope.axis("dim", 0, own.len())?;
    if own.len() != picked.len() || own.is_empty() {
        return Err(LowerReason::Inputs(format!(
            "an index of rank {} for an input of rank {}",
            picked.len(),
            own.len()
        )));
    }
    let (mut a, mut b) = (own.clone(), picked.clone());
    (a[along], b[along]) = (Dim::Known(1), Dim::Known(1));
    let mut all = met(&a, &b)?;
    all[along] = std::mem::replace(&mut own[along], Dim::Known(1));
    let x = scope.broadcast(x, all.clone())?;
    all[along] = std::mem::replace(&mut picked[along], Dim::Known(1));
    let index = scope.broadcast(index, all)?;
    let dims = scope.fact(x).shape;
    let place = flat_place(scope, &dims, index, along)?;
    from_flat(scope, x, vec![volume(&dims)?], 0, place)
}

pub fn take(scope: &mut Scope<'_>) -> Outputs {
    let (x, index) = (scope.value("self")?, scope.value("index")?);
    take_from(scope, x, index)
}

fn take_from(scope: &mut Scope<'_>, x: Value, index: Value) -> Outputs {
    let count = volume(&scope.fact(x).shape)?;
    from_flat(scope, x, vec![count], 0, index)
}

/// An index list applied to a tensor: permute axes by `perm`, reshape to `flat`, and gather `place` along axis `lead`.
pub struct Indexed {
    /// Makes the indexed axes adjacent.
    pub perm: Vec<usize>,
    /// Number of axes before the indexed ones.
    pub lead: usize,
    /// The combined index of all indexed axes.
    pub place: Value,
    /// The shape with the indexed axes merged.
    pub flat: Vec<Dim>,
}

impl Indexed {
    /// Reads the indices of the first axes of a tensor of shape `dims`; `None` skips an axis. Non-adjacent indexed axes
    /// move to the front, as in NumPy.
    pub fn read(scope: &mut Scope<'_>, dims: &[Dim], indices: Vec<Option<Value>>) -> Result<Indexed, LowerReason> {
        let given: Vec<(usize, Value)> =
            indices.into_iter().enumerate().filter_map(|(at, index)| Some((at, index?))).collect();
        let (Some(&(first, _)), Some(&(last, _))) = (given.first(), given.last()) else {
            return Err(LowerReason::Inputs("it has no index".to_string()));
        };
        if last >= dims.len() {
            return Err(LowerReason::Inputs(format!("an index of axis {last} for an input of rank {}", dims.len())));
        }
        if given.iter().any(|(_, index)| !scope.fact(*index).dtype.is_integer()) {
            return Err(LowerReason::Unsupported("a boolean index, whose result has no fixed size,".to_string()));
        }
        let adjacent = last - first + 1 == given.len();
        let lead = if adjacent { first } else { 0 };
        let indexed: Vec<usize> = given.iter().map(|(at, _)| *at).collect();
        let mut perm: Vec<usize> = (0..dims.len()).filter(|at| !indexed.contains(at)).collect();
        perm.splice(lead..lead, indexed.iter().copied());
        let turned: Vec<Dim> = perm.iter().map(|&at| dims[at].clone()).collect();
        let sizes = &turned[lead..lead + given.len()];
        let mut place = None;
        for (at, (_, index)) in given.into_iter().enumerate() {
            let index = every(scope, index, &sizes[at])?;
            let index = scope.cast(index, DType::I64)?;
            let steps = match sizes {
                // A gather accepts negative indices itself.
                [_] => index,
                _ => steps(scope, index, &sizes[at], &volume(&sizes[at + 1..])?)?,
            };
            place = add_offset(scope, place, steps)?;
        }
        let place = place.ok_or_else(|| LowerReason::Inputs("it has no index".to_string()))?;
        let mut flat = turned[..lead].to_vec();
        flat.push(volume(sizes)?);
        flat.extend_from_slice(&turned[lead + sizes.len()..]);
        Ok(Indexed { perm, lead, place, flat })
    }
}

/// `x[rows, columns]` where `rows` is `arange` over all rows, along a result axis on which the columns are constant.
/// This gathers the same columns of every row, as mask lookups do. `None` in all other cases.
fn of_every_row(scope: &mut Scope<'_>, x: Value, rows: Value, columns: Value) -> Result<Option<Value>, LowerReason> {
    let Some(axis) = counted(scope, rows) else { return Ok(None) };
    let (dims, mut picked) = (scope.fact(x).shape, scope.fact(columns).shape);
    if dims.len() < 2 || !scope.fact(columns).dtype.is_integer() {
        return Ok(None);
    }
    let own = scope.fact(rows).shape;
    // Both at the broadcast rank.
    picked.splice(0..0, vec![Dim::Known(1); own.len().saturating_sub(picked.len())]);
    let under = axis + picked.len() - own.len();
    let count = own[axis].clone();
    let all = dims[0] == count || dims[0].substitute(scope.frozen)? == count.substitute(scope.frozen)?;
    if !all || !picked[under].is(1) {
        return Ok(None);
    }
    picked.remove(under);
    let columns = scope.reshape(columns, picked)?;
    let columns = scope.cast(columns, DType::I64)?;
    let y = scope.add(Op::Gather(Gather { axis: 1 }), &[x, columns])?;
    let rank = scope.fact(y).rank();
    // Moves the row axis to its position in the index.
    let perm = (1..=under).chain([0]).chain(under + 1..rank).collect();
    transposed(scope, y, perm).map(Some)
}

/// Opens an `arange` over the exported batch size: along the batch axis it covers the symbolic batch.
pub fn every(scope: &mut Scope<'_>, index: Value, size: &Dim) -> Result<Value, LowerReason> {
    let Some(axis) = counted(scope, index) else { return Ok(index) };
    let mut shape = scope.fact(index).shape;
    shape[axis].clone_from(size);
    with_batch_of(scope, index, &shape)
}

/// The single axis along which a value counts `0, 1, …`; all its other axes have size 1.
fn counted(scope: &Scope<'_>, mut value: Value) -> Option<usize> {
    let shape = scope.fact(value).shape;
    let mut wide = (0..shape.len()).filter(|at| !shape[*at].is(1));
    let axis = wide.next().filter(|_| wide.next().is_none())?;
    for _ in 0..16 {
        match &scope.graph.node(value.node).op {
            Op::Iota(iota) => return (iota.fact.shape[iota.axis] == shape[axis]).then_some(axis),
            Op::Reshape(_) | Op::Cast(_) => value = scope.graph.inputs(value.node)[0],
            _ => return None,
        }
    }
    None
}

/// `x[…, index, …]` with integer indices, as in NumPy.
pub fn index(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let dims = scope.fact(x).shape;
    let indices = scope.optional_values("indices")?;
    if let [Some(rows), Some(columns)] = indices[..]
        && let Some(y) = of_every_row(scope, x, rows, columns)?
    {
        return one(y);
    }
    let Indexed { perm, lead, place, flat } = Indexed::read(scope, &dims, indices)?;
    let turned = transposed(scope, x, perm)?;
    from_flat(scope, turned, flat, lead, place)
}

fn from_flat(scope: &mut Scope<'_>, x: Value, flat: Vec<Dim>, axis: usize, place: Value) -> Outputs {
    let flat = scope.reshape(x, flat)?;
    one(scope.add(Op::Gather(Gather { axis }), &[flat, place])?)
}
