//! Decisions read from bytes, so that a fuzzer's byte edits are decision edits.

/// The remaining bytes; at their end every choice is the first.
pub struct Choices<'a> {
    remaining: &'a [u8],
}

impl<'a> Choices<'a> {
    pub fn of(data: &'a [u8]) -> Choices<'a> {
        Choices { remaining: data }
    }

    /// True if bytes are left.
    pub fn any(&self) -> bool {
        !self.remaining.is_empty()
    }

    fn byte(&mut self) -> u8 {
        let (first, remaining) =
            self.remaining.split_first().map_or((0, self.remaining), |(first, remaining)| (*first, remaining));
        self.remaining = remaining;
        first
    }

    /// A number below `count`, from two bytes.
    pub fn below(&mut self, count: usize) -> usize {
        let number = usize::from(self.byte()) | usize::from(self.byte()) << 8;
        if count == 0 { 0 } else { number % count }
    }

    /// A number that is likely to be a boundary value.
    pub fn number(&mut self) -> i64 {
        const BORDERS: [i64; 18] = [
            0,
            1,
            -1,
            2,
            3,
            7,
            64,
            -2,
            255,
            65_536,
            i32::MAX as i64,
            i32::MIN as i64,
            1 << 31,
            1 << 40,
            1 << 62,
            i64::MAX,
            i64::MIN,
            -(1 << 40),
        ];
        match self.below(BORDERS.len() + 4) {
            at if at < BORDERS.len() => BORDERS[at],
            _ => i64::from(self.byte()) - 100,
        }
    }

    pub fn of_list<'b, T>(&mut self, list: &'b [T]) -> Option<&'b T> {
        list.get(self.below(list.len()))
    }
}
