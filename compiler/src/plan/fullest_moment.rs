//! Micro-batches that the stages of a rank hold together under Megatron-LM's interleaved 1F1B.
//!
//! The stages (chunks) of a rank are not fullest at the same time: the forwards of one group of micro-batches at the
//! first chunk come before those at the second. On p ranks with v chunks each, the first rank holds
//! 2 (p - 1) + (v - 1) p + 1 micro-batches in all chunks together (Narayanan et al., SC 2021, section 2.2.2), while the
//! peaks of its chunks add up to more.

/// The micro-batches in flight at each chunk of rank `rank` of `ranks` when it holds most bytes. `bytes`: what each
/// chunk holds of one micro-batch.
///
/// The order of forwards and backwards is that of the [generator](crate::schedule::generators). It repeats after one
/// group of micro-batches.
pub fn of_rank((ranks, rank): (u32, u32), microbatches: u32, bytes: &[u64]) -> Vec<u32> {
    let (p, v) = (ranks, bytes.len() as u32);
    let microbatches = microbatches.min(8 * p);
    let all = microbatches.next_multiple_of(p).saturating_mul(v);
    let warm_up = (2 * (p - rank - 1) + (v - 1) * p).min(all);
    let exists = |k: u32| k / (p * v) * p + k % p < microbatches;
    let mut now = vec![0u32; v as usize];
    let mut fullest = (0, now.clone());
    for k in 0..all.min(warm_up.saturating_add(2 * p * v)) {
        if exists(k) {
            now[(k / p % v) as usize] += 1;
            let held = now.iter().zip(bytes).map(|(count, bytes)| u128::from(*count) * u128::from(*bytes)).sum();
            if held > fullest.0 || k == 0 {
                fullest = (held, now.clone());
            }
        }
        let backward = k.checked_sub(warm_up).filter(|done| exists(*done));
        backward.into_iter().for_each(|done| now[(v - 1 - done / p % v) as usize] -= 1);
    }
    fullest.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_chunks_hold_what_the_paper_says() {
        let of_rank = |rank: u32| of_rank((8, rank), 64, &[1; 3]).into_iter().sum::<u32>();
        assert_eq!([of_rank(0), of_rank(1), of_rank(7)], [31, 29, 17]);
    }
}
