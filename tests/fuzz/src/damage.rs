//! Damage to the bytes of a file, or to the words of a text.

#![allow(dead_code)]

/// The number in a variable of the environment.
pub fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// xorshift64*.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, count: usize) -> usize {
        (self.next() >> 11) as usize % count.max(1)
    }

    fn of<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

/// Flips, truncates, duplicates and moves bytes.
pub fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..1 + random.below(8) {
        let (at, length) = (random.below(bytes.len()), 1 + random.below(24));
        let end = (at + length).min(bytes.len());
        match random.below(6) {
            0 => bytes.truncate(at),
            1 => {
                bytes.drain(at..end);
            }
            2 => {
                let part = bytes[at..end].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, part);
            }
            3 => bytes[at..end].fill(0xff),
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << random.below(8);
                }
            }
        }
        if bytes.is_empty() {
            return;
        }
    }
}

/// What a word is replaced by: numbers at the ends of ranges, and values of other types.
const WORDS: [&str; 24] = [
    "0",
    "1",
    "2",
    "3",
    "7",
    "-1",
    "1000",
    "65536",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "18446744073709551615",
    "18446744073709551616",
    "-9223372036854775808",
    "0.5",
    "1e-308",
    "1e308",
    "1e309",
    "NaN",
    "null",
    "true",
    "\"\"",
    "[]",
];

/// Replaces, removes, duplicates and exchanges words, so that much of the text stays well-formed.
pub fn edit_text(text: &mut Vec<u8>, random: &mut Random) {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    for _ in 0..1 + random.below(4) / 3 {
        let mut words: Vec<std::ops::Range<usize>> = Vec::new();
        for (at, byte) in text.iter().enumerate() {
            match words.last_mut() {
                _ if !is_word(*byte) => {}
                Some(last) if last.end == at => last.end += 1,
                _ => words.push(at..at + 1),
            }
        }
        if words.is_empty() {
            return;
        }
        let numbers: Vec<std::ops::Range<usize>> =
            words.iter().filter(|word| text[word.start].is_ascii_digit()).cloned().collect();
        let place = if numbers.is_empty() || random.below(4) == 0 { &words } else { &numbers };
        let place = random.of(place).clone();
        let word = text[random.of(&words).clone()].to_vec();
        let replacement = match random.below(8) {
            0 => word,
            1 => Vec::new(),
            2 => [&text[place.clone()], &b"0"[..]].concat(),
            3 => {
                // A line twice.
                let start = text[..place.start].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
                let end = text[place.end..]
                    .iter()
                    .position(|byte| *byte == b'\n')
                    .map_or(text.len(), |at| place.end + at + 1);
                let line = text[start..end].to_vec();
                text.splice(start..start, line);
                continue;
            }
            _ => random.of(&WORDS).as_bytes().to_vec(),
        };
        text.splice(place, replacement);
    }
}
