//! Largest op in a range, without scanning the whole range.

use std::cmp::Reverse;
use std::ops::Range;

/// Ops grouped by size, largest first. Deep models have many ops of equal size, and a range contains few consecutive
/// ones.
#[derive(Clone, Debug, Default)]
pub struct Ranking {
    /// Sizes, descending, each with its ops, ascending.
    sizes: Vec<(u64, Vec<u32>)>,
}

impl Ranking {
    /// Ranks ops by size; ops of size 0 are omitted.
    pub fn of(sizes: impl Iterator<Item = u64>) -> Ranking {
        let mut ops: Vec<(Reverse<u64>, u32)> =
            sizes.enumerate().filter(|(_, size)| *size > 0).map(|(op, size)| (Reverse(size), op as u32)).collect();
        ops.sort_unstable();
        let same = ops.chunk_by(|(size, _), (other, _)| size == other);
        Ranking { sizes: same.map(|ops| (ops[0].0.0, ops.iter().map(|(_, op)| *op).collect())).collect() }
    }

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
