//! An event queue by time: a radix heap (Ahuja, Mehlhorn, Orlin and Tarjan, JACM 1990).
//!
//! Times never decrease. An entry is in the bucket of the highest bit in which its time differs from the last time
//! taken. Bucket 0 has the entries of exactly that time. When bucket 0 is empty, the first non-empty bucket is
//! redistributed over the lower ones. An entry moves at most 64 times, usually two or three. Each move appends to a
//! list, which is more cache-friendly than a binary heap.
//!
//! Entries with equal times come out in insertion order: they are in the same bucket, and redistribution is stable.

pub struct EventQueue<E> {
    last: u64,
    buckets: [Vec<(u64, E)>; 65],
    /// The smallest time in each non-empty bucket, and a bit set of these buckets.
    least: [u64; 65],
    filled: u128,
    taken: usize,
    len: usize,
}

impl<E: Copy> EventQueue<E> {
    pub fn new() -> Self {
        let buckets = std::array::from_fn(|_| Vec::new());
        Self { last: 0, buckets, least: [0; 65], filled: 0, taken: 0, len: 0 }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds an entry; times in the past count as now.
    pub fn post(&mut self, time: u64, entry: E) {
        self.place(time.max(self.last), entry);
        self.len += 1;
    }

    pub fn next_time(&self) -> Option<u64> {
        self.first().map(|bucket| self.least[bucket])
    }

    pub fn take(&mut self) -> Option<(u64, E)> {
        let bucket = self.first()?;
        if bucket > 0 {
            self.last = self.least[bucket];
            self.filled &= !(1 << bucket);
            let mut entries = std::mem::take(&mut self.buckets[bucket]);
            for (time, entry) in entries.drain(..) {
                self.place(time, entry);
            }
            self.buckets[bucket] = entries;
        }
        let next = *self.buckets[0].get(self.taken)?;
        self.taken += 1;
        self.len -= 1;
        if self.taken == self.buckets[0].len() {
            self.buckets[0].clear();
            self.taken = 0;
            self.filled &= !1;
        }
        Some(next)
    }

    fn first(&self) -> Option<usize> {
        (self.filled != 0).then(|| self.filled.trailing_zeros() as usize)
    }

    fn place(&mut self, time: u64, entry: E) {
        let bucket = (64 - (time ^ self.last).leading_zeros()) as usize;
        let is_first = self.filled & 1 << bucket == 0;
        self.least[bucket] = if is_first { time } else { self.least[bucket].min(time) };
        self.filled |= 1 << bucket;
        self.buckets[bucket].push((time, entry));
    }
}

impl<E: Copy> Default for EventQueue<E> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    /// Compares with a binary heap that breaks ties by insertion number: random operations, many equal times.
    #[test]
    fn takes_what_a_binary_heap_takes() {
        let mut state = 1u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let (mut moments, mut heap, mut now) = (EventQueue::new(), BinaryHeap::new(), 0);
        for posted in 0..20_000u64 {
            let after = match random(4) {
                0 => 0,
                1 => random(4),
                2 => random(1 << 20),
                _ => random(1 << 31) << random(20),
            };
            moments.post(now + after, posted);
            heap.push(Reverse((now + after, posted)));
            while random(3) == 0 {
                assert_eq!(moments.next_time(), heap.peek().map(|Reverse((time, _))| *time));
                let expected = heap.pop().map(|Reverse(entry)| entry);
                assert_eq!(moments.take(), expected);
                now = expected.map_or(now, |(time, _)| time);
                assert_eq!((moments.len(), moments.is_empty()), (heap.len(), heap.is_empty()));
            }
        }
        while let Some(Reverse(expected)) = heap.pop() {
            assert_eq!(moments.take(), Some(expected));
        }
        assert_eq!(moments.take(), None);
    }

    #[test]
    fn what_is_too_late_happens_now() {
        let mut moments = EventQueue::new();
        moments.post(10, 'a');
        assert_eq!(moments.take(), Some((10, 'a')));
        moments.post(11, 'b');
        moments.post(3, 'c');
        assert_eq!([moments.take(), moments.take()], [Some((10, 'c')), Some((11, 'b'))]);
    }
}
