//! Operators that gather elements by index.

use super::{Outputs, Scope, one};
use crate::import::batched;
use crate::import::build::Build;
use crate::import::embedding;
use crate::import::equal_sizes::agree;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::gather::{add_offset, element_places, steps};
use crate::import::onnx::lower::movement::{broadcast_shape, transposed};
use crate::import::symbolic_batch::with_batch_of;
use crate::op::{Gather, Op, Value};
use crate::tensor::DType;
use crate::tensor::dim::{Dim, volume};

pub fn embedding(scope: &mut Scope<'_>) -> Outputs {
    let (table, index) = (scope.value("weight")?, scope.value("indices")?);
    let rows = scope.add(Op::Gather(Gather { axis: 0 }), &[table, index])?;
    let (scaled, padding) = (scope.flag("scale_grad_by_freq", false)?, scope.int("padding_idx", -1)?);
    one(embedding::with_options(scope, rows, [table, index], scaled, Some(padding))?)
}

/// `index_select`.
pub fn select(scope: &mut Scope<'_>) -> Outputs {
    let (x, index) = (scope.value("self")?, scope.value("index")?);
    let rank = scope.fact(x).rank();
    let axis = scope.axis("dim", 0, rank)?;
    one(scope.add(Op::Gather(Gather { axis }), &[x, index])?)
}

/// `y[i, j, …] = x[i, index[i, j, …], …]`, with the index at one axis.
pub fn gather(scope: &mut Scope<'_>) -> Outputs {
    let (x, index) = (scope.value("self")?, scope.value("index")?);
    let dims = scope.fact(x).shape;
    let index_axis = scope.axis("dim", 0, dims.len())?;
    // On the other axes the coordinates are those of the index: a batch axis there is a batch axis of `x`.
    let mut target_shape = scope.fact(index).shape;
    if let (Some(size), Some(full_size)) = (target_shape.get_mut(index_axis), dims.get(index_axis)) {
        size.clone_from(full_size);
    }
    let x = with_batch_of(scope, x, &target_shape)?;
    let dims = scope.fact(x).shape;
    if let Some(slices) = batched::slices(scope, &dims, index, index_axis)? {
        return one(batched::gather(scope, x, slices, index_axis)?);
    }
    let flat_index = element_places(scope, &dims, index, index_axis)?;
    gather_flat(scope, x, vec![volume(&dims)?], 0, flat_index)
}

/// `take_along_dim`: a gather whose index and input are broadcast along the other axes.
pub fn take_along(scope: &mut Scope<'_>) -> Outputs {
    let (x, index) = (scope.value("self")?, scope.value("indices")?);
    if !scope.has("dim") {
        return take_from(scope, x, index);
    }
    let (mut x_shape, mut index_shape) = (scope.fact(x).shape, scope.fact(index).shape);
    let index_axis = scope.axis("dim", 0, x_shape.len())?;
    if x_shape.len() != index_shape.len() || x_shape.is_empty() {
        return Err(LowerReason::Inputs(format!(
            "an index of rank {} for an input of rank {}",
            index_shape.len(),
            x_shape.len()
        )));
    }
    let (mut a, mut b) = (x_shape.clone(), index_shape.clone());
    (a[index_axis], b[index_axis]) = (Dim::Known(1), Dim::Known(1));
    let mut shape = broadcast_shape(&a, &b)?;
    shape[index_axis] = std::mem::replace(&mut x_shape[index_axis], Dim::Known(1));
    let x = scope.broadcast(x, shape.clone())?;
    shape[index_axis] = std::mem::replace(&mut index_shape[index_axis], Dim::Known(1));
    let index = scope.broadcast(index, shape)?;
    let dims = scope.fact(x).shape;
    let flat_index = element_places(scope, &dims, index, index_axis)?;
    gather_flat(scope, x, vec![volume(&dims)?], 0, flat_index)
}

pub fn take(scope: &mut Scope<'_>) -> Outputs {
    let (x, index) = (scope.value("self")?, scope.value("index")?);
    take_from(scope, x, index)
}

fn take_from(scope: &mut Scope<'_>, x: Value, index: Value) -> Outputs {
    let count = volume(&scope.fact(x).shape)?;
    gather_flat(scope, x, vec![count], 0, index)
}

/// An index list applied to a tensor: permute axes by `perm`, reshape to `flat`, and gather `flat_index` along axis
/// `lead`.
pub struct Indexed {
    /// Makes the indexed axes adjacent.
    pub perm: Vec<usize>,
    /// Number of axes before the indexed ones.
    pub lead: usize,
    /// The combined index of all indexed axes.
    pub flat_index: Value,
    /// The shape with the indexed axes merged.
    pub flat: Vec<Dim>,
}

impl Indexed {
    /// Reads the indices of the first axes of a tensor of shape `dims`; `None` skips an axis. Non-adjacent indexed axes
    /// move to the front, as in NumPy.
    pub fn read(scope: &mut Scope<'_>, dims: &[Dim], indices: Vec<Option<Value>>) -> Result<Indexed, LowerReason> {
        let axis_indices: Vec<(usize, Value)> =
            indices.into_iter().enumerate().filter_map(|(at, index)| Some((at, index?))).collect();
        let (Some(&(first, _)), Some(&(last, _))) = (axis_indices.first(), axis_indices.last()) else {
            return Err(LowerReason::Inputs("it has no index".to_string()));
        };
        if last >= dims.len() {
            return Err(LowerReason::Inputs(format!("an index of axis {last} for an input of rank {}", dims.len())));
        }
        if axis_indices.iter().any(|(_, index)| !scope.fact(*index).dtype.is_integer()) {
            return Err(LowerReason::Unsupported("a boolean index, whose result has no fixed size,".to_string()));
        }
        let adjacent = last - first + 1 == axis_indices.len();
        let lead = if adjacent { first } else { 0 };
        let indexed: Vec<usize> = axis_indices.iter().map(|(at, _)| *at).collect();
        let mut perm: Vec<usize> = (0..dims.len()).filter(|at| !indexed.contains(at)).collect();
        perm.splice(lead..lead, indexed.iter().copied());
        let permuted_dims: Vec<Dim> = perm.iter().map(|&at| dims[at].clone()).collect();
        let sizes = &permuted_dims[lead..lead + axis_indices.len()];
        let mut flat_index = None;
        for (at, (_, index)) in axis_indices.into_iter().enumerate() {
            let index = open_range(scope, index, &sizes[at])?;
            let index = scope.cast(index, DType::I64)?;
            let steps = match sizes {
                // A gather accepts negative indices itself.
                [_] => index,
                _ => steps(scope, index, &sizes[at], &volume(&sizes[at + 1..])?)?,
            };
            flat_index = add_offset(scope, flat_index, steps)?;
        }
        let flat_index = flat_index.ok_or_else(|| LowerReason::Inputs("it has no index".to_string()))?;
        let mut flat = permuted_dims[..lead].to_vec();
        flat.push(volume(sizes)?);
        flat.extend_from_slice(&permuted_dims[lead + sizes.len()..]);
        Ok(Indexed { perm, lead, flat_index, flat })
    }
}

/// `x[rows, columns]` where `rows` is `arange` over all rows, along a result axis on which the columns are constant.
/// This gathers the same columns of every row, as mask lookups do. `None` in all other cases.
fn gather_of_every_row(
    scope: &mut Scope<'_>,
    x: Value,
    rows: Value,
    columns: Value,
) -> Result<Option<Value>, LowerReason> {
    let Some(axis) = counting_axis(scope, rows) else { return Ok(None) };
    let (dims, mut columns_shape) = (scope.fact(x).shape, scope.fact(columns).shape);
    if dims.len() < 2 || !scope.fact(columns).dtype.is_integer() {
        return Ok(None);
    }
    let rows_shape = scope.fact(rows).shape;
    // Both at the broadcast rank.
    columns_shape.splice(0..0, vec![Dim::Known(1); rows_shape.len().saturating_sub(columns_shape.len())]);
    let row_axis = axis + columns_shape.len() - rows_shape.len();
    let count = rows_shape[axis].clone();
    agree(&dims[0], &count)?;
    let covers_rows = dims[0] == count || dims[0].substitute(scope.frozen)? == count.substitute(scope.frozen)?;
    if !covers_rows || !columns_shape[row_axis].is(1) {
        return Ok(None);
    }
    columns_shape.remove(row_axis);
    let columns = scope.reshape(columns, columns_shape)?;
    let columns = scope.cast(columns, DType::I64)?;
    let y = scope.add(Op::Gather(Gather { axis: 1 }), &[x, columns])?;
    let rank = scope.fact(y).rank();
    // Moves the row axis to its position in the index.
    let perm = (1..=row_axis).chain([0]).chain(row_axis + 1..rank).collect();
    transposed(scope, y, perm).map(Some)
}

/// Opens an `arange` over the exported batch size: along the batch axis it covers the symbolic batch. An `arange` over
/// one symbol that indexes an axis of another one shows that both are equal.
pub fn open_range(scope: &mut Scope<'_>, index: Value, size: &Dim) -> Result<Value, LowerReason> {
    let Some(axis) = counting_axis(scope, index) else { return Ok(index) };
    let mut shape = scope.fact(index).shape;
    agree(size, &shape[axis])?;
    shape[axis].clone_from(size);
    with_batch_of(scope, index, &shape)
}

/// The single axis along which a value counts `0, 1, …`; all its other axes have size 1.
fn counting_axis(scope: &Scope<'_>, mut value: Value) -> Option<usize> {
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
        && let Some(y) = gather_of_every_row(scope, x, rows, columns)?
    {
        return one(y);
    }
    let Indexed { perm, lead, flat_index, flat } = Indexed::read(scope, &dims, indices)?;
    let permuted = transposed(scope, x, perm)?;
    gather_flat(scope, permuted, flat, lead, flat_index)
}

fn gather_flat(scope: &mut Scope<'_>, x: Value, flat: Vec<Dim>, axis: usize, flat_index: Value) -> Outputs {
    let flat = scope.reshape(x, flat)?;
    one(scope.add(Op::Gather(Gather { axis }), &[flat, flat_index])?)
}
