//! The range of each parameter that a replica owns under ZeRO: see `compiler::plan::zero`.
//!
//! Every parameter is divided by elements into contiguous ranges, one per replica and as even as possible. Gradients, optimizer
//! state and master weights of a range are buffers of its size. A parameter shared with other stages is not sharded.

use crate::device::buffer::Buffer;
use crate::exec::compile::NamedTensor;
use crate::exec::executor::Weights;
use std::ops::Range;
use std::sync::Arc;

/// The shares of a stage's parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardRange {
    replica: usize,
    replicas: usize,
    /// By parameter, whether it is dealt out.
    is_dealt: Vec<bool>,
    /// Whether of its weights, too, a replica holds its share only.
    keeps: bool,
}

impl ShardRange {
    /// All of so many parameters.
    pub fn whole(parameters: usize) -> ShardRange {
        ShardRange { replica: 0, replicas: 1, is_dealt: vec![false; parameters], keeps: false }
    }

    /// What one of these replicas owns of the parameters of which `is_dealt` is true.
    pub fn of(replica: usize, replicas: usize, is_dealt: Vec<bool>) -> ShardRange {
        ShardRange { replica, replicas, is_dealt, keeps: false }
    }

    /// The same where a replica holds its share only of weights, too.
    pub fn of_weights(self) -> ShardRange {
        ShardRange { keeps: true, ..self }
    }

    /// Whether a replica holds of the weights of what is dealt out its share only.
    pub fn keeps(&self) -> bool {
        self.keeps
    }

    /// What a replica holds of a version of these parameters, given all of it.
    pub fn kept(&self, parameters: &[NamedTensor], whole: &Weights) -> Weights {
        let of = |((parameter, named), weight): ((usize, &NamedTensor), &Arc<Buffer>)| match self.keeps
            && self.deals(parameter)
        {
            true => {
                Arc::new(Buffer::copy_of(&weight.bytes()[self.own(parameter, weight.len(), named.fact.dtype.size())]))
            }
            false => weight.clone(),
        };
        parameters.iter().enumerate().zip(whole).map(of).collect()
    }

    /// Which replica this is.
    pub fn replica(&self) -> usize {
        self.replica
    }

    /// How many replicas give parts of what all have together.
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    /// Whether a parameter is dealt out.
    pub fn deals(&self, parameter: usize) -> bool {
        self.is_dealt.get(parameter).copied().unwrap_or(false)
    }

    /// Whether any is.
    pub fn deals_any(&self) -> bool {
        self.is_dealt.contains(&true)
    }

    /// The bytes that this replica owns of a tensor of a parameter, of so many bytes in elements of this size.
    pub fn own(&self, parameter: usize, bytes: usize, element: usize) -> Range<usize> {
        self.of_member(parameter, bytes, element, self.replica)
    }

    /// The same of any replica.
    pub fn of_member(&self, parameter: usize, bytes: usize, element: usize, member: usize) -> Range<usize> {
        if self.deals(parameter) { range(bytes, element, member, self.replicas) } else { 0..bytes }
    }
}

/// The bytes of one of so many shares.
pub fn range(bytes: usize, element: usize, member: usize, members: usize) -> Range<usize> {
    let element = element.max(1);
    let elements = (bytes / element) as u128;
    let edge = |member: usize| (elements * member as u128 / members.max(1) as u128) as usize * element;
    edge(member)..edge(member + 1)
}

/// What a replica gives of a version, by parameter; or at the end of a run, of what it leaves.
pub struct Shares(pub Vec<(usize, Arc<Buffer>)>);

/// Puts a tensor together whose shares come by replica.
pub fn joined<'a>(parts: impl Iterator<Item = &'a [u8]>) -> Buffer {
    let bytes: Vec<u8> = parts.flatten().copied().collect();
    Buffer::copy_of(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_even_and_whole_elements() {
        for (elements, members) in [(10, 4), (3, 8), (0, 2), (1, 1), (1 << 20, 7)] {
            let mut end = 0;
            for member in 0..members {
                let of = range(elements * 4, 4, member, members);
                assert_eq!((of.start, of.end % 4), (end, 0));
                assert!(of.len() <= elements.div_ceil(members) * 4);
                end = of.end;
            }
            assert_eq!(end, elements * 4);
        }
    }

    #[test]
    fn what_is_not_dealt_out_is_everyones() {
        let share = ShardRange::of(1, 2, vec![true, false]);
        assert_eq!((share.own(0, 24, 8), share.own(1, 24, 8)), (8..24, 0..24));
        assert!(!ShardRange::whole(2).deals_any() && share.deals_any());
    }
}
