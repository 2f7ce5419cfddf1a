//! The bundled dataset: 1,797 handwritten digits of 8×8 pixels (see `data/ATTRIBUTION.md`), split into training and
//! test sets.

use std::io::Cursor;

use npyz::npz::NpzArchive;

use crate::random::Stream;

/// The bundled file: `x` uint8 (1797, 1, 8, 8) in 0..=16 and `y` uint8 (1797).
pub const NPZ: &[u8] = include_bytes!("../data/digits.npz");

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

/// A dataset that cannot be read. It is compiled in, so this means a damaged build.
#[derive(Debug, thiserror::Error)]
pub enum DigitsError {
    #[error("the shipped digits do not decode: {0}")]
    Decode(#[from] std::io::Error),
    #[error("the shipped digits have no array `{name}` of {expected} bytes")]
    Array { name: &'static str, expected: usize },
}

/// Loads the dataset, shuffled by `seed`: 1,437 training and 360 test images.
pub fn load(seed: u64) -> Result<Digits, DigitsError> {
    let pixels: usize = SAMPLE.iter().product();
    let y = array("y", 1797)?;
    let x = array("x", 1797 * pixels)?;
    let order = Stream::new(seed, "digits").permutation(y.len());
    let split = |rows: &[usize]| Split {
        rows: rows.len(),
        x: rows.iter().flat_map(|row| &x[row * pixels..][..pixels]).map(|pixel| f32::from(*pixel) / 16.0).collect(),
        y: rows.iter().map(|row| i64::from(y[*row])).collect(),
    };
    let (train, test) = order.split_at(TRAIN_ROWS);
    Ok(Digits { train: split(train), test: split(test) })
}

fn array(name: &'static str, expected: usize) -> Result<Vec<u8>, DigitsError> {
    let mut archive = NpzArchive::new(Cursor::new(NPZ))?;
    let missing = DigitsError::Array { name, expected };
    let Some(array) = archive.by_name(name)? else { return Err(missing) };
    let values: Vec<u8> = array.into_vec()?;
    if values.len() == expected { Ok(values) } else { Err(missing) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_the_whole() {
        let digits = load(0).unwrap();
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
        assert_eq!(load(1).unwrap(), load(1).unwrap());
        assert_ne!(load(1).unwrap().test, load(2).unwrap().test);
    }
}
