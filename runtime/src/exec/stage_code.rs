//! Stage code is what the compiler makes of one stage: sequences of kernels and the memory that they use.

use crate::device::layout::{accumulation_bytes, accumulation_type};
use crate::exec::sequence::{Sequence, TensorAddress};
use compiler::op::Value;
use compiler::tensor::DType;
use compiler::tensor::fact::Fact;

/// A named input, parameter, state or result of a stage.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedTensor {
    pub name: String,
    pub fact: Fact,
    pub bytes: usize,
}

/// A tensor that this stage sends to, or receives from, another stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    pub stage: usize,
    /// The value in the unpartitioned graph.
    pub value: Value,
    /// The reader group, for gradients; 0 for activations.
    pub group: usize,
    pub address: TensorAddress,
}

/// One term of a parameter's gradient. Tied weights and repeated uses have several terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradientTerm {
    /// Index into [`StageCode::parameters`].
    pub parameter: usize,
    /// Position of the term in the parameter's gradient sum over all stages, which fixes the order of addition.
    pub rank: usize,
    /// Location of the term after the backward pass.
    pub address: TensorAddress,
    /// True if the backward pass accumulates the term into its sum itself.
    pub is_summed: bool,
}

/// The compiled code of one stage.
#[derive(Default)]
pub struct StageCode {
    pub forward: Sequence,
    /// The backward pass, or its input-gradient pass if it is split; empty for inference.
    pub backward: Sequence,
    /// The weight-gradient pass of a split backward; empty otherwise.
    pub weight: Sequence,
    /// True if the backward is split into an input-gradient and a weight-gradient pass.
    pub in_parts: bool,
    /// True if the weight-gradient pass reads gradients that the stage also sends.
    pub weight_reads_sent: bool,
    /// Bytes per micro-batch kept from the input-gradient pass to the weight-gradient pass.
    pub between_bytes: usize,
    pub feeds: Vec<NamedTensor>,
    pub parameters: Vec<NamedTensor>,
    /// State tensors, such as running statistics of batch normalisation.
    pub states: Vec<NamedTensor>,
    /// Received activations, in message order: by producer stage, then value.
    pub received: Vec<Transfer>,
    /// Sent activations, one entry per receiving stage, by receiving stage, then value.
    pub sent: Vec<Transfer>,
    /// Buffer sizes for [`Slot::Own`](crate::exec::sequence::Slot::Own).
    pub own_bytes: Vec<usize>,
    /// Received gradient terms, by sending stage, then value and group.
    pub gradients_in: Vec<Transfer>,
    /// Sent gradient terms, by receiving stage, then value and group.
    pub gradients_out: Vec<Transfer>,
    pub gradient_terms: Vec<GradientTerm>,
    /// Gradient buckets: names of the parameters that replicas all-reduce together. Empty, or one entry per bucket of
    /// the program.
    pub buckets: Vec<Vec<String>>,
    pub state_updates: Vec<StateUpdate>,
    /// Graph results that this stage produces; in training only the loss.
    pub results: Vec<(NamedTensor, TensorAddress)>,
    /// True if activations are recomputed before the backward pass instead of saved.
    pub recompute: bool,
    /// True if the backward pass contains all recomputation.
    pub recomputes_parts: bool,
    /// Bytes saved per in-flight micro-batch for its backward pass.
    pub kept_bytes: usize,
    /// The first steps of the forward pass, which recomputation runs again.
    pub recomputed_steps: usize,
    /// The first of the saved bytes, which these steps write.
    pub recomputed_bytes: usize,
    /// For each send buffer, true if these steps write it.
    pub recomputed_own: Vec<bool>,
    /// Bytes of the arena, which all passes of a worker share.
    pub arena_bytes: usize,
    /// Ops that run the reference kernel because the device has no fast one.
    pub reference_ops: Vec<String>,
}

impl StageCode {
    /// Locations that are read outside of kernel steps: sent tensors, results, moving-average samples and gradient
    /// terms.
    pub fn read_apart(&self) -> impl Iterator<Item = TensorAddress> + '_ {
        let transfers = self.sent.iter().chain(&self.gradients_out).map(|transfer| transfer.address);
        let results = self
            .results
            .iter()
            .map(|(_, address)| *address)
            .chain(self.state_updates.iter().map(|update| update.sample));
        transfers.chain(results).chain(self.gradient_terms.iter().map(|term| term.address))
    }
}

impl NamedTensor {
    /// Element type and bytes of this parameter's gradient sums.
    pub fn gradient(&self) -> (DType, usize) {
        (accumulation_type(self.fact.dtype), accumulation_bytes(self.fact.dtype, self.bytes))
    }

    pub(super) fn new(name: &str, fact: &Fact) -> NamedTensor {
        NamedTensor { name: name.to_string(), fact: fact.clone(), bytes: bytes(fact) }
    }
}

/// Bytes of a tensor whose shape is concrete.
pub(super) fn bytes(fact: &Fact) -> usize {
    fact.bytes().expect("sizes were checked before compiling") as usize
}

/// A state that is the moving average of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateUpdate {
    /// Index into [`StageCode::states`](crate::exec::stage_code::StageCode::states).
    pub state: usize,
    /// Location of the value after a forward pass.
    pub sample: TensorAddress,
    /// Weight of the old state: `state ← keep · state + (1 − keep) · sample`.
    pub keep: f64,
    /// Set if the sample is a batch variance.
    pub variance: Option<Variance>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variance {
    /// Index of the mean of the same batch in [`StageCode::state_updates`](crate::exec::stage_code::StageCode::state_updates).
    pub mean: usize,
    /// Number of elements that the variance is over.
    pub elements: usize,
}
