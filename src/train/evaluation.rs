//! Evaluates a trained model on held-out rows, and makes the targets of synthetic data with a teacher network.

use crate::error::Error;
use crate::model::LoadedModel;
use compiler::graph::Graph;
use compiler::op::{Op, Value};
use compiler::pass::loss::{IGNORED, LOSS, Loss, TARGET, attach, class_axis};
use compiler::pass::precision::precision;
use compiler::tensor::{DType, Tensor};
use runtime::data::{Dataset, mix, permutation};
use runtime::device::api::Device;
use runtime::device::cpu::device::cpu;
use runtime::exec::evaluate::{EvaluateError, evaluate_each};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The model to evaluate and the settings.
pub struct Subject<'a> {
    pub loaded: &'a LoadedModel,
    /// The type of all floats, if not the model's own.
    pub floats: Option<DType>,
    pub loss: Loss,
    /// The class axis.
    pub class_dim: Option<i64>,
    /// Rows per evaluation.
    pub item_rows: usize,
    /// The device that evaluates.
    pub device: &'a Arc<dyn Device>,
}

/// Loss and accuracy of a model on some rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Evaluated rows; fewer than all if the model has a fixed batch size.
    pub rows: usize,
    /// The mean loss over rows; under cross-entropy, over labels that are not ignored.
    pub loss: f64,
    /// The fraction of labels with the largest logit; `None` without classes.
    pub accuracy: Option<f64>,
}

impl Subject<'_> {
    fn graph(&self, rows: usize) -> Result<Graph, Error> {
        let graph = self.loaded.with_samples(rows as u64)?;
        match self.floats {
            Some(floats) => precision(&graph, floats).map_err(|error| failed_to("evaluate").because(error)),
            None => Ok(graph),
        }
    }

    /// The class axis; any axis for losses without classes.
    fn axis(&self, graph: &Graph, predictions: Value) -> usize {
        class_axis(graph.fact(predictions), self.class_dim).unwrap_or(0)
    }

    /// Evaluates all rows with these weights.
    pub fn score(&self, data: &Dataset, weights: &BTreeMap<String, Tensor>) -> Result<Score, Error> {
        let mut sums = Sums::default();
        let full_rows = data.rows() / self.item_rows * self.item_rows;
        self.add(0..full_rows, self.item_rows, data, weights, &mut sums)?;
        // The model may have a fixed batch size.
        if data.rows() > full_rows
            && (full_rows == 0 || self.loaded.with_samples((data.rows() - full_rows) as u64).is_ok())
        {
            self.add(full_rows..data.rows(), data.rows() - full_rows, data, weights, &mut sums)?;
        }
        let accuracy = (sums.labels > 0.0).then(|| sums.correct / sums.labels);
        Ok(Score { rows: sums.rows, loss: sums.loss / sums.weight.max(1.0), accuracy })
    }

    fn add(
        &self,
        rows: Range<usize>,
        batch_rows: usize,
        data: &Dataset,
        weights: &BTreeMap<String, Tensor>,
        sums: &mut Sums,
    ) -> Result<(), Error> {
        if rows.is_empty() {
            return Ok(());
        }
        let mut graph = self.graph(batch_rows)?;
        let Some(predictions) = graph.outputs.first().cloned() else { return Ok(()) };
        let axis = self.axis(&graph, predictions.value);
        attach(&mut graph, self.loss, self.class_dim).map_err(|error| failed_to("evaluate").because(error))?;
        let batches: Vec<_> =
            rows.step_by(batch_rows).map(|at| reshape_inputs(&graph, data.slice(at..at + batch_rows))).collect();
        let targets: Vec<Option<Tensor>> = batches.iter().map(|batch| batch.get(TARGET).cloned()).collect();
        let mut targets = targets.into_iter();
        let has_classes = self.loss == Loss::CrossEntropy;
        let result = evaluate_each(self.device, &graph, true, batches, weights, &mut |results| {
            let target = targets.next().flatten().filter(|_| has_classes);
            let mut weight = batch_rows as f64;
            if let (Some(target), Some(logits)) = (target, results.get(&predictions.name)) {
                let (predicted, labels) = (largest(logits, axis), target.to_i64());
                let counted = || labels.iter().zip(&predicted).filter(|(label, _)| **label != IGNORED);
                weight = counted().count() as f64;
                sums.labels += weight;
                sums.correct += counted().filter(|(label, prediction)| label == prediction).count() as f64;
            }
            let loss = results.get(LOSS).and_then(|loss| loss.to_f64().first().copied()).unwrap_or(f64::NAN);
            sums.loss += loss * weight;
            sums.weight += weight;
            sums.rows += batch_rows;
        });
        result.map_err(|error: EvaluateError| failed_to("evaluate").because(error))
    }

    /// Sets the targets to the outputs of a teacher: a network of the same architecture with the student's weights in
    /// random order. So the loss can decrease, and the student can represent the teacher.
    pub fn set_teacher_targets(
        &self,
        arrays: &mut BTreeMap<String, Tensor>,
        data: &Dataset,
        weights: &BTreeMap<String, Tensor>,
        seed: u64,
    ) -> Result<(), Error> {
        let Some(target) = arrays.get(TARGET).filter(|_| self.loss != Loss::Output) else { return Ok(()) };
        let teacher: BTreeMap<String, Tensor> =
            weights.iter().zip(0..).map(|((name, weight), at)| (name.clone(), permute(weight, seed, at))).collect();
        let graph = self.graph(self.item_rows)?;
        let Some(predictions) = graph.outputs.first() else { return Ok(()) };
        let axis = self.axis(&graph, predictions.value);
        let batch_count = data.rows() / self.item_rows;
        let batches = (0..batch_count)
            .map(|at| reshape_inputs(&graph, data.slice(at * self.item_rows..(at + 1) * self.item_rows)));
        let mut values: Vec<f64> = Vec::with_capacity(target.len());
        // The targets do not depend on the device.
        evaluate_each(&cpu(), &graph, true, batches, &teacher, &mut |results| {
            let Some(outputs) = results.get(&predictions.name) else { return };
            match self.loss {
                Loss::CrossEntropy => values.extend(largest(outputs, axis).into_iter().map(|class| class as f64)),
                Loss::Bce => values.extend(outputs.to_f64().into_iter().map(|logit| 1.0 / (1.0 + (-logit).exp()))),
                Loss::Mse | Loss::Output => values.extend(outputs.to_f64()),
            }
        })
        .map_err(|error| failed_to("compute the synthetic targets").because(error))?;
        if values.len() == target.len() && values.iter().all(|value| value.is_finite()) {
            let targets = Tensor::from_f64(target.shape(), &values).cast(target.dtype());
            arrays.insert(TARGET.to_string(), targets);
        }
        Ok(())
    }
}

#[derive(Default)]
struct Sums {
    rows: usize,
    loss: f64,
    weight: f64,
    labels: f64,
    correct: f64,
}

fn failed_to(action: &str) -> Error {
    Error::input(format!("cannot {action}"))
}

/// Reshapes the arrays to the shapes of the graph's inputs: targets of flattened predictions are stored per sample.
fn reshape_inputs(graph: &Graph, mut arrays: BTreeMap<String, Tensor>) -> BTreeMap<String, Tensor> {
    for id in graph.ids() {
        let Op::Input(input) = &graph.node(id).op else { continue };
        let (Some(array), Some(shape)) = (arrays.get(&input.name), input.fact.concrete()) else { continue };
        if let Ok(reshaped) = Tensor::new(array.dtype(), shape, array.bytes().clone()) {
            arrays.insert(input.name.clone(), reshaped);
        }
    }
    arrays
}

/// The class with the largest logit (the first if equal) along the class axis, for all other indices in order.
fn largest(logits: &Tensor, axis: usize) -> Vec<i64> {
    let (shape, values) = (logits.shape(), logits.to_f64());
    let (classes, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    let outer = shape[..axis].iter().product::<usize>();
    let mut best_classes = Vec::with_capacity(outer * inner);
    for at in (0..outer).flat_map(|o| (0..inner).map(move |i| o * classes * inner + i)) {
        let logit = |class: usize| values[at + class * inner];
        let best = (1..classes).fold(0, |best, class| if logit(class) > logit(best) { class } else { best });
        best_classes.push(best as i64);
    }
    best_classes
}

fn permute(weight: &Tensor, seed: u64, at: u64) -> Tensor {
    if !weight.dtype().is_float() {
        return weight.clone();
    }
    let values = weight.to_f64();
    let order = permutation(values.len(), mix(seed), at);
    let values: Vec<f64> = order.into_iter().map(|from| values[from as usize]).collect();
    Tensor::from_f64(weight.shape(), &values).cast(weight.dtype())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_over_any_axis() {
        let logits = Tensor::from_f64(&[2, 3, 2], &[0.0, 5.0, 2.0, 5.0, 1.0, 1.0, 9.0, 0.0, 0.0, 0.0, 0.0, 7.0]);
        assert_eq!(largest(&logits, 1), [1, 0, 0, 2]);
        assert_eq!(largest(&logits, 2), [1, 1, 0, 0, 0, 1]);
    }

    #[test]
    fn a_teacher_has_the_same_values_elsewhere() {
        let weight = Tensor::from_f64(&[4, 25], &(0..100).map(f64::from).collect::<Vec<_>>());
        let mut permuted = permute(&weight, 1, 0).to_f64();
        assert_ne!(permuted, weight.to_f64());
        assert_ne!(permuted, permute(&weight, 2, 0).to_f64());
        permuted.sort_by(f64::total_cmp);
        assert_eq!(permuted, weight.to_f64());
    }
}
