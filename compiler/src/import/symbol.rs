//! Decidable comparisons of symbolic sizes. A symbol is at least 1.

use crate::tensor::dim::{Bindings, Dim, DimError};
use std::cmp::Ordering;

/// The minimum of a dim, if it is increasing in all its symbols.
pub fn least(dim: &Dim) -> Option<i64> {
    if let Some(value) = dim.known() {
        return Some(value);
    }
    // Each negative coefficient prints a minus sign, and symbol names contain none.
    let text = dim.to_string();
    let negative_constant_only = text.rfind('-').is_none_or(|at| text[at + 1..].bytes().all(|b| b.is_ascii_digit()));
    if !negative_constant_only || text.matches('-').count() > 1 {
        return None;
    }
    let ones: Bindings = dim.symbols().into_iter().map(|s| (s, 1)).collect();
    dim.bind(&ones).ok()
}

/// Compares two sizes; `None` if the result depends on the symbols.
pub fn compare(a: &Dim, b: &Dim) -> Option<Ordering> {
    let (ahead, behind) = (a.sub(b).ok()?, b.sub(a).ok()?);
    if ahead.is(0) {
        return Some(Ordering::Equal);
    }
    if least(&ahead).is_some_and(|v| v > 0) {
        return Some(Ordering::Greater);
    }
    if least(&behind).is_some_and(|v| v > 0) {
        return Some(Ordering::Less);
    }
    None
}

/// True if `a ≤ b` for all values of the symbols.
pub fn at_most(a: &Dim, b: &Dim) -> bool {
    b.sub(a).ok().and_then(|rest| least(&rest)).is_some_and(|v| v >= 0)
}

/// The smaller of two sizes, if decidable.
pub fn smaller(a: &Dim, b: &Dim) -> Option<Dim> {
    if at_most(a, b) {
        Some(a.clone())
    } else if at_most(b, a) {
        Some(b.clone())
    } else {
        None
    }
}

/// The larger of two sizes, if decidable.
pub fn larger(a: &Dim, b: &Dim) -> Option<Dim> {
    smaller(a, b).map(|minimum| if minimum == *a { b.clone() } else { a.clone() })
}

pub fn substitute(dims: &[Dim], values: &Bindings) -> Result<Vec<Dim>, DimError> {
    dims.iter().map(|d| d.substitute(values)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_compared_where_symbols_cannot_matter() {
        let dim = |text: &str| Dim::parse(text).unwrap();
        assert_eq!(least(&dim("batch*16-1")), Some(15));
        assert_eq!(least(&dim("16-batch")), None);
        assert_eq!(least(&dim("a*b-b")), None);
        assert_eq!(compare(&dim("batch"), &dim("-1")), Some(Ordering::Greater));
        assert_eq!(compare(&dim("batch"), &dim("1")), None);
        assert_eq!(smaller(&dim("1"), &dim("batch")), Some(dim("1")));
        assert_eq!(larger(&dim("batch"), &dim("batch-1")), Some(dim("batch")));
        assert_eq!(smaller(&dim("seq"), &dim("1024")), None);
    }
}
