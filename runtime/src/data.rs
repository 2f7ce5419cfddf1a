//! Training data: named arrays with equally many rows, handed out item by item in a seeded order.

pub mod npz;
pub mod synthetic;

use crate::compile::Named;
use compiler::tensor::Tensor;
use std::collections::BTreeMap;
use thiserror::Error;

/// Why data does not fit a model.
#[derive(Debug, Error, PartialEq)]
#[allow(missing_docs)]
pub enum DataError {
    #[error("the data has no array `{name}`; it has {found}")]
    Missing { name: String, found: String },
    #[error("array `{name}` has {rows} rows, `{other}` has {other_rows}")]
    Rows { name: String, rows: usize, other: String, other_rows: usize },
    #[error("array `{name}` is empty: no rows to train on")]
    Empty { name: String },
    #[error("array `{name}` has rows of shape {got:?}, the model reads {expected:?}")]
    Shape { name: String, got: Vec<usize>, expected: Vec<usize> },
    #[error("{rows} rows are fewer than one minibatch of {batch}")]
    Few { rows: usize, batch: usize },
    #[error("array `{name}`, row {row}: label {label} is outside the {classes} classes 0 to {last}")]
    Label { name: String, row: usize, label: i64, classes: i64, last: i64 },
    #[error("array `{name}` holds {value} in row {row}; training on it would make every weight NaN")]
    NotFinite { name: String, row: usize, value: f64 },
    #[error("input `{name}` has no dimension for the batch")]
    NoBatch { name: String },
}

/// Arrays whose first dim is rows, by the names of the graph's inputs.
#[derive(Debug)]
pub struct Dataset {
    arrays: BTreeMap<String, Tensor>,
    rows: usize,
}

impl Dataset {
    /// The arrays that the feeds read, cast to their element types. A feed called `target` is also found as `y`.
    /// `feeds` have the shape of one item: their first dim is not compared.
    pub fn new(mut arrays: BTreeMap<String, Tensor>, feeds: &[Named]) -> Result<Dataset, DataError> {
        let found = arrays.keys().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(", ");
        let mut picked: BTreeMap<String, Tensor> = BTreeMap::new();
        for feed in feeds {
            let name = &feed.name;
            let missing = || DataError::Missing { name: name.clone(), found: found.clone() };
            let other = (name == compiler::pass::loss::TARGET).then_some("y");
            let array = arrays.remove(name).or_else(|| other.and_then(|y| arrays.remove(y))).ok_or_else(missing)?;
            let expected = feed.fact.concrete().unwrap_or_default();
            if expected.is_empty() || array.shape().is_empty() {
                return Err(DataError::NoBatch { name: name.clone() });
            }
            if array.shape()[1..] != expected[1..] {
                let (got, expected) = (array.shape()[1..].to_vec(), expected[1..].to_vec());
                return Err(DataError::Shape { name: name.clone(), got, expected });
            }
            if array.shape()[0] == 0 {
                return Err(DataError::Empty { name: name.clone() });
            }
            if let Some((other, t)) = picked.first_key_value()
                && t.shape()[0] != array.shape()[0]
            {
                let (rows, other_rows) = (array.shape()[0], t.shape()[0]);
                return Err(DataError::Rows { name: name.clone(), rows, other: other.clone(), other_rows });
            }
            let array = array.cast(feed.fact.dtype);
            refuse_not_finite(name, &array)?;
            picked.insert(name.clone(), array);
        }
        let rows = picked.values().next().map_or(0, |t| t.shape()[0]);
        Ok(Dataset { arrays: picked, rows })
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Refuses labels outside `0..classes`.
    pub fn check_labels(&self, name: &str, classes: i64) -> Result<(), DataError> {
        let Some(labels) = self.arrays.get(name) else { return Ok(()) };
        let per_row = (labels.len() / self.rows.max(1)).max(1);
        let view = labels.view();
        match (0..view.len()).find(|&i| !(0..classes).contains(&view.i64(i))) {
            None => Ok(()),
            Some(i) => Err(DataError::Label {
                name: name.to_string(),
                row: i / per_row,
                label: view.i64(i),
                classes,
                last: classes - 1,
            }),
        }
    }
}

fn refuse_not_finite(name: &str, array: &Tensor) -> Result<(), DataError> {
    if !array.dtype().is_float() {
        return Ok(());
    }
    let per_row = (array.len() / array.shape()[0].max(1)).max(1);
    let view = array.view();
    match (0..view.len()).find(|&i| !view.f64(i).is_finite()) {
        None => Ok(()),
        Some(i) => Err(DataError::NotFinite { name: name.to_string(), row: i / per_row, value: view.f64(i) }),
    }
}

/// Which rows each item holds.
#[derive(Debug)]
pub struct Batches {
    data: Dataset,
    /// Rows of one item.
    item_rows: usize,
    /// Items of one minibatch.
    microbatches: usize,
    /// The order of rows, an entry for each epoch; empty when rows are taken as they come.
    orders: Vec<Vec<u32>>,
    per_epoch: usize,
}

/// The order in which rows are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As they stand in the file, from the start again when they run out.
    InOrder,
    /// A new permutation every epoch.
    Shuffled {
        /// What the permutations follow from.
        seed: u64,
    },
}

impl Batches {
    /// Minibatches of `batch` rows, each cut in order into `microbatches` items, `steps` of them. Rows that do not fill
    /// a last minibatch of an epoch are left out of that epoch.
    pub fn new(
        data: Dataset,
        batch: usize,
        microbatches: usize,
        steps: usize,
        order: Order,
    ) -> Result<Batches, DataError> {
        let per_epoch = data.rows / batch.max(1);
        if per_epoch == 0 {
            return Err(DataError::Few { rows: data.rows, batch });
        }
        let orders = match order {
            Order::InOrder => Vec::new(),
            Order::Shuffled { seed } => {
                (0..steps.div_ceil(per_epoch)).map(|epoch| permutation(data.rows, seed, epoch as u64)).collect()
            }
        };
        Ok(Batches { data, item_rows: batch / microbatches.max(1), microbatches, orders, per_epoch })
    }

    /// Minibatches of one epoch.
    pub fn per_epoch(&self) -> usize {
        self.per_epoch
    }

    /// Copies the item's rows of an array into `out`.
    pub fn fill(&self, name: &str, item: u32, out: &mut [u8]) {
        let array = &self.data.arrays[name];
        let row_bytes = array.bytes().len() / self.data.rows;
        let minibatch = item as usize / self.microbatches;
        let (epoch, within) = (minibatch / self.per_epoch, minibatch % self.per_epoch);
        let first = (within * self.microbatches + item as usize % self.microbatches) * self.item_rows;
        for (i, to) in out.chunks_exact_mut(row_bytes.max(1)).enumerate() {
            let row = match self.orders.get(epoch) {
                Some(order) => order[first + i] as usize,
                None => first + i,
            };
            to.copy_from_slice(&array.bytes()[row * row_bytes..(row + 1) * row_bytes]);
        }
    }
}

/// A permutation of `0..rows` (Fisher and Yates), drawn from the counter-based generator [`mix`].
fn permutation(rows: usize, seed: u64, epoch: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..rows as u32).collect();
    for i in (1..rows).rev() {
        let draw = mix(mix(seed ^ mix(epoch)) ^ i as u64);
        // The high product: unbiased enough for any number of rows that fits in memory.
        let j = ((u128::from(draw) * (i as u128 + 1)) >> 64) as usize;
        order.swap(i, j);
    }
    order
}

/// SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64-bit numbers that looks random.
pub fn mix(counter: u64) -> u64 {
    let mut z = counter.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::tensor::DType;
    use compiler::tensor::fact::Fact;

    fn feed(name: &str, shape: &[usize]) -> Named {
        Named { name: name.into(), fact: Fact::of(DType::F32, shape), bytes: shape.iter().product::<usize>() * 4 }
    }

    fn ramp(rows: usize) -> BTreeMap<String, Tensor> {
        let values: Vec<f32> = (0..rows * 2).map(|v| v as f32).collect();
        BTreeMap::from([("x".to_string(), Tensor::from_f32(&[rows, 2], &values))])
    }

    #[test]
    fn items_take_rows_in_order_and_start_again() {
        let data = Dataset::new(ramp(5), &[feed("x", &[1, 2])]).unwrap();
        let batches = Batches::new(data, 2, 2, 4, Order::InOrder).unwrap();
        let first_of = |item| {
            let mut out = [0u8; 8];
            batches.fill("x", item, &mut out);
            f32::from_le_bytes(out[..4].try_into().unwrap())
        };
        // Row 4 does not fill a minibatch.
        assert_eq!([0, 1, 2, 3, 4].map(first_of), [0.0, 2.0, 4.0, 6.0, 0.0]);
    }

    #[test]
    fn a_permutation_holds_every_row_once_and_differs_by_epoch() {
        let mut one = permutation(1000, 7, 0);
        assert_ne!(one, permutation(1000, 7, 1));
        assert_ne!(one, permutation(1000, 8, 0));
        one.sort_unstable();
        assert_eq!(one, (0..1000).collect::<Vec<u32>>());
    }

    #[test]
    fn wrong_data_is_told() {
        let missing = Dataset::new(ramp(5), &[feed("tokens", &[1, 2])]);
        assert!(missing.unwrap_err().to_string().contains("it has `x`"));
        let shape = Dataset::new(ramp(5), &[feed("x", &[1, 3])]);
        assert!(matches!(shape, Err(DataError::Shape { .. })));
        let mut labels = ramp(5);
        labels.insert("y".into(), Tensor::from_i64(&[5], &[0, 1, 2, 10, 4]));
        let target = Named { name: "target".into(), fact: Fact::of(DType::I64, &[1]), bytes: 8 };
        let data = Dataset::new(labels, &[feed("x", &[1, 2]), target]).unwrap();
        assert!(matches!(data.check_labels("target", 10), Err(DataError::Label { row: 3, label: 10, .. })));
    }
}
