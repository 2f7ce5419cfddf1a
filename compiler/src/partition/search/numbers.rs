//! Comparison of times up to rounding, running sums, and the largest affordable size of a search.

/// Equality up to rounding.
pub fn same(left: f64, right: f64) -> bool {
    (left - right).abs() <= 1e-9 * left.abs().max(right.abs())
}

/// The sums before and after each item.
pub fn running_sums<T>(items: &[T], add: impl Fn(f64, &T) -> f64) -> Vec<f64> {
    let mut sums = vec![0.0];
    items.iter().for_each(|item| sums.push(add(sums[sums.len() - 1], item)));
    sums
}

/// The largest number from 2 to `most` that is `affordable`; the predicate must be monotonic.
pub fn largest(most: usize, affordable: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (2, most.max(2));
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if affordable(middle) { low = middle } else { high = middle - 1 }
    }
    low
}
