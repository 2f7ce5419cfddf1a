//! Vector clocks of streams, and the accesses to a buffer that later ones must be ordered after.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The work of each stream, by stream number, that is known to precede something: its first calls up to this count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock(BTreeMap<u64, u64>);

impl Clock {
    /// Counts one more call of a stream, and returns its number.
    pub fn tick(&mut self, stream: u64) -> u64 {
        let count = self.0.entry(stream).or_default();
        *count += 1;
        *count
    }

    /// Adds the work that precedes another point.
    pub fn merge(&mut self, other: &Clock) {
        for (&stream, &count) in &other.0 {
            let latest = self.0.entry(stream).or_default();
            *latest = (*latest).max(count);
        }
    }

    /// True if call number `count` of a stream precedes.
    pub fn has(&self, stream: u64, count: u64) -> bool {
        self.0.get(&stream).is_some_and(|&latest| count <= latest)
    }

    /// True if all work of another clock precedes.
    pub fn has_all(&self, other: &Clock) -> bool {
        other.0.iter().all(|(&stream, &count)| self.has(stream, count))
    }
}

/// A read or write of a range by a call.
#[derive(Clone, Debug)]
pub struct Access {
    pub stream: u64,
    pub count: u64,
    pub range: Range<usize>,
    pub is_write: bool,
}

/// The last access of each stream to each range of a buffer: its number, by start, end, stream and kind.
#[derive(Debug, Default)]
pub struct History {
    last: BTreeMap<(usize, usize, u64, bool), u64>,
    streams: BTreeSet<u64>,
}

impl History {
    /// Adds an access, which the work in `before` precedes. Returns an earlier one that conflicts and does not precede it.
    pub fn add(&mut self, access: &Access, before: &[&Clock]) -> Option<Access> {
        let Access { stream, count, range, is_write } = access;
        // Most buffers have one stream, whose verbs are in order.
        let is_alone = self.streams.iter().all(|other| other == stream);
        let conflict = if is_alone { None } else { self.accesses().find(|old| old.conflicts(access, before)) };
        self.streams.insert(*stream);
        self.last.insert((range.start, range.end, *stream, *is_write), *count);
        conflict
    }

    /// The first write of the range that is not known to be done.
    pub fn unfinished_write(&self, range: &Range<usize>, done: &Clock) -> Option<Access> {
        let overlaps = |other: &Range<usize>| other.start < range.end && range.start < other.end;
        let is_open = |access: &Access| access.is_write && !done.has(access.stream, access.count);
        self.accesses().find(|access| overlaps(&access.range) && is_open(access))
    }

    fn accesses(&self) -> impl Iterator<Item = Access> {
        let access = |(&(start, end, stream, is_write), &count): (&(usize, usize, u64, bool), &u64)| Access {
            stream,
            count,
            range: start..end,
            is_write,
        };
        self.last.iter().map(access)
    }
}

impl Access {
    /// True if this earlier access and `later` conflict, and `before`, the work known to precede `later`, lacks it.
    fn conflicts(&self, later: &Access, before: &[&Clock]) -> bool {
        let overlaps = self.range.start < later.range.end && later.range.start < self.range.end;
        let is_ordered = self.stream == later.stream || before.iter().any(|clock| clock.has(self.stream, self.count));
        overlaps && (self.is_write || later.is_write) && !is_ordered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_of_two_streams_need_an_order() {
        let access = |stream, count, range, is_write| Access { stream, count, range, is_write };
        let (mut history, unknown) = (History::default(), Clock::default());
        let mut first = Clock::default();
        assert_eq!((first.tick(1), first.tick(1)), (1, 2));
        let conflict = |history: &mut History, of, clock: &Clock| history.add(&of, &[clock]).map(|old| old.count);
        assert_eq!(conflict(&mut history, access(1, 1, 0..8, true), &unknown), None);
        assert_eq!(conflict(&mut history, access(1, 2, 8..16, false), &unknown), None);
        // Two reads, or two ranges, do not conflict.
        assert_eq!(conflict(&mut history, access(2, 1, 8..16, false), &unknown), None);
        assert_eq!(conflict(&mut history, access(2, 2, 4..5, false), &unknown), Some(1));
        assert_eq!(conflict(&mut history, access(3, 1, 4..5, false), &first), None);
        assert_eq!(conflict(&mut history, access(3, 2, 15..16, true), &first), Some(1));
        assert!(history.unfinished_write(&(12..16), &first).is_some_and(|access| access.stream == 3));
        assert!(history.unfinished_write(&(0..12), &first).is_none());
    }
}
