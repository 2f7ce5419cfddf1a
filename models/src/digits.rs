//! The bundled dataset: 1,797 handwritten digits of 8×8 pixels (see `data/ATTRIBUTION.md`), split into training and
//! test sets.

use crate::random::Stream;

/// The bundled file: 1,797 labels, then 1,797 images of 8×8 pixels in 0..=16, one byte each.
const BYTES: &[u8] = include_bytes!("../data/digits.bin");

/// Images in the file.
pub const ROWS: usize = 1797;

pub const SAMPLE: [usize; 3] = [1, 8, 8];

const TRAIN_ROWS: usize = 1437;

#[derive(Debug, Clone, PartialEq)]
pub struct Split {
    pub rows: usize,
    /// Pixels in 0..=1, row-major, `rows` × 1 × 8 × 8.
    pub x: Vec<f32>,
    pub y: Vec<i64>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Digits {
    /// 1,437 images.
    pub train: Split,
    /// 360 images.
    pub test: Split,
}

/// Loads the dataset, shuffled by `seed`: 1,437 training and 360 test images.
pub fn load(seed: u64) -> Digits {
    let pixels: usize = SAMPLE.iter().product();
    let (x, y) = raw();
    let order = Stream::new(seed, "digits").permutation(y.len());
    let split = |rows: &[usize]| Split {
        rows: rows.len(),
        x: rows.iter().flat_map(|row| &x[row * pixels..][..pixels]).map(|pixel| f32::from(*pixel) / 16.0).collect(),
        y: rows.iter().map(|row| i64::from(y[*row])).collect(),
    };
    let (train, test) = order.split_at(TRAIN_ROWS);
    Digits { train: split(train), test: split(test) }
}

/// Pixels (1797 × 1 × 8 × 8, in 0..=16) and labels, in the order of the file.
pub fn raw() -> (&'static [u8], &'static [u8]) {
    let (y, x) = BYTES.split_at(ROWS);
    (x, y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_the_whole() {
        let digits = load(0);
        assert_eq!((digits.train.rows, digits.test.rows), (1437, 360));
        assert_eq!((digits.train.x.len(), digits.test.y.len()), (1437 * 64, 360));
        let all = || digits.train.x.iter().chain(&digits.test.x);
        assert!(all().all(|pixel| (0.0..=1.0).contains(pixel)));
        // Known sums of the dataset: all pixels, and images per digit.
        assert_eq!(all().map(|pixel| f64::from(*pixel) * 16.0).sum::<f64>(), 561_718.0);
        let count = |digit| digits.train.y.iter().chain(&digits.test.y).filter(|y| **y == digit).count();
        assert_eq!((0..10).map(count).collect::<Vec<_>>(), [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
    }

    #[test]
    fn seeds_shuffle() {
        assert_eq!(load(1), load(1));
        assert_ne!(load(1).test, load(2).test);
    }
}
