//! Ops by size, from which the largest of a run is found without going through all of them.

use std::cmp::Reverse;
use std::ops::Range;

/// Ops by size, those of the largest first. Of deep models many ops have the same size and a run has few of them, which stand together.
#[derive(Clone, Debug, Default)]
pub struct Ranking {
    /// Sizes, descending, each with the ops that have it, ascending.
    sizes: Vec<(u64, Vec<u32>)>,
}

impl Ranking {
    /// Ops by the size of each; those of size 0 are left out.
    pub fn of(sizes: impl Iterator<Item = u64>) -> Ranking {
        let mut ops: Vec<(Reverse<u64>, u32)> =
            sizes.enumerate().filter(|(_, size)| *size > 0).map(|(op, size)| (Reverse(size), op as u32)).collect();
        ops.sort_unstable();
        let same = ops.chunk_by(|(size, _), (other, _)| size == other);
        Ranking { sizes: same.map(|ops| (ops[0].0.0, ops.iter().map(|(_, op)| *op).collect())).collect() }
    }

    /// The ops that lie in a span, those of the largest size first.
    pub fn within(&self, span: Range<usize>) -> impl Iterator<Item = (u64, usize)> + '_ {
        self.sizes.iter().flat_map(move |(size, ops)| {
            let ops = &ops[ops.partition_point(|&op| (op as usize) < span.start)..];
            let end = span.end;
            ops.iter().map(|&op| op as usize).take_while(move |&op| op < end).map(|op| (*size, op))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_of_a_span_come_first() {
        let ranking = Ranking::of([3, 0, 9, 3, 9, 1].into_iter());
        let within = |span| ranking.within(span).collect::<Vec<_>>();
        assert_eq!(within(0..6), [(9, 2), (9, 4), (3, 0), (3, 3), (1, 5)]);
        assert_eq!(within(1..4), [(9, 2), (3, 3)]);
        assert_eq!(within(0..2), [(3, 0)]);
        assert_eq!(within(1..2), []);
    }
}
