//! Opens the batch of a static export. A constant broadcast to the exported batch size (a zero initial state, a
//! repeated token) is broadcast to the symbolic batch instead.

use super::Scope;
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::op::{Op, Value};
use crate::tensor::dim::Dim;

impl Scope<'_> {
    /// `x` broadcast to `asked`, if it was broadcast to the values that the symbols of `asked` have in the file;
    /// otherwise `x`.
    pub fn opened(&mut self, x: Value, asked: &[Dim]) -> Result<Value, LowerReason> {
        let have = self.fact(x).shape;
        if have == asked || have.len() != asked.len() {
            return Ok(x);
        }
        let Op::Broadcast(_) = self.graph.node(x.node).op else { return Ok(x) };
        let from = self.graph.inputs(x.node)[0];
        let narrow = self.fact(from).shape;
        for (at, (have, want)) in have.iter().zip(asked).enumerate() {
            let same = have == want;
            let frozen = want.known().is_none() && have.known().is_some() && want.substitute(self.frozen)? == *have;
            let stretched = (at + narrow.len()).checked_sub(asked.len()).is_none_or(|own| narrow[own].is(1));
            if !(same || frozen && stretched) {
                return Ok(x);
            }
        }
        self.broadcast(from, asked.to_vec())
    }

    /// Replaces exported sizes by symbolic ones: values take the symbolic axes of the others. Axis `free` may differ.
    pub fn alike(&mut self, values: &mut [Value], free: Option<usize>) -> Result<(), LowerReason> {
        let facts: Vec<Vec<Dim>> = values.iter().map(|v| self.fact(*v).shape).collect();
        let rank = facts.iter().map(Vec::len).max().unwrap_or(0);
        for (value, own) in values.iter_mut().zip(&facts) {
            let mut asked = own.clone();
            for (at, dim) in asked.iter_mut().enumerate() {
                let behind = own.len() - at;
                let open =
                    facts.iter().filter_map(|f| f.get(f.len().checked_sub(behind)?)).find(|d| d.known().is_none());
                // Axes are aligned from the right.
                if let Some(open) = open
                    && dim.known().is_some_and(|size| size > 1)
                    && free != Some(at + rank - own.len())
                {
                    dim.clone_from(open);
                }
            }
            *value = self.opened(*value, &asked)?;
        }
        Ok(())
    }
}
