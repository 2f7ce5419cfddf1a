//! `Det`: the determinant of the last two axes, by expansion into minors.
//!
//! ```text
//! M_0 = 1,   M_k[S] = Σ_j ± a[k, j] · M_{k-1}[S without j],   S a set of k columns,   det = M_n[all]
//! ```
//!
//! The sign is negative if an odd number of columns of S follow j. There is no division, so value and gradient are
//! accurate up to rounding for singular matrices as well. The cost is `2ⁿ·n/2` products. Matrices in models have 2 to 4
//! rows; `LARGEST` is the limit.

use super::slice::part;
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::build::Build;
use crate::op::{Binary, Gather, Op, ReduceKind};
use crate::tensor::Tensor;
use crate::tensor::dim::Dim;

/// Maximum number of rows.
const LARGEST: i64 = 10;

/// For each set of `size` out of `n` columns, in ascending bit order, and each column in it: the column, the index of
/// the set without it among the sets of `size - 1`, and the sign.
fn minors(n: u32, size: u32) -> Vec<(i64, i64, f64)> {
    let sets = |size: u32| (0..1u32 << n).filter(move |set| set.count_ones() == size);
    let smaller: Vec<u32> = sets(size - 1).collect();
    let terms = |set: u32| {
        let smaller = &smaller;
        (0..n).filter(move |j| set >> j & 1 == 1).map(move |j| {
            let minor = smaller.binary_search(&(set & !(1 << j))).expect("a set without one of its columns is smaller");
            let columns_after = (set >> (j + 1)).count_ones();
            (i64::from(j), minor as i64, if columns_after % 2 == 1 { -1.0 } else { 1.0 })
        })
    };
    sets(size).flat_map(terms).collect()
}

pub fn det(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let fact = scope.fact(x);
    let [leading @ .., rows, columns] = fact.shape.as_slice() else {
        return Err(LowerReason::Inputs(format!("{fact} has no matrices")));
    };
    let n = match (rows.known(), columns.known()) {
        (Some(n), Some(m)) if n == m && (1..=LARGEST).contains(&n) => n,
        (Some(n), Some(m)) if n == m => {
            return Err(LowerReason::Unsupported(format!("the determinant of a {n}-row matrix")));
        }
        _ => return Err(LowerReason::Inputs(format!("the matrices of {fact} are not square"))),
    };
    let rank = leading.len();
    // M_1 is the first row.
    let mut minors_so_far = None;
    for k in 1..=n {
        let row = part(scope, x, rank, Dim::Known(k - 1), Dim::Known(k))?;
        let mut flat = leading.to_vec();
        flat.push(Dim::Known(n));
        let row = scope.reshape(row, flat)?;
        let Some(before) = minors_so_far else {
            minors_so_far = Some(row);
            continue;
        };
        let minors = minors(n as u32, k as u32);
        let index = |list: Vec<i64>| Tensor::from_i64(&[minors.len()], &list);
        let of_row = scope.constant(index(minors.iter().map(|m| m.0).collect()))?;
        let of_minor = scope.constant(index(minors.iter().map(|m| m.1).collect()))?;
        let signs: Vec<f64> = minors.iter().map(|m| m.2).collect();
        let signs = scope.constant(Tensor::from_f64(&[signs.len()], &signs).cast(fact.dtype))?;
        let a = scope.add(Op::Gather(Gather { axis: rank }), &[row, of_row])?;
        let minor = scope.add(Op::Gather(Gather { axis: rank }), &[before, of_minor])?;
        let product = scope.binary(Binary::Mul, a, minor)?;
        let product = scope.binary(Binary::Mul, product, signs)?;
        let mut split_shape = leading.to_vec();
        split_shape.extend([Dim::Known(minors.len() as i64 / k), Dim::Known(k)]);
        let product = scope.reshape(product, split_shape)?;
        minors_so_far = Some(scope.reduce(ReduceKind::Sum, product, &[rank + 1], false)?);
    }
    let det = minors_so_far.ok_or_else(|| LowerReason::Inputs("a matrix without rows".to_string()))?;
    Ok(vec![Known::Value(scope.reshape(det, leading.to_vec())?)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn determinant(a: &[&[f64]]) -> f64 {
        let n = a.len();
        let mut minors_so_far = a[0].to_vec();
        for (k, row) in a.iter().enumerate().skip(1) {
            let minors = minors(n as u32, k as u32 + 1);
            let terms: Vec<f64> =
                minors.iter().map(|&(j, m, sign)| sign * row[j as usize] * minors_so_far[m as usize]).collect();
            minors_so_far = terms.chunks(k + 1).map(|terms| terms.iter().sum()).collect();
        }
        minors_so_far[0]
    }

    #[test]
    fn small_determinants() {
        assert_eq!(determinant(&[&[7.0]]), 7.0);
        assert_eq!(determinant(&[&[1.0, 2.0], &[3.0, 4.0]]), -2.0);
        assert_eq!(determinant(&[&[2.0, 0.0, 1.0], &[1.0, 3.0, 2.0], &[1.0, 1.0, 4.0]]), 18.0);
        let permutation: [&[f64]; 4] = [&[0., 1., 0., 0.], &[0., 0., 1., 0.], &[0., 0., 0., 1.], &[1., 0., 0., 0.]];
        assert_eq!(determinant(&permutation), -1.0);
        assert_eq!(determinant(&[&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0], &[7.0, 8.0, 9.0]]), 0.0);
    }
}
