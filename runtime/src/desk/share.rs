//! Versions of which each replica makes its share: what this one gives of them, and what it takes of the others.
//!
//! A step writes this replica's range of every parameter that is dealt out. The rest of the version comes from the others, bucket by
//! bucket; nobody uses it before. What no gradient reached, or a step that was left out, is as it was, on all replicas alike.

use super::Desk;
use crate::buffer::Buffer;
use crate::device::cpu::half::is_half;
use crate::execute::Weights;
use crate::link::rendezvous::{Abandoned, Rendezvous};
use crate::share::{Shares, joined};
use crate::stepper::exclusive;
use std::sync::Arc;

/// Where replicas gather what each has a share of.
pub type Board = Rendezvous<Shares>;

/// The meeting at which the first replica is given what the others leave. The first version is not gathered, so its numbers are free.
const LAST: u64 = 0;

/// A version that this replica has stepped and not yet gathered.
pub struct Stepped {
    /// The parameters that the step has changed.
    pub parameters: Vec<usize>,
    /// Buckets that are still to be gathered.
    pub buckets: u32,
}

impl Desk<'_> {
    /// Gives this replica's share of the parameters of one bucket in a version.
    pub fn give_share(&mut self, version: u32, bucket: u32) {
        let Some(board) = self.board.clone() else { return };
        let (weights, stepped) = (self.versions.get(&version), self.stepped.get(&version));
        let mut own = Vec::new();
        for &p in stepped.iter().flat_map(|stepped| &stepped.parameters) {
            let weight = weights.and_then(|weights| weights.get(p)).filter(|_| self.share.deals(p));
            if let Some(weight) = weight.filter(|_| self.gathered.bucket_of(p) == bucket) {
                let range = self.share.own(p, weight.len(), self.code.parameters[p].fact.dtype.size());
                // Where sums come and go, so do these.
                let mut part = match &self.executor.pieces {
                    None => self.executor.pool.take(range.len()),
                    Some(_) => self.executor.pool.once(range.len()),
                };
                exclusive(&mut part).copy_from_slice(&weight.bytes()[range]);
                own.push((p, part));
            }
        }
        board.bring(self.meeting(version, bucket), self.share.replica(), Shares(own));
    }

    /// Takes the others' shares of one bucket in a version. Waits for them. Says whether the version is whole now.
    pub fn take_shares(&mut self, version: u32, bucket: u32) -> Result<bool, Abandoned> {
        let Some(board) = self.board.clone() else { return Ok(false) };
        let all = board.meet(self.meeting(version, bucket))?;
        let weights = self.versions.get_mut(&version).ok_or(Abandoned)?;
        for (member, Shares(shares)) in all.iter().enumerate().filter(|(member, _)| *member != self.share.replica()) {
            for (p, part) in shares {
                let (named, weight) = self.code.parameters.get(*p).zip(weights.get_mut(*p)).ok_or(Abandoned)?;
                let range = self.share.of_member(*p, weight.len(), named.fact.dtype.size(), member);
                // The step has left it to this version alone. A part of another length is no share of it.
                let to = Arc::get_mut(weight).ok_or(Abandoned)?.bytes_mut();
                to.get_mut(range).filter(|to| to.len() == part.len()).ok_or(Abandoned)?.copy_from_slice(part.bytes());
            }
        }
        for (_, own) in all.get(self.share.replica()).into_iter().flat_map(|own| &own.0) {
            // All have brought theirs: what others still read is theirs, as between devices.
            if self.executor.pieces.is_some() {
                own.lend();
            }
            self.executor.pool.give(own.clone());
        }
        let Some(stepped) = self.stepped.get_mut(&version) else { return Ok(false) };
        stepped.buckets = stepped.buckets.saturating_sub(1);
        let is_whole = stepped.buckets == 0;
        if is_whole {
            self.stepped.remove(&version);
            self.executor.pieces.iter().for_each(|pieces| pieces.open(version));
        }
        Ok(is_whole)
    }

    /// Whether a version waits for shares of the others.
    pub fn is_in_shares(&self, version: u32) -> bool {
        self.stepped.contains_key(&version)
    }

    /// Puts together, at the first replica, what all leave of which each has a share: masters, which are the `weights` then, and the
    /// `gradients` of the last step. Waits for the others there.
    pub(super) fn join_left(
        &mut self,
        weights: &mut Weights,
        gradients: &mut [(usize, Buffer)],
    ) -> Result<(), Abandoned> {
        let Some(board) = self.board.clone() else { return Ok(()) };
        let parameters = self.code.parameters.len();
        // What is no parameter's number is a gradient's.
        let dealt = |p: &usize| self.share.deals(*p);
        let masters = (0..parameters).filter(|p| dealt(p) && is_half(self.code.parameters[*p].fact.dtype));
        let mut own: Vec<(usize, Arc<Buffer>)> = masters.map(|p| (p, weights[p].clone())).collect();
        let copies = gradients.iter().filter(|(p, _)| dealt(p));
        own.extend(copies.map(|(p, share)| (parameters + p, Arc::new(Buffer::copy_of(share.bytes())))));
        let places: Vec<usize> = own.iter().map(|(place, _)| *place).collect();
        board.bring(LAST, self.share.replica(), Shares(own));
        if self.share.replica() > 0 {
            return Ok(());
        }
        let all = board.meet(LAST)?;
        for place in places {
            let parts = all.iter().map(|Shares(shares)| shares.iter().find(|(of, _)| *of == place));
            let parts: Option<Vec<&[u8]>> = parts.map(|part| part.map(|(_, part)| part.bytes())).collect();
            let whole = joined(parts.ok_or(Abandoned)?.into_iter());
            match place.checked_sub(parameters) {
                None => weights[place] = Arc::new(whole),
                Some(p) => gradients.iter_mut().filter(|(of, _)| *of == p).for_each(|(_, gradient)| {
                    *gradient = Buffer::copy_of(whole.bytes());
                }),
            }
        }
        Ok(())
    }
}
