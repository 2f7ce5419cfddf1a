//! What members of a communicator send to other processes.
//!
//! All processes compile the same stages. So the tensors that a frame may hold and their sizes are known, and anything
//! else is refused.

use crate::comm::communicator::{Communicator, Forward, Tensors};
use crate::comm::members::{Members, encode};
use crate::device::buffer::Buffer;
use crate::optim::grad_norm::Squares;
use crate::process::fields::{Fields, check};
use crate::process::frame::FrameError;
use crate::process::recv_buffers::Ring;
use crate::process::router::GroupReceiver;
use crate::stage::gradient_buckets::BucketContribution;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A value that can be contributed across processes.
pub trait Contribution: Sized + Send + Sync + 'static {
    /// The valid contents, known in advance.
    type Form: Send + Sync + 'static;

    /// The numbers, and the tensors that follow them.
    fn pack(&self) -> (Vec<u8>, Vec<Arc<Buffer>>);

    /// Reads and checks a contribution.
    fn unpack(form: &Self::Form, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<Self, FrameError>;
}

/// A communicator with members in other processes, and the valid contents of their contributions.
pub struct RemoteCommunicator<T: Contribution> {
    pub communicator: Arc<Communicator<T>>,
    pub form: T::Form,
    /// Upper bound of the sequence numbers, and maximum number of collectives that not all members have read.
    pub collectives: u64,
    pub most_unfinished: usize,
    /// The next number of each member. One connection brings all its contributions, in order if few are unfinished.
    next: Vec<AtomicU64>,
}

impl<T: Contribution> RemoteCommunicator<T> {
    /// A communicator of these members.
    pub fn open(
        members: Members,
        form: T::Form,
        (collectives, most_unfinished): (u64, usize),
    ) -> (Arc<Communicator<T>>, RemoteCommunicator<T>) {
        let (count, local) = (members.count(), members.of(None).count());
        let forward: Forward<T> = Box::new(move |collective, member, part| {
            let (content, tensors) = part.pack();
            members.send_to_all(member, &[encode(&collective), content].concat(), &tensors);
        });
        let communicator = Arc::new(Communicator::among(count, local, Some(forward)));
        let next = (0..count).map(|_| AtomicU64::new(0)).collect();
        (communicator.clone(), RemoteCommunicator { communicator, form, collectives, most_unfinished, next })
    }
}

impl<T: Contribution> GroupReceiver for RemoteCommunicator<T> {
    fn arrive(&self, member: usize, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<(), FrameError> {
        let number = fields.value("the number of a collective")?;
        let next = self.next.get(member).ok_or(FrameError::Field { what: "the member of a collective" })?;
        let is_next = self.most_unfinished == usize::MAX || number == next.load(Ordering::Relaxed);
        check(is_next && number < self.collectives, "the number of a collective")?;
        let part = T::unpack(&self.form, fields, ring)?;
        fields.end()?;
        next.store(number + 1, Ordering::Relaxed);
        check(self.communicator.arrive(number, member, part), "the member of a collective")?;
        check(self.communicator.unfinished() <= self.most_unfinished, "the number of a collective")
    }

    fn abandon(&self) {
        self.communicator.abandon();
    }
}

/// Valid contents of a [`BucketContribution`].
pub struct ContributionForm {
    /// Number of gradient terms.
    pub terms: usize,
    /// Bytes of a micro-batch's moving-average samples.
    pub samples: Vec<usize>,
    pub items: u32,
    /// Maximum number of micro-batches per contribution.
    pub most_items: usize,
}

impl Contribution for BucketContribution {
    type Form = ContributionForm;

    fn pack(&self) -> (Vec<u8>, Vec<Arc<Buffer>>) {
        let items: Vec<u32> = self.samples.iter().map(|(item, _)| *item).collect();
        let mut head = encode(&(&self.has_terms, items));
        self.samples.iter().flat_map(|(_, values)| values).for_each(|value| head.extend(value));
        (head, Vec::new())
    }

    fn unpack(form: &ContributionForm, fields: &mut Fields<'_>, _: &mut Ring) -> Result<Self, FrameError> {
        let (has_terms, items): (Vec<bool>, Vec<u32>) = fields.value("the gradient flags")?;
        check(has_terms.len() == form.terms, "the gradient flags")?;
        let is_valid = items.len() <= form.most_items && items.iter().all(|item| *item < form.items);
        check(is_valid, "the micro-batches of samples")?;
        let mut value = |bytes: &usize| fields.bytes(*bytes, "a sample").map(<[u8]>::to_vec);
        let mut values = |item| Ok((item, form.samples.iter().map(&mut value).collect::<Result<_, _>>()?));
        let samples = items.into_iter().map(&mut values).collect::<Result<_, FrameError>>()?;
        Ok(BucketContribution { has_terms, samples })
    }
}

/// The bytes that a tensor of each number may have.
pub type TensorsForm = BTreeMap<usize, BTreeSet<usize>>;

impl Contribution for Tensors {
    type Form = TensorsForm;

    fn pack(&self) -> (Vec<u8>, Vec<Arc<Buffer>>) {
        let lengths: Vec<(usize, usize)> = self.iter().map(|(number, tensor)| (*number, tensor.len())).collect();
        (encode(&lengths), self.iter().map(|(_, tensor)| tensor.clone()).collect())
    }

    fn unpack(form: &TensorsForm, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<Tensors, FrameError> {
        let what = "a tensor of a collective";
        let lengths: Vec<(usize, usize)> = fields.value(what)?;
        let mut numbers = BTreeSet::new();
        let mut is_valid = |(number, bytes): &(usize, usize)| {
            form.get(number).is_some_and(|sizes| sizes.contains(bytes)) && numbers.insert(*number)
        };
        check(lengths.iter().all(&mut is_valid), what)?;
        lengths.into_iter().map(|(number, bytes)| Ok((number, ring.tensor(fields, bytes, what)?))).collect()
    }
}

impl Contribution for Squares {
    /// Number of parameters and shards.
    type Form = usize;

    fn pack(&self) -> (Vec<u8>, Vec<Arc<Buffer>>) {
        (encode(self), Vec::new())
    }

    fn unpack(names: &usize, fields: &mut Fields<'_>, _: &mut Ring) -> Result<Squares, FrameError> {
        let squares: Squares = fields.value("a squared norm")?;
        let is_valid = squares.len() <= *names && squares.iter().all(|(number, _)| number < names);
        check(is_valid, "a squared norm")?;
        Ok(squares)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(part: &impl Contribution) -> Vec<u8> {
        let (mut content, bodies) = part.pack();
        bodies.iter().for_each(|body| content.extend(&*body.download().unwrap()));
        content
    }

    /// Reads a contribution back. Checks that every truncation is refused.
    fn read_back<T: Contribution>(part: &T, form: &T::Form) -> T {
        let bytes = packed(part);
        for length in 0..bytes.len() {
            let mut fields = Fields::of(&bytes[..length]);
            let read = T::unpack(form, &mut fields, &mut Ring::default()).and_then(|_| fields.end());
            assert!(read.is_err(), "{length} of {}", bytes.len());
        }
        T::unpack(form, &mut Fields::of(&bytes), &mut Ring::default()).unwrap()
    }

    fn tensor(number: usize, bytes: &[u8]) -> (usize, Arc<Buffer>) {
        (number, Arc::new(Buffer::host_copy(bytes)))
    }

    fn form() -> TensorsForm {
        TensorsForm::from([(0, BTreeSet::from([4, 8])), (3, BTreeSet::from([0]))])
    }

    #[test]
    fn parts_read_back() {
        let form_of_bucket = ContributionForm { terms: 2, samples: vec![2], items: 9, most_items: 1 };
        let part = BucketContribution { has_terms: vec![false, true], samples: vec![(5, vec![vec![8, 9]])] };
        let read = read_back(&part, &form_of_bucket);
        assert_eq!((read.samples, read.has_terms), (part.samples, part.has_terms));

        let read = read_back(&vec![tensor(3, &[]), tensor(0, &[1, 2, 3, 4])], &form());
        let contents: Vec<_> = read.iter().map(|(number, tensor)| (*number, tensor.download().unwrap())).collect();
        assert_eq!(contents, [(3, vec![].into()), (0, vec![1, 2, 3, 4].into())]);
        for wrong in [vec![tensor(0, &[7])], vec![tensor(1, &[])], vec![tensor(3, &[]), tensor(3, &[])]] {
            assert!(Tensors::unpack(&form(), &mut Fields::of(&packed(&wrong)), &mut Ring::default()).is_err());
        }

        let squares: Squares = vec![(1, 0.1), (0, f64::INFINITY)];
        assert_eq!(read_back(&squares, &2), squares);
        assert!(Squares::unpack(&1, &mut Fields::of(&packed(&squares)), &mut Ring::default()).is_err());
    }

    #[test]
    fn operands_come_once_and_not_too_early() {
        let members = Members::new(vec![None, Some(1)], Box::new(|_, _, _, _| {}));
        let (communicator, remote) = RemoteCommunicator::open(members, form(), (9, 2));
        let operand = || vec![tensor(0, &[1, 2, 3, 4])];
        let arrive = |number: u64, member: usize| {
            let content = [encode(&number), packed(&operand())].concat();
            remote.arrive(member, &mut Fields::of(&content), &mut Ring::default())
        };
        assert!(arrive(0, 2).is_err(), "there is no such rank");
        assert!(arrive(9, 1).is_err(), "there is no such collective");
        assert!(arrive(1, 1).is_err(), "it comes before the first");
        assert_eq!(arrive(0, 1), Ok(()));
        assert!(arrive(0, 1).is_err(), "it has come already");
        communicator.contribute(0, 0, operand());
        // The other rank has both, and goes on; this one has not read them.
        assert_eq!(arrive(1, 1), Ok(()));
        assert!(arrive(2, 1).is_err(), "nobody contributed to the second");
        assert_eq!(communicator.wait(0).unwrap().len(), 2);
    }
}
