//! Serialises communicator contributions.
//!
//! All processes compile the same stages. A frame therefore lists only which tensors it holds; their sizes follow from
//! the stage, and anything else is refused.

use crate::device::buffer::Buffer;
use crate::exec::stage_code::StageCode;
use crate::optim::grad_norm::Squares;
use crate::process::fields::Fields;
use crate::process::frame::FrameError;
use crate::process::recv_buffers::Ring;
use crate::stage::gradient_buckets::BucketContribution;
use crate::stage::gradients::GradientTerms;
use crate::zero::shard::Shares;
use std::sync::Arc;

/// A value that can be contributed across processes.
pub trait Contribution: Sized {
    /// The valid contents, known in advance.
    type Form: Send + Sync;

    /// Appends the numbers to `head` and the tensors to `bodies`.
    fn pack(&self, head: &mut Vec<u8>, bodies: &mut Vec<Arc<Buffer>>);

    /// Reads and checks a contribution.
    fn unpack(form: &Self::Form, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<Self, FrameError>;

    /// Maximum size, in bytes.
    fn most(form: &Self::Form) -> usize;
}

/// Valid contents of a [`BucketContribution`].
pub struct ContributionForm {
    /// Number of gradient terms.
    terms: usize,
    /// Bytes of a micro-batch's moving-average samples.
    samples: Vec<usize>,
    items: u32,
    /// Maximum number of micro-batches per contribution.
    most_items: usize,
}

impl ContributionForm {
    pub fn of(code: &StageCode, items: u32, most_items: usize) -> ContributionForm {
        ContributionForm {
            terms: code.gradient_terms.len(),
            samples: code.state_updates.iter().map(|update| update.sample.bytes).collect(),
            items,
            most_items,
        }
    }
}

impl Contribution for BucketContribution {
    type Form = ContributionForm;

    fn pack(&self, head: &mut Vec<u8>, _: &mut Vec<Arc<Buffer>>) {
        head.extend(self.has_terms.iter().map(|has_term| u8::from(*has_term)));
        head.extend((self.samples.len() as u32).to_le_bytes());
        for (item, values) in &self.samples {
            head.extend(item.to_le_bytes());
            values.iter().for_each(|value| head.extend(value));
        }
    }

    fn unpack(
        form: &ContributionForm,
        fields: &mut Fields<'_>,
        _: &mut Ring,
    ) -> Result<BucketContribution, FrameError> {
        let present = fields.bytes(form.terms, "the gradient flags")?;
        let count = fields.u32("the number of samples")? as usize;
        if count > form.most_items {
            return Err(FrameError::Field { what: "the number of samples" });
        }
        let mut samples = Vec::new();
        for _ in 0..count {
            let item = fields.below(form.items, "the micro-batch of a sample")?;
            let value = |bytes: &usize| fields.bytes(*bytes, "a sample").map(<[u8]>::to_vec);
            samples.push((item, form.samples.iter().map(value).collect::<Result<_, _>>()?));
        }
        if present.iter().any(|flag| *flag > 1) {
            return Err(FrameError::Field { what: "the gradient flags" });
        }
        Ok(BucketContribution { has_terms: present.iter().map(|flag| *flag == 1).collect(), samples })
    }

    fn most(form: &ContributionForm) -> usize {
        let sample = form.samples.iter().fold(4usize, |sum, bytes| sum.saturating_add(*bytes));
        form.terms.saturating_add(4).saturating_add(sample.saturating_mul(form.most_items))
    }
}

/// Valid contents of a tied parameter's gradient terms.
pub struct TermsForm {
    /// Ranks that its terms may have.
    pub ranks: Vec<usize>,
    /// Bytes of each term.
    pub bytes: usize,
}

impl Contribution for GradientTerms {
    type Form = TermsForm;

    fn pack(&self, head: &mut Vec<u8>, bodies: &mut Vec<Arc<Buffer>>) {
        head.extend((self.len() as u32).to_le_bytes());
        self.iter().for_each(|(rank, _)| head.extend((*rank as u32).to_le_bytes()));
        bodies.extend(self.iter().map(|(_, term)| term.clone()));
    }

    fn unpack(form: &TermsForm, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<GradientTerms, FrameError> {
        let what = "the gradients of a tied weight";
        let count = fields.u32(what)? as usize;
        if count > form.ranks.len() {
            return Err(FrameError::Field { what });
        }
        let ranks: Vec<usize> = (0..count).map(|_| Ok(fields.u32(what)? as usize)).collect::<Result<_, _>>()?;
        if ranks.iter().any(|rank| !form.ranks.contains(rank)) {
            return Err(FrameError::Field { what });
        }
        ranks.into_iter().map(|rank| Ok((rank, ring.tensor(fields, form.bytes, what)?))).collect()
    }

    fn most(form: &TermsForm) -> usize {
        form.bytes.saturating_add(4).saturating_mul(form.ranks.len()).saturating_add(4)
    }
}

/// Valid contents of weight shards: maximum bytes by parameter, then by gradient for the final gather.
pub struct SharesForm {
    pub max_bytes: Vec<usize>,
}

impl Contribution for Shares {
    type Form = SharesForm;

    fn pack(&self, head: &mut Vec<u8>, bodies: &mut Vec<Arc<Buffer>>) {
        head.extend((self.0.len() as u32).to_le_bytes());
        for (index, shard) in &self.0 {
            head.extend((*index as u32).to_le_bytes());
            head.extend((shard.len() as u64).to_le_bytes());
        }
        bodies.extend(self.0.iter().map(|(_, shard)| shard.clone()));
    }

    fn unpack(form: &SharesForm, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<Shares, FrameError> {
        let what = "the shards of a version";
        let count = fields.below(form.max_bytes.len() as u32 + 1, what)?;
        let mut sizes = Vec::new();
        for _ in 0..count {
            let index = fields.below(form.max_bytes.len() as u32, what)? as usize;
            let bytes = fields.u64(what)?;
            if bytes > form.max_bytes[index] as u64 || sizes.iter().any(|(of, _)| *of == index) {
                return Err(FrameError::Field { what });
            }
            sizes.push((index, bytes as usize));
        }
        let mut share = |(index, bytes)| Ok((index, ring.tensor(fields, bytes, what)?));
        Ok(Shares(sizes.into_iter().map(&mut share).collect::<Result<_, _>>()?))
    }

    fn most(form: &SharesForm) -> usize {
        form.max_bytes.iter().fold(4, |sum: usize, bytes| sum.saturating_add(*bytes).saturating_add(12))
    }
}

/// Valid contents of a gradient norm contribution.
pub struct SquaresForm {
    /// Number of parameters and shards.
    pub names: usize,
}

impl Contribution for Squares {
    type Form = SquaresForm;

    fn pack(&self, head: &mut Vec<u8>, _: &mut Vec<Arc<Buffer>>) {
        head.extend((self.len() as u32).to_le_bytes());
        for (number, square) in self {
            head.extend((*number as u32).to_le_bytes());
            head.extend(square.to_le_bytes());
        }
    }

    fn unpack(form: &SquaresForm, fields: &mut Fields<'_>, _: &mut Ring) -> Result<Squares, FrameError> {
        let what = "a squared norm";
        let names = u32::try_from(form.names).unwrap_or(u32::MAX);
        let count = fields.below(names.saturating_add(1), what)?;
        (0..count).map(|_| Ok((fields.below(names, what)? as usize, fields.f64(what)?))).collect()
    }

    fn most(form: &SquaresForm) -> usize {
        form.names.saturating_mul(12).saturating_add(4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(part: &impl Contribution) -> Vec<u8> {
        let (mut head, mut bodies) = (Vec::new(), Vec::new());
        part.pack(&mut head, &mut bodies);
        bodies.iter().for_each(|body| head.extend(&*body.download().unwrap()));
        head
    }

    /// Checks that every truncation is refused.
    fn check_truncations<T: Contribution>(bytes: &[u8], form: &T::Form) {
        for length in 0..bytes.len() {
            let mut fields = Fields::of(&bytes[..length]);
            let read = T::unpack(form, &mut fields, &mut Ring::default()).and_then(|_| fields.end());
            assert!(read.is_err(), "{length} of {}", bytes.len());
        }
        assert!(bytes.len() <= T::most(form));
    }

    fn term_of(bytes: usize) -> Arc<Buffer> {
        Arc::new(Buffer::host(bytes))
    }

    #[test]
    fn parts_read_back() {
        let form = ContributionForm { terms: 2, samples: vec![2], items: 9, most_items: 1 };
        let term = Arc::new(Buffer::host_copy(&[1, 2, 3, 4, 5, 6, 7, 8]));
        let part = BucketContribution { has_terms: vec![false, true], samples: vec![(5, vec![vec![8, 9]])] };
        let bytes = packed(&part);
        let unpacked = BucketContribution::unpack(&form, &mut Fields::of(&bytes), &mut Ring::default()).unwrap();
        assert_eq!((unpacked.samples, unpacked.has_terms), (part.samples, part.has_terms));
        check_truncations::<BucketContribution>(&bytes, &form);

        let form = TermsForm { ranks: vec![0, 3], bytes: 8 };
        let bytes = packed(&vec![(3usize, term.clone())]);
        let unpacked = GradientTerms::unpack(&form, &mut Fields::of(&bytes), &mut Ring::default()).unwrap();
        assert_eq!((unpacked.len(), unpacked[0].0), (1, 3));
        assert_eq!(unpacked[0].1.download(), term.download());
        check_truncations::<GradientTerms>(&bytes, &form);
        let foreign_rank = packed(&vec![(2usize, term)]);
        assert!(GradientTerms::unpack(&form, &mut Fields::of(&foreign_rank), &mut Ring::default()).is_err());

        let form = SharesForm { max_bytes: vec![8, 16, 0] };
        let shares = Shares(vec![(1, Arc::new(Buffer::host_copy(&[1, 2]))), (0, term_of(8)), (2, term_of(0))]);
        let bytes = packed(&shares);
        let Shares(unpacked) = Shares::unpack(&form, &mut Fields::of(&bytes), &mut Ring::default()).unwrap();
        let contents = |shares: &[(usize, Arc<Buffer>)]| -> Vec<(usize, Vec<u8>)> {
            shares.iter().map(|(place, share)| (*place, share.download().unwrap().to_vec())).collect()
        };
        assert_eq!(contents(&unpacked), contents(&shares.0));
        check_truncations::<Shares>(&bytes, &form);
        for wrong in [vec![(0, term_of(9))], vec![(3, term_of(0))], vec![(0, term_of(1)), (0, term_of(1))]] {
            let bytes = packed(&Shares(wrong));
            assert!(Shares::unpack(&form, &mut Fields::of(&bytes), &mut Ring::default()).is_err());
        }

        let form = SquaresForm { names: 2 };
        let squares: Squares = vec![(1, 0.1), (0, f64::INFINITY)];
        let bytes = packed(&squares);
        assert_eq!(Squares::unpack(&form, &mut Fields::of(&bytes), &mut Ring::default()), Ok(squares));
        check_truncations::<Squares>(&bytes, &form);
    }
}
