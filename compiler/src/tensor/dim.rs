//! A dimension of a shape: a number, or a polynomial in named symbols such as `batch*16`.
//!
//! Traced models often have a symbolic batch. A [`Dim`] stays exact through sums, products and exact divisions until
//! [`Dim::bind`] replaces the symbols. Two dims are equal if their polynomials are. Arithmetic without an exact result
//! is an error.
//!
//! ```
//! use compiler::tensor::dim::Dim;
//! let rows = Dim::symbol("batch").mul(&Dim::Known(16)).unwrap();
//! assert_eq!(rows.to_string(), "batch*16");
//! assert_eq!(rows.div_exact(&Dim::Known(16)).unwrap(), Dim::symbol("batch"));
//! ```

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// Values of symbols.
pub type Bindings = BTreeMap<String, i64>;

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dim {
    Known(i64),
    /// A polynomial with at least one symbol, in canonical form.
    Symbolic(Arc<Polynomial>),
}

/// Symbols with their powers, sorted by name. Empty for the constant term.
type Monomial = Vec<(Arc<str>, u32)>;

/// A sum of monomials with non-zero coefficients.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Polynomial {
    terms: BTreeMap<Monomial, i64>,
}

/// Shape arithmetic without an exact result.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DimError {
    #[error("shape arithmetic overflows 64 bits: {left} {operator} {right}")]
    Overflow { left: String, operator: char, right: String },
    /// The quotient is not a polynomial with integer coefficients.
    #[error("{left} is not divisible by {right}")]
    Inexact { left: String, right: String },
    #[error("the size of symbolic dimension `{symbol}` is unknown")]
    Unbound { symbol: String },
    #[error("`{text}` is not a dimension")]
    Syntax { text: String },
}

impl From<i64> for Dim {
    fn from(value: i64) -> Dim {
        Dim::Known(value)
    }
}

impl From<usize> for Dim {
    fn from(value: usize) -> Dim {
        Dim::Known(i64::try_from(value).expect("a size in memory fits 63 bits"))
    }
}

impl Dim {
    pub fn symbol(name: &str) -> Dim {
        let terms = BTreeMap::from([(vec![(Arc::from(name), 1)], 1)]);
        Dim::Symbolic(Arc::new(Polynomial { terms }))
    }

    /// The number, unless symbolic.
    pub fn known(&self) -> Option<i64> {
        match self {
            Dim::Known(v) => Some(*v),
            Dim::Symbolic(_) => None,
        }
    }

    pub fn is(&self, value: i64) -> bool {
        self.known() == Some(value)
    }

    fn terms(&self) -> BTreeMap<Monomial, i64> {
        match self {
            Dim::Known(0) => BTreeMap::new(),
            Dim::Known(v) => BTreeMap::from([(Vec::new(), *v)]),
            Dim::Symbolic(p) => p.terms.clone(),
        }
    }

    fn from_terms(mut terms: BTreeMap<Monomial, i64>) -> Dim {
        terms.retain(|_, c| *c != 0);
        match (terms.len(), terms.get(&Vec::new())) {
            (0, _) => Dim::Known(0),
            (1, Some(&c)) => Dim::Known(c),
            _ => Dim::Symbolic(Arc::new(Polynomial { terms })),
        }
    }

    fn overflow(&self, operator: char, right: &Dim) -> DimError {
        DimError::Overflow { left: self.to_string(), operator, right: right.to_string() }
    }

    pub fn add(&self, right: &Dim) -> Result<Dim, DimError> {
        if let (Dim::Known(a), Dim::Known(b)) = (self, right) {
            return a.checked_add(*b).map(Dim::Known).ok_or_else(|| self.overflow('+', right));
        }
        let mut terms = self.terms();
        for (monomial, c) in right.terms() {
            let sum = terms.entry(monomial).or_insert(0);
            *sum = sum.checked_add(c).ok_or_else(|| self.overflow('+', right))?;
        }
        Ok(Dim::from_terms(terms))
    }

    pub fn sub(&self, right: &Dim) -> Result<Dim, DimError> {
        self.add(&right.mul(&Dim::Known(-1))?)
    }

    pub fn mul(&self, right: &Dim) -> Result<Dim, DimError> {
        if let (Dim::Known(a), Dim::Known(b)) = (self, right) {
            return a.checked_mul(*b).map(Dim::Known).ok_or_else(|| self.overflow('*', right));
        }
        let mut terms: BTreeMap<Monomial, i64> = BTreeMap::new();
        for (ma, ca) in &self.terms() {
            for (mb, cb) in &right.terms() {
                let c = ca.checked_mul(*cb).ok_or_else(|| self.overflow('*', right))?;
                let sum = terms.entry(product(ma, mb)).or_insert(0);
                *sum = sum.checked_add(c).ok_or_else(|| self.overflow('*', right))?;
            }
        }
        // Limits hostile files that square a sum repeatedly; real shapes have far fewer terms.
        if terms.len() > 256 {
            return Err(self.overflow('*', right));
        }
        Ok(Dim::from_terms(terms))
    }

    /// `self / right` without remainder. A divisor with several terms must equal the dividend up to a factor.
    pub fn div_exact(&self, right: &Dim) -> Result<Dim, DimError> {
        let inexact = || DimError::Inexact { left: self.to_string(), right: right.to_string() };
        let (dividend, divisor) = (self.terms(), right.terms());
        let Some((lead, lead_c)) = divisor.iter().next_back() else { return Err(inexact()) };
        let mut remainder = dividend;
        let mut quotient: BTreeMap<Monomial, i64> = BTreeMap::new();
        // Polynomial long division; each round cancels one monomial or fails.
        for _ in 0..512 {
            let Some((monomial, c)) = remainder.iter().next_back().map(|(m, c)| (m.clone(), *c)) else {
                return Ok(Dim::from_terms(quotient));
            };
            let factor = quotient_of(&monomial, lead).ok_or_else(inexact)?;
            if c.checked_rem(*lead_c) != Some(0) {
                return Err(inexact());
            }
            let q = c / lead_c;
            for (m, dc) in &divisor {
                let key = product(&factor, m);
                let entry = remainder.entry(key.clone()).or_insert(0);
                *entry = q.checked_mul(*dc).and_then(|v| entry.checked_sub(v)).ok_or_else(inexact)?;
                if *entry == 0 {
                    remainder.remove(&key);
                }
            }
            *quotient.entry(factor).or_insert(0) += q;
        }
        Err(inexact())
    }

    /// `floor(self / right)` for numbers with a positive divisor (a negative one truncates toward zero). For symbolic dims
    /// only the constant term may leave a remainder: ⌊(2 b + 1) / 2⌋ = b.
    pub fn div_floor(&self, right: &Dim) -> Result<Dim, DimError> {
        match (self, right) {
            (Dim::Known(a), Dim::Known(b)) if *b != 0 => {
                let q = a.checked_div_euclid(*b).ok_or_else(|| self.overflow('/', right))?;
                Ok(Dim::Known(if *b > 0 { q } else { a.checked_div(*b).unwrap_or(q) }))
            }
            (Dim::Symbolic(polynomial), Dim::Known(b @ 1..)) => {
                let constant = polynomial.terms.iter().find(|(monomial, _)| monomial.is_empty()).map_or(0, |(_, c)| *c);
                let rest = constant.rem_euclid(*b);
                self.sub(&Dim::Known(rest))?.div_exact(right)
            }
            _ => self.div_exact(right),
        }
    }

    /// Replaces symbols by their values. Unbound symbols stay.
    pub fn substitute(&self, bindings: &Bindings) -> Result<Dim, DimError> {
        let Dim::Symbolic(p) = self else { return Ok(self.clone()) };
        let mut sum = Dim::Known(0);
        for (monomial, c) in &p.terms {
            let mut term = Dim::Known(*c);
            for (symbol, power) in monomial {
                let factor = bindings.get(&**symbol).map_or_else(|| Dim::symbol(symbol), |v| Dim::Known(*v));
                for _ in 0..*power {
                    term = term.mul(&factor)?;
                }
            }
            sum = sum.add(&term)?;
        }
        Ok(sum)
    }

    pub fn has_symbol(&self, name: &str) -> bool {
        let Dim::Symbolic(p) = self else { return false };
        p.terms.keys().flatten().any(|(symbol, _)| **symbol == *name)
    }

    /// With other names for symbols.
    pub fn renamed(&self, names: &BTreeMap<String, String>) -> Dim {
        let Dim::Symbolic(p) = self else { return self.clone() };
        if !p.terms.keys().flatten().any(|(symbol, _)| names.contains_key(&**symbol)) {
            return self.clone();
        }
        let mut terms = BTreeMap::new();
        for (monomial, c) in &p.terms {
            let name =
                |symbol: &Arc<str>| names.get(&**symbol).map_or_else(|| symbol.clone(), |name| Arc::from(&**name));
            let powers = monomial.iter().map(|(symbol, power)| vec![(name(symbol), *power)]);
            let renamed = powers.reduce(|left, right| product(&left, &right)).unwrap_or_default();
            *terms.entry(renamed).or_insert(0) += c;
        }
        Dim::from_terms(terms)
    }

    /// The number after substitution; an unbound symbol is an error.
    pub fn bind(&self, bindings: &Bindings) -> Result<i64, DimError> {
        match self.substitute(bindings)? {
            Dim::Known(v) => Ok(v),
            Dim::Symbolic(p) => Err(DimError::Unbound { symbol: p.first_symbol() }),
        }
    }

    /// Sorted and distinct.
    pub fn symbols(&self) -> Vec<String> {
        let mut names: Vec<String> = match self {
            Dim::Known(_) => Vec::new(),
            Dim::Symbolic(p) => p.terms.keys().flatten().map(|(s, _)| s.to_string()).collect(),
        };
        names.sort();
        names.dedup();
        names
    }

    /// Parses the output of [`fmt::Display`].
    pub fn parse(text: &str) -> Result<Dim, DimError> {
        let syntax = || DimError::Syntax { text: text.to_string() };
        if text.len() > 4096 {
            return Err(syntax());
        }
        let mut sum = Dim::Known(0);
        for (sign, term) in signed_terms(text) {
            let mut product = Dim::Known(sign);
            for factor in term.split('*') {
                let factor = factor.trim();
                let dim = match factor.parse::<i64>() {
                    Ok(v) => Dim::Known(v),
                    Err(_) if is_symbol(factor) => Dim::symbol(factor),
                    Err(_) => return Err(syntax()),
                };
                product = product.mul(&dim)?;
            }
            sum = sum.add(&product)?;
        }
        Ok(sum)
    }
}

pub fn volume(shape: &[Dim]) -> Result<Dim, DimError> {
    shape.iter().try_fold(Dim::Known(1), |product, d| product.mul(d))
}

/// Tests for a valid symbol name: a letter or underscore, then letters, digits, `_` and `.`.
pub fn is_symbol(text: &str) -> bool {
    let mut chars = text.chars();
    chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.')
}

fn product(a: &Monomial, b: &Monomial) -> Monomial {
    let mut powers: BTreeMap<Arc<str>, u32> = a.iter().cloned().collect();
    for (symbol, power) in b {
        *powers.entry(symbol.clone()).or_insert(0) += power;
    }
    powers.into_iter().collect()
}

fn quotient_of(a: &Monomial, b: &Monomial) -> Option<Monomial> {
    let mut powers: BTreeMap<Arc<str>, u32> = a.iter().cloned().collect();
    for (symbol, power) in b {
        let exponent = powers.get_mut(symbol)?;
        *exponent = exponent.checked_sub(*power)?;
    }
    powers.retain(|_, p| *p > 0);
    Some(powers.into_iter().collect())
}

/// Splits `a*b-3+c` into (+1, "a*b"), (-1, "3"), (+1, "c").
fn signed_terms(text: &str) -> Vec<(i64, &str)> {
    let mut terms = Vec::new();
    let (mut start, mut sign) = (0, 1);
    for (at, c) in text.char_indices() {
        if (c == '+' || c == '-') && at > 0 {
            terms.push((sign, text[start..at].trim()));
            sign = if c == '-' { -1 } else { 1 };
            start = at + 1;
        } else if c == '-' {
            sign = -1;
            start = 1;
        }
    }
    terms.push((sign, text[start..].trim()));
    terms
}

impl Polynomial {
    fn first_symbol(&self) -> String {
        self.terms.keys().flatten().map(|(s, _)| s.to_string()).min().unwrap_or_default()
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = match self {
            Dim::Known(v) => return write!(f, "{v}"),
            Dim::Symbolic(p) => p,
        };
        // Highest monomial first; the constant term has the empty monomial and comes last.
        for (n, (monomial, c)) in p.terms.iter().rev().enumerate() {
            let sign = if *c < 0 { "-" } else { "+" };
            if n > 0 || *c < 0 {
                f.write_str(sign)?;
            }
            let symbols: Vec<&str> =
                monomial.iter().flat_map(|(s, power)| std::iter::repeat_n(&**s, *power as usize)).collect();
            match (symbols.is_empty(), c.unsigned_abs()) {
                (true, c) => write!(f, "{c}")?,
                (false, 1) => write!(f, "{}", symbols.join("*"))?,
                (false, c) => write!(f, "{}*{c}", symbols.join("*"))?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Serializes as a JSON number, or as text if symbolic.
impl Serialize for Dim {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Dim::Known(v) => serializer.serialize_i64(*v),
            Dim::Symbolic(_) => serializer.serialize_str(&self.to_string()),
        }
    }
}

impl<'de> Deserialize<'de> for Dim {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Dim, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Number(i64),
            Text(String),
        }
        match Either::deserialize(deserializer)? {
            Either::Number(v) => Ok(Dim::Known(v)),
            Either::Text(t) => Dim::parse(&t).map_err(serde::de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dim(text: &str) -> Dim {
        Dim::parse(text).unwrap()
    }

    #[test]
    fn prints_and_reads_back() {
        for text in ["0", "-3", "batch", "batch*16", "batch*seq*4+batch-7", "a*a*2"] {
            assert_eq!(dim(text).to_string(), text);
        }
        assert!(Dim::parse("__import__('os')").is_err());
        assert!(Dim::parse("2^3").is_err());
    }

    #[test]
    fn arithmetic_is_exact() {
        assert_eq!(dim("b+1").mul(&dim("b-1")).unwrap(), dim("b*b-1"));
        assert_eq!(dim("b*b-1").div_exact(&dim("b+1")).unwrap(), dim("b-1"));
        assert_eq!(dim("b*64").div_exact(&dim("16")).unwrap(), dim("b*4"));
        assert_eq!(dim("b").sub(&dim("b")).unwrap(), Dim::Known(0));
        assert!(matches!(dim("b").div_exact(&dim("2")), Err(DimError::Inexact { .. })));
        assert!(matches!(dim("b").div_exact(&dim("0")), Err(DimError::Inexact { .. })));
        assert!(matches!(Dim::Known(i64::MAX).add(&Dim::Known(1)), Err(DimError::Overflow { .. })));
        assert_eq!(Dim::Known(-7).div_floor(&Dim::Known(2)).unwrap(), Dim::Known(-4));
        for (sum, half) in [("b*2+1", "b"), ("b*2-1", "b-1"), ("b*2", "b")] {
            assert_eq!(dim(sum).div_floor(&dim("2")), Ok(dim(half)));
        }
        assert!(dim("b+1").div_floor(&dim("2")).is_err());
    }

    #[test]
    fn binds_symbols() {
        let bindings = Bindings::from([("batch".to_string(), 8)]);
        assert_eq!(dim("batch*16+1").bind(&bindings), Ok(129));
        assert_eq!(dim("batch*seq").substitute(&bindings).unwrap(), dim("seq*8"));
        assert_eq!(dim("seq").bind(&bindings), Err(DimError::Unbound { symbol: "seq".into() }));
    }
}
