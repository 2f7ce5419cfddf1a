//! Operands of tensor-parallel collectives from other processes: `Part` frames of a worker's group.
//!
//! All ranks run the same program, so their collectives come in the same order, and none begins before all have
//! contributed to the last. An operand out of order, or of a size that no collective of the worker has, is refused.

use crate::comm::tensor_group::{Layouts, TensorComm, TensorPart};
use crate::device::buffer::Buffer;
use crate::exec::sequence::Sequence;
use crate::exec::stage_code::StageCode;
use crate::process::fields::Fields;
use crate::process::frame::FrameError;
use crate::process::recv_buffers::Ring;
use crate::process::router::ContributionSink;
use crate::process::wire::Contribution;
use compiler::op::Sharding;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Collectives in which a rank may take part at once: it may contribute to the next while another reads the last.
const MOST_UNFINISHED: usize = 2;

/// Valid sizes of an operand.
pub struct OperandForm {
    /// Bytes of the operands of the code, and of the shards of parameters that a program saves, also in `f32`.
    sizes: BTreeSet<usize>,
    /// Number of gradients that may have a squared norm.
    squares: usize,
}

impl OperandForm {
    /// The operands of a worker with these stages and shardings of parameters.
    pub fn of<'a>(stages: impl Iterator<Item = &'a StageCode>, layouts: &Layouts) -> OperandForm {
        let mut form = OperandForm { sizes: BTreeSet::new(), squares: 0 };
        for code in stages {
            let steps =
                [&code.forward, &code.backward, &code.weight].into_iter().flat_map(|pass: &Sequence| &pass.steps);
            form.sizes
                .extend(steps.filter_map(|step| step.collective.as_ref()).map(|collective| collective.operand.bytes()));
            let is_split = |name: &str| matches!(layouts.get(name), Some(Sharding::Split(_)));
            for named in code.parameters.iter().filter(|named| is_split(&named.name)) {
                form.sizes.extend([named.bytes, named.gradient().1]);
            }
            form.squares = form.squares.max(code.parameters.len());
        }
        form
    }

    fn is_valid(&self, bytes: u64) -> bool {
        let is_norm = bytes.is_multiple_of(8) && bytes / 8 <= self.squares as u64;
        is_norm || usize::try_from(bytes).is_ok_and(|bytes| self.sizes.contains(&bytes))
    }
}

impl Contribution for TensorPart {
    type Form = OperandForm;

    fn pack(&self, head: &mut Vec<u8>, bodies: &mut Vec<Arc<Buffer>>) {
        let body = match self {
            TensorPart::Host(tensor) => Arc::new(Buffer::host_copy(tensor.bytes())),
            TensorPart::Buffer(buffer) => buffer.clone(),
        };
        head.extend((body.len() as u64).to_le_bytes());
        bodies.push(body);
    }

    fn unpack(form: &OperandForm, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<TensorPart, FrameError> {
        let what = "the operand of a collective";
        let bytes = fields.u64(what)?;
        if !form.is_valid(bytes) {
            return Err(FrameError::Field { what });
        }
        Ok(TensorPart::Buffer(ring.tensor(fields, bytes as usize, what)?))
    }

    fn most(form: &OperandForm) -> usize {
        form.sizes.last().copied().unwrap_or(0).max(form.squares.saturating_mul(8)).saturating_add(8)
    }
}

/// Delivers the operands of other processes to the ranks of a worker.
pub struct TensorOperands {
    group: Arc<TensorComm>,
    form: OperandForm,
    /// The number of each rank's next collective.
    next: Vec<AtomicU64>,
}

impl TensorOperands {
    pub fn new(group: Arc<TensorComm>, form: OperandForm, degree: usize) -> TensorOperands {
        TensorOperands { group, form, next: (0..degree).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl ContributionSink for TensorOperands {
    fn arrive(&self, number: u64, member: usize, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<(), FrameError> {
        let invalid = |what| FrameError::Field { what };
        let next = self.next.get(member).ok_or(invalid("the member of a collective"))?;
        // One connection brings all operands of a rank.
        if number != next.load(Ordering::Relaxed) {
            return Err(invalid("the number of a collective"));
        }
        let part = TensorPart::unpack(&self.form, fields, ring)?;
        fields.end()?;
        next.store(number + 1, Ordering::Relaxed);
        // The member exists, and the order shows that it has not contributed to this one.
        self.group.arrive(number, member, part);
        match self.group.unfinished() <= MOST_UNFINISHED {
            true => Ok(()),
            false => Err(invalid("the number of a collective")),
        }
    }

    fn most(&self) -> usize {
        TensorPart::most(&self.form)
    }

    fn abandon(&self) {
        self.group.abandon();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::stage_code::NamedTensor;
    use compiler::tensor::dim::Dim;
    use compiler::tensor::fact::Fact;
    use compiler::tensor::{DType, Tensor};

    fn operands() -> TensorOperands {
        let form = OperandForm { sizes: BTreeSet::from([4, 12]), squares: 2 };
        TensorOperands::new(Arc::new(TensorComm::among(2, 1, None)), form, 2)
    }

    #[test]
    fn only_shards_of_parameters_and_operands_of_the_code_have_known_sizes() {
        let named = |name: &str, elements: usize, dtype: DType| NamedTensor {
            name: name.to_string(),
            fact: Fact::new(dtype, vec![Dim::from(elements)]),
            bytes: elements * dtype.size(),
        };
        let parameters = vec![named("split", 50, DType::Bf16), named("both", 70, DType::F32)];
        let code = StageCode { parameters, states: vec![named("mean", 90, DType::F32)], ..StageCode::default() };
        let layouts = Layouts::from([("split".to_string(), Sharding::split(0))]);
        let form = OperandForm::of([&code].into_iter(), &layouts);
        assert_eq!((form.sizes, form.squares), (BTreeSet::from([100, 200]), 2));
    }

    fn packed(part: &TensorPart) -> Vec<u8> {
        let (mut head, mut bodies) = (Vec::new(), Vec::new());
        part.pack(&mut head, &mut bodies);
        bodies.iter().for_each(|body| head.extend(&*body.download().unwrap()));
        head
    }

    fn arrive(operands: &TensorOperands, number: u64, member: usize, bytes: &[u8]) -> Result<(), FrameError> {
        operands.arrive(number, member, &mut Fields::of(bytes), &mut Ring::default())
    }

    #[test]
    fn operands_come_whole_and_with_a_known_size() {
        let of_size = |bytes: usize| packed(&TensorPart::Buffer(Arc::new(Buffer::host(bytes))));
        for bytes in [0, 4, 8, 12, 16] {
            let frame = of_size(bytes);
            assert!(frame.len() <= operands().most());
            assert_eq!(arrive(&operands(), 0, 1, &frame), Ok(()), "{bytes} bytes");
            assert!((0..frame.len()).all(|length| arrive(&operands(), 0, 1, &frame[..length]).is_err()));
            assert!(arrive(&operands(), 0, 1, &[&frame[..], &[0]].concat()).is_err());
        }
        [1, 5, 20, 24].iter().for_each(|bytes| assert!(arrive(&operands(), 0, 1, &of_size(*bytes)).is_err()));
        let huge = (u64::MAX - 7).to_le_bytes();
        assert!(arrive(&operands(), 0, 1, &huge).is_err());
    }

    #[test]
    fn operands_come_in_order_and_not_too_early() {
        let frame = packed(&TensorPart::Host(Tensor::from_f64(&[1], &[2.5])));
        let tensor_operands = operands();
        assert!(arrive(&tensor_operands, 1, 1, &frame).is_err(), "the first is missing");
        assert!(arrive(&tensor_operands, 0, 2, &frame).is_err(), "there is no such rank");
        assert_eq!(arrive(&tensor_operands, 0, 1, &frame), Ok(()));
        assert!(arrive(&tensor_operands, 0, 1, &frame).is_err(), "it has come already");
        tensor_operands.group.contribute(0, 0, TensorPart::Host(Tensor::from_f64(&[1], &[1.5])));
        // The other rank has both, and goes on; this one has not read them.
        assert_eq!(arrive(&tensor_operands, 1, 1, &frame), Ok(()));
        assert!(arrive(&tensor_operands, 2, 1, &frame).is_err(), "nobody contributed to the second");
        let parts = tensor_operands.group.wait(0).unwrap();
        assert!(matches!(&parts[1], TensorPart::Buffer(buffer) if *buffer.download().unwrap() == 2.5f64.to_le_bytes()));
    }
}
