//! Training data: named arrays with equal row counts, read by micro-batch in a seeded order.

pub mod factors;
pub mod npz;
pub mod synthetic;
pub mod weights;

use crate::data::factors::Factors;
use crate::exec::stage_code::NamedTensor;
use compiler::graph::Graph;
use compiler::op::dropout::COUNTER;
pub use compiler::op::dropout::mix;
use compiler::pass::loss::{IGNORED, LOSS_SCALE, TARGET};
use compiler::pass::minibatch_mean::{MinibatchMeans, is_factor};
use compiler::tensor::Tensor;
use std::collections::BTreeMap;
use std::ops::Range;
use thiserror::Error;

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
    #[error("array `{name}`, row {row}: index {index} is outside a table of {size}")]
    Index { name: String, row: usize, index: i64, size: i64 },
    #[error("array `{name}`, row {row}: label {label} is outside the {classes} classes 0 to {last}")]
    Label { name: String, row: usize, label: i64, classes: i64, last: i64 },
    #[error("all {rows} labels of array `{name}` are {IGNORED} (ignored): there is no loss to train on")]
    Ignored { name: String, rows: usize },
    #[error("array `{name}` has {value} in row {row}, where the model reads integers")]
    Fraction { name: String, row: usize, value: f64 },
    #[error("array `{name}` has {value} in row {row}; training on it would make every weight NaN")]
    NotFinite { name: String, row: usize, value: f64 },
}

/// Arrays by graph input name. Most have one row per sample; some, such as a position table, are the same for every
/// sample.
#[derive(Debug)]
pub struct Dataset {
    arrays: BTreeMap<String, Array>,
    rows: usize,
}

#[derive(Debug)]
struct Array {
    tensor: Tensor,
    /// Bytes per row; `None` for an array that is fed whole.
    row_bytes: Option<usize>,
}

impl Dataset {
    /// Selects the arrays for the feeds and casts them to their element types. A feed called `target` also matches `y`.
    ///
    /// `feeds` have the shape of a micro-batch of `item_rows` samples. An array whose row size equals the feed's sample
    /// size is read by rows. An array with the feed's own shape, and a row count unlike the others, is fed whole to
    /// every micro-batch. Inputs that the run generates are skipped.
    pub fn new(
        mut arrays: BTreeMap<String, Tensor>,
        feeds: &[NamedTensor],
        item_rows: usize,
    ) -> Result<Dataset, DataError> {
        let found = arrays.keys().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(", ");
        let mut picked: BTreeMap<String, Tensor> = BTreeMap::new();
        let feeds: Vec<&NamedTensor> = feeds.iter().filter(|f| !is_generated(&f.name)).collect();
        for &feed in &feeds {
            let name = &feed.name;
            let missing = || DataError::Missing { name: name.clone(), found: found.clone() };
            let other = (name == TARGET).then_some("y");
            let array = arrays.remove(name).or_else(|| other.and_then(|y| arrays.remove(y))).ok_or_else(missing)?;
            if array.shape().contains(&0) {
                return Err(DataError::Empty { name: name.clone() });
            }
            let fit = Fit::of(feed, &array, item_rows);
            if !fit.rows && !fit.whole {
                let (got, expected) = (array.shape().to_vec(), feed.fact.concrete().unwrap_or_default());
                return Err(DataError::Shape { name: name.clone(), got, expected });
            }
            check_finite(name, &array)?;
            if !feed.fact.dtype.is_float() {
                check_integers(name, &array)?;
            }
            let array = array.cast(feed.fact.dtype);
            picked.insert(name.clone(), array);
        }
        let fits: Vec<(&NamedTensor, Fit)> =
            feeds.iter().map(|&f| (f, Fit::of(f, &picked[&f.name], item_rows))).collect();
        // Arrays that can only be rows determine the row count; otherwise any that can be.
        let only = fits.iter().find(|(_, fit)| !fit.whole).or_else(|| fits.iter().find(|(_, fit)| fit.rows));
        let rows = only.map(|(feed, _)| (feed.name.clone(), picked[&feed.name].shape()[0]));
        let mut made = BTreeMap::new();
        for (feed, fit) in fits {
            let tensor = picked[&feed.name].clone();
            let own = tensor.shape().first().copied().unwrap_or(0);
            let by_rows = fit.rows && rows.as_ref().is_some_and(|(_, rows)| *rows == own);
            if let (false, false, Some((other, other_rows))) = (by_rows, fit.whole, &rows) {
                let (other, other_rows) = (other.clone(), *other_rows);
                return Err(DataError::Rows { name: feed.name.clone(), rows: own, other, other_rows });
            }
            let row_bytes = by_rows.then(|| tensor.bytes().len() / own);
            made.insert(feed.name.clone(), Array { tensor, row_bytes });
        }
        Ok(Dataset { arrays: made, rows: rows.map_or(0, |(_, rows)| rows) })
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Splits into the first `count` rows and the rest.
    pub fn split(self, count: usize) -> (Dataset, Dataset) {
        let count = count.min(self.rows);
        let part = |rows: Range<usize>| {
            let arrays = self.arrays.iter().map(|(name, array)| {
                let tensor = array.rows(&rows);
                (name.clone(), Array { tensor, row_bytes: array.row_bytes })
            });
            Dataset { arrays: arrays.collect(), rows: rows.len() }
        };
        (part(0..count), part(count..self.rows))
    }

    /// The arrays restricted to a row range; arrays fed whole are returned whole.
    pub fn slice(&self, rows: Range<usize>) -> BTreeMap<String, Tensor> {
        self.arrays.iter().map(|(name, array)| (name.clone(), array.rows(&rows))).collect()
    }

    /// Checks before training that indices are in range for every op of `graph` that reads them.
    pub fn check_indices(&self, graph: &Graph) -> Result<(), DataError> {
        for (name, array) in self.arrays.iter().filter(|(n, a)| *n != TARGET && !a.tensor.dtype().is_float()) {
            let Some(synthetic::Limit { below: size, ignored }) = synthetic::limit(graph, name) else { continue };
            let per_row = (array.tensor.len() / array.tensor.shape().first().copied().unwrap_or(1).max(1)).max(1);
            let view = array.tensor.view();
            if let Some(i) = (0..view.len()).find(|&i| {
                let index = view.i64(i);
                !(-size..size).contains(&index) && Some(index) != ignored
            }) {
                let (row, index) = (i / per_row, view.i64(i));
                return Err(DataError::Index { name: name.clone(), row, index, size });
            }
        }
        Ok(())
    }

    /// Counts, among the first `rows` rows, those whose labels are all ignored. Fails if all labels are ignored.
    pub fn check_counted(&self, name: &str, rows: usize) -> Result<usize, DataError> {
        let Some(labels) = self.arrays.get(name).map(|a| &a.tensor) else { return Ok(0) };
        let per_row = (labels.len() / self.rows.max(1)).max(1);
        let view = labels.view();
        let rows = rows.min(view.len() / per_row);
        let is_counted = |row: &usize| (0..per_row).any(|column| view.i64(row * per_row + column) != IGNORED);
        match (0..rows).filter(is_counted).count() {
            0 if rows > 0 => Err(DataError::Ignored { name: name.to_string(), rows }),
            counted => Ok(rows - counted),
        }
    }

    /// Rejects labels outside `0..classes`, except ignored ones.
    pub fn check_labels(&self, name: &str, classes: i64) -> Result<(), DataError> {
        let Some(labels) = self.arrays.get(name).map(|a| &a.tensor) else { return Ok(()) };
        let per_row = (labels.len() / self.rows.max(1)).max(1);
        let view = labels.view();
        let fits = |label: i64| (0..classes).contains(&label) || label == IGNORED;
        match (0..view.len()).find(|&i| !fits(view.i64(i))) {
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

impl Array {
    fn rows(&self, rows: &Range<usize>) -> Tensor {
        let Some(row_bytes) = self.row_bytes else { return self.tensor.clone() };
        let mut shape = self.tensor.shape().to_vec();
        shape[0] = rows.len();
        let bytes = self.tensor.bytes().slice(rows.start * row_bytes..rows.end * row_bytes);
        Tensor::new(self.tensor.dtype(), shape, bytes).expect("rows are consecutive in memory")
    }
}

struct Fit {
    /// Its first dimension is the sample.
    rows: bool,
    /// The same value for every micro-batch.
    whole: bool,
}

impl Fit {
    fn of(feed: &NamedTensor, array: &Tensor, item_rows: usize) -> Fit {
        let expected = feed.fact.concrete().unwrap_or_default();
        let (Some((first, rest)), Some((rows, row))) = (expected.split_first(), array.shape().split_first()) else {
            return Fit { rows: false, whole: expected == array.shape() };
        };
        // A model may flatten its predictions to [batch·time, classes]; targets are still given per sample.
        let flattened = feed.name == TARGET && array.len() / rows * item_rows == expected.iter().product::<usize>();
        Fit { rows: (*first == item_rows && rest == row) || flattened, whole: expected == array.shape() }
    }
}

/// Rejects NaN and infinite values.
pub fn check_finite(name: &str, array: &Tensor) -> Result<(), DataError> {
    if !array.dtype().is_float() {
        return Ok(());
    }
    let per_row = (array.len() / array.shape().first().copied().unwrap_or(1).max(1)).max(1);
    let view = array.view();
    match (0..view.len()).find(|&i| !view.f64(i).is_finite()) {
        None => Ok(()),
        Some(i) => Err(DataError::NotFinite { name: name.to_string(), row: i / per_row, value: view.f64(i) }),
    }
}

fn check_integers(name: &str, array: &Tensor) -> Result<(), DataError> {
    if !array.dtype().is_float() {
        return Ok(());
    }
    let per_row = (array.len() / array.shape().first().copied().unwrap_or(1).max(1)).max(1);
    let view = array.view();
    match (0..view.len()).find(|&i| view.f64(i).fract() != 0.0) {
        None => Ok(()),
        Some(i) => Err(DataError::Fraction { name: name.to_string(), row: i / per_row, value: view.f64(i) }),
    }
}

/// The rows of each micro-batch.
#[derive(Debug)]
pub struct Batches {
    data: Dataset,
    item_rows: usize,
    microbatches: usize,
    /// Row permutation by epoch; empty for file order.
    orders: Vec<Vec<u32>>,
    per_epoch: usize,
    seed: u64,
    means: Option<Factors>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// File order, restarting at the end.
    InOrder,
    /// A new permutation every epoch.
    Shuffled { seed: u64 },
}

impl Batches {
    /// All training rows, as bytes by name.
    pub fn bytes(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.data.arrays.iter().map(|(name, array)| (name.as_str(), &array.tensor.bytes()[..]))
    }

    /// `steps` minibatches of `batch` rows, each split in order into `microbatches` micro-batches. An incomplete last
    /// minibatch of an epoch is dropped.
    pub fn new(
        data: Dataset,
        batch: usize,
        microbatches: usize,
        steps: usize,
        order: RowOrder,
    ) -> Result<Batches, DataError> {
        let per_epoch = data.rows / batch.max(1);
        if per_epoch == 0 {
            return Err(DataError::Few { rows: data.rows, batch });
        }
        let orders = match order {
            RowOrder::InOrder => Vec::new(),
            RowOrder::Shuffled { seed } => {
                (0..steps.div_ceil(per_epoch)).map(|epoch| permutation(data.rows, seed, epoch as u64)).collect()
            }
        };
        Ok(Batches {
            data,
            item_rows: batch / microbatches.max(1),
            microbatches,
            orders,
            per_epoch,
            seed: 0,
            means: None,
        })
    }

    /// Sets the means that the loss takes over whole minibatches; `weights` has the constants that they read.
    pub fn with_means(self, means: Option<MinibatchMeans>, weights: &BTreeMap<String, Tensor>) -> Batches {
        Batches { means: means.map(|means| Factors::new(means, weights)), ..self }
    }

    /// Sets the seed of the dropout masks. Every micro-batch gets its own counter.
    pub fn with_seed(self, seed: u64) -> Batches {
        Batches { seed, ..self }
    }

    pub fn per_epoch(&self) -> usize {
        self.per_epoch
    }

    /// Copies a micro-batch's rows of an array into `out`, its dropout counter, or a factor of a mean.
    pub fn fill(&self, name: &str, item: u32, out: &mut [u8]) {
        if name == COUNTER {
            return out.copy_from_slice(&mix(mix(self.seed) ^ u64::from(item)).to_le_bytes());
        }
        if let Some(means) = self.means.as_ref().filter(|_| is_factor(name)) {
            return out.copy_from_slice(means.factor(self, name, item).bytes());
        }
        let array = &self.data.arrays[name];
        let bytes = array.tensor.bytes();
        let Some(row_bytes) = array.row_bytes else { return out.copy_from_slice(bytes) };
        let minibatch = item as usize / self.microbatches;
        let (epoch, position) = (minibatch / self.per_epoch, minibatch % self.per_epoch);
        let first = (position * self.microbatches + item as usize % self.microbatches) * self.item_rows;
        for (i, row_out) in out.chunks_exact_mut(row_bytes.max(1)).enumerate() {
            let row = match self.orders.get(epoch) {
                Some(order) => order[first + i] as usize,
                None => first + i,
            };
            row_out.copy_from_slice(&bytes[row * row_bytes..(row + 1) * row_bytes]);
        }
    }
}

/// True for inputs that the run generates: the dropout counter, the loss scale and the factors of means.
pub fn is_generated(name: &str) -> bool {
    name == COUNTER || name == LOSS_SCALE || is_factor(name)
}

/// A permutation of `0..rows` (Fisher-Yates), with random numbers from the counter-based generator [`mix`].
pub fn permutation(rows: usize, seed: u64, epoch: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..rows as u32).collect();
    for i in (1..rows).rev() {
        let draw = mix(mix(seed ^ mix(epoch)) ^ i as u64);
        // High half of the product: its bias is negligible for row counts that fit in memory.
        let j = ((u128::from(draw) * (i as u128 + 1)) >> 64) as usize;
        order.swap(i, j);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::tensor::DType;
    use compiler::tensor::fact::Fact;

    fn feed(name: &str, shape: &[usize]) -> NamedTensor {
        NamedTensor { name: name.into(), fact: Fact::of(DType::F32, shape), bytes: shape.iter().product::<usize>() * 4 }
    }

    fn ramp(rows: usize) -> BTreeMap<String, Tensor> {
        let values: Vec<f32> = (0..rows * 2).map(|v| v as f32).collect();
        BTreeMap::from([("x".to_string(), Tensor::from_f32(&[rows, 2], &values))])
    }

    #[test]
    fn items_take_rows_in_order_and_start_again() {
        let data = Dataset::new(ramp(5), &[feed("x", &[1, 2])], 1).unwrap();
        let batches = Batches::new(data, 2, 2, 4, RowOrder::InOrder).unwrap();
        let first_of = |item| {
            let mut out = [0u8; 8];
            batches.fill("x", item, &mut out);
            f32::from_le_bytes(out[..4].try_into().unwrap())
        };
        // Row 4 would not fill a minibatch.
        assert_eq!([0, 1, 2, 3, 4].map(first_of), [0.0, 2.0, 4.0, 6.0, 0.0]);
    }

    #[test]
    fn rows_are_split_and_tables_are_not() {
        let mut arrays = ramp(5);
        arrays.insert("table".into(), Tensor::from_f32(&[3, 1], &[1.0, 2.0, 3.0]));
        let data = Dataset::new(arrays, &[feed("x", &[2, 2]), feed("table", &[3, 1])], 2).unwrap();
        let (first, rest) = data.split(3);
        assert_eq!((first.rows(), rest.rows()), (3, 2));
        let slice = rest.slice(1..2);
        assert_eq!((slice["x"].to_f64(), slice["table"].to_f64()), (vec![8.0, 9.0], vec![1.0, 2.0, 3.0]));
        assert_eq!(first.slice(0..3)["x"].shape(), [3, 2]);
    }

    #[test]
    fn tables_are_fed_whole_and_targets_may_be_flattened() {
        let mut arrays = ramp(6);
        arrays.insert("table".into(), Tensor::from_f32(&[4, 1], &[1.0, 2.0, 3.0, 4.0]));
        arrays.insert("target".into(), Tensor::from_i64(&[6, 3], &(0..18).collect::<Vec<_>>()));
        let target = NamedTensor { name: "target".into(), fact: Fact::of(DType::I64, &[6]), bytes: 48 };
        let feeds = [feed("x", &[2, 2]), feed("table", &[4, 1]), target];
        let batches = Batches::new(Dataset::new(arrays, &feeds, 2).unwrap(), 2, 1, 3, RowOrder::InOrder).unwrap();
        let mut table = [0u8; 16];
        batches.fill("table", 2, &mut table);
        assert_eq!(f32::from_le_bytes(table[12..].try_into().unwrap()), 4.0);
        let mut labels = [0u8; 48];
        batches.fill("target", 1, &mut labels);
        let labels: Vec<i64> = labels.chunks(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(labels, [6, 7, 8, 9, 10, 11]);
    }

    #[test]
    fn a_permutation_holds_every_row_once_and_differs_by_epoch() {
        let mut order = permutation(1000, 7, 0);
        assert_ne!(order, permutation(1000, 7, 1));
        assert_ne!(order, permutation(1000, 8, 0));
        order.sort_unstable();
        assert_eq!(order, (0..1000).collect::<Vec<u32>>());
    }

    #[test]
    fn invalid_data_is_rejected() {
        let missing = Dataset::new(ramp(5), &[feed("tokens", &[1, 2])], 1);
        assert!(missing.unwrap_err().to_string().contains("it has `x`"));
        let shape = Dataset::new(ramp(5), &[feed("x", &[1, 3])], 1);
        assert!(matches!(shape, Err(DataError::Shape { .. })));
        let mut labels = ramp(5);
        labels.insert("y".into(), Tensor::from_i64(&[5], &[0, 1, 2, 10, 4]));
        let target = NamedTensor { name: "target".into(), fact: Fact::of(DType::I64, &[1]), bytes: 8 };
        let data = Dataset::new(labels, &[feed("x", &[1, 2]), target], 1).unwrap();
        assert!(matches!(data.check_labels("target", 10), Err(DataError::Label { row: 3, label: 10, .. })));
        assert_eq!(data.check_counted("target", 5), Ok(0));
    }

    #[test]
    fn fully_ignored_labels_are_rejected() {
        let dataset = |labels: &[i64]| {
            let mut arrays = ramp(5);
            arrays.insert("y".into(), Tensor::from_i64(&[5, 2], labels));
            let target = NamedTensor { name: "target".into(), fact: Fact::of(DType::I64, &[1, 2]), bytes: 16 };
            Dataset::new(arrays, &[feed("x", &[1, 2]), target], 1).unwrap()
        };
        let all_ignored = dataset(&[IGNORED; 10]).check_counted("target", 9);
        assert_eq!(all_ignored, Err(DataError::Ignored { name: "target".into(), rows: 5 }));
        let mut labels = [IGNORED; 10];
        labels[7] = 3;
        assert_eq!(
            (dataset(&labels).check_labels("target", 10), dataset(&labels).check_counted("target", 5)),
            (Ok(()), Ok(4))
        );
        let first = dataset(&labels).check_counted("target", 3);
        assert_eq!(first, Err(DataError::Ignored { name: "target".into(), rows: 3 }));
    }
}
