//! Opens the batch of a static export. A constant broadcast to the exported batch size (a zero initial state, a
//! repeated token) is broadcast to the symbolic batch instead.

use super::Scope;
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::symbolic_batch::with_batch_of;
use crate::op::{Op, Value};
use crate::tensor::dim::Dim;

impl Scope<'_> {
    /// `x` broadcast to `target_shape`, if it was broadcast to the values that the symbols of `target_shape` have in
    /// the file; otherwise `x`.
    pub fn open_batch(&mut self, x: Value, target_shape: &[Dim]) -> Result<Value, LowerReason> {
        let have = self.fact(x).shape;
        if have == target_shape || have.len() != target_shape.len() {
            return Ok(x);
        }
        let Op::Broadcast(_) = self.graph.node(x.node).op else { return Ok(x) };
        let from = self.graph.inputs(x.node)[0];
        let source_shape = self.fact(from).shape;
        for (at, (have, want)) in have.iter().zip(target_shape).enumerate() {
            let is_same = have == want;
            let frozen = want.known().is_none() && have.known().is_some() && want.substitute(self.frozen)? == *have;
            let is_broadcast =
                (at + source_shape.len()).checked_sub(target_shape.len()).is_none_or(|axis| source_shape[axis].is(1));
            if !(is_same || frozen && is_broadcast) {
                return Ok(x);
            }
        }
        self.broadcast(from, target_shape.to_vec())
    }

    /// Replaces exported sizes by symbolic ones: values take the symbolic axes of the others. Axis `free` may differ.
    pub fn align_batch(&mut self, values: &mut [Value], free: Option<usize>) -> Result<(), LowerReason> {
        let facts: Vec<Vec<Dim>> = values.iter().map(|v| self.fact(*v).shape).collect();
        let rank = facts.iter().map(Vec::len).max().unwrap_or(0);
        for (value, shape) in values.iter_mut().zip(&facts) {
            let mut target_shape = shape.clone();
            for (at, dim) in target_shape.iter_mut().enumerate() {
                let from_end = shape.len() - at;
                let symbolic =
                    facts.iter().filter_map(|f| f.get(f.len().checked_sub(from_end)?)).find(|d| d.known().is_none());
                // Axes are aligned from the right.
                if let Some(symbolic) = symbolic
                    && dim.known().is_some_and(|size| size > 1)
                    && free != Some(at + rank - shape.len())
                {
                    dim.clone_from(symbolic);
                }
            }
            let opened = self.open_batch(*value, &target_shape)?;
            // Another model input may have the exported batch size.
            *value = with_batch_of(self, opened, &target_shape)?;
        }
        Ok(())
    }
}
