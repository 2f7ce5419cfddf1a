//! Parses symbolic sizes as exported programs write them.
//!
//! PyTorch passes such text to sympy, which evaluates it as Python; here it is only parsed. Two notations exist and may
//! be mixed:
//!
//! ```text
//! 2*s0 + 1                                            (s0//2)
//! Add(Mul(Integer(2), Symbol('s0', positive=True, integer=True)), Integer(1))
//!
//! sum     = ["-"] product { ("+" | "-") product }
//! product = power { ("*" | "//") power }
//! power   = atom [ "**" number ]
//! atom    = number | symbol | "(" sum ")" | call
//! call    = ("Symbol" | "Integer" | "Add" | "Mul" | "Pow" | "FloorDiv" | "CleanDiv") "(" … ")"
//! ```

use crate::import::fx::error::ExpressionError;
use crate::tensor::dim::{Dim, is_symbol};

const DEEPEST: usize = 32;

const LONGEST: usize = 4096;

/// Parses a size; `named` maps a symbol name to its size.
pub fn parse(text: &str, named: &dyn Fn(&str) -> Dim) -> Result<Dim, ExpressionError> {
    let shortened = || ExpressionError::Syntax(text.chars().take(80).collect());
    if text.len() > LONGEST {
        return Err(shortened());
    }
    let tokens = tokens(text).ok_or_else(shortened)?;
    let mut reader = Reader { text, named, tokens: &tokens, at: 0, depth: 0 };
    let dim = reader.sum()?;
    if reader.at == tokens.len() { Ok(dim) } else { Err(shortened()) }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Token<'a> {
    Number(i64),
    Word(&'a str),
    Quoted(&'a str),
    Mark(&'a str),
}

/// Splits text into tokens; `None` on any other character.
fn tokens(text: &str) -> Option<Vec<Token<'_>>> {
    let mut rest = text.trim_start();
    let mut tokens = Vec::new();
    while let Some(first) = rest.chars().next() {
        let (token, length) = if first.is_ascii_digit() {
            let length = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            (Token::Number(rest[..length].parse().ok()?), length)
        } else if first.is_ascii_alphabetic() || first == '_' {
            let length = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            (Token::Word(&rest[..length]), length)
        } else if first == '\'' || first == '"' {
            let length = rest[1..].find(first)?;
            (Token::Quoted(&rest[1..=length]), length + 2)
        } else {
            let mark = ["**", "//", "+", "-", "*", "(", ")", ",", "="].into_iter().find(|m| rest.starts_with(m))?;
            (Token::Mark(mark), mark.len())
        };
        tokens.push(token);
        rest = rest[length..].trim_start();
    }
    Some(tokens)
}

struct Reader<'a> {
    text: &'a str,
    named: &'a dyn Fn(&str) -> Dim,
    tokens: &'a [Token<'a>],
    at: usize,
    depth: usize,
}

impl<'a> Reader<'a> {
    fn wrong(&self) -> ExpressionError {
        ExpressionError::Syntax(self.text.chars().take(80).collect())
    }

    fn next(&mut self) -> Result<Token<'a>, ExpressionError> {
        let token = self.tokens.get(self.at).copied().ok_or_else(|| self.wrong())?;
        self.at += 1;
        Ok(token)
    }

    /// Consumes `mark` if it comes next.
    fn takes(&mut self, mark: &str) -> bool {
        let is_next = self.tokens.get(self.at) == Some(&Token::Mark(mark));
        self.at += usize::from(is_next);
        is_next
    }

    fn expect(&mut self, mark: &str) -> Result<(), ExpressionError> {
        if self.takes(mark) { Ok(()) } else { Err(self.wrong()) }
    }

    fn sum(&mut self) -> Result<Dim, ExpressionError> {
        self.depth += 1;
        if self.depth > DEEPEST {
            return Err(ExpressionError::Depth(DEEPEST));
        }
        let mut sum = match self.takes("-") {
            true => Dim::Known(0).sub(&self.product()?)?,
            false => self.product()?,
        };
        loop {
            if self.takes("+") {
                sum = sum.add(&self.product()?)?;
            } else if self.takes("-") {
                sum = sum.sub(&self.product()?)?;
            } else {
                self.depth -= 1;
                return Ok(sum);
            }
        }
    }

    fn product(&mut self) -> Result<Dim, ExpressionError> {
        let mut product = self.power()?;
        loop {
            if self.takes("*") {
                product = product.mul(&self.power()?)?;
            } else if self.takes("//") {
                product = product.div_floor(&self.power()?)?;
            } else {
                return Ok(product);
            }
        }
    }

    fn power(&mut self) -> Result<Dim, ExpressionError> {
        let base = self.atom()?;
        if !self.takes("**") {
            return Ok(base);
        }
        match self.next()? {
            Token::Number(exponent) => self.raised(&base, exponent),
            _ => Err(self.wrong()),
        }
    }

    fn raised(&self, base: &Dim, exponent: i64) -> Result<Dim, ExpressionError> {
        if !(0..=8).contains(&exponent) {
            return Err(self.wrong());
        }
        (0..exponent).try_fold(Dim::Known(1), |product, _| Ok(product.mul(base)?))
    }

    fn atom(&mut self) -> Result<Dim, ExpressionError> {
        match self.next()? {
            Token::Number(number) => Ok(Dim::Known(number)),
            Token::Mark("(") => {
                let sum = self.sum()?;
                self.expect(")")?;
                Ok(sum)
            }
            Token::Word(name) if self.takes("(") => self.call(name),
            Token::Word(name) if is_symbol(name) => Ok((self.named)(name)),
            _ => Err(self.wrong()),
        }
    }

    fn call(&mut self, name: &str) -> Result<Dim, ExpressionError> {
        if name == "Symbol" {
            return self.symbol();
        }
        let mut arguments = vec![self.sum()?];
        while !self.takes(")") {
            self.expect(",")?;
            arguments.push(self.sum()?);
        }
        match (name, arguments.as_slice()) {
            ("Integer", [number]) if number.known().is_some() => Ok(number.clone()),
            ("Add", terms) => terms.iter().try_fold(Dim::Known(0), |sum, d| Ok(sum.add(d)?)),
            ("Mul", factors) => factors.iter().try_fold(Dim::Known(1), |product, d| Ok(product.mul(d)?)),
            ("FloorDiv" | "CleanDiv", [a, b]) => Ok(a.div_floor(b)?),
            ("Pow", [base, Dim::Known(exponent)]) => self.raised(base, *exponent),
            _ => Err(self.wrong()),
        }
    }

    /// Parses a quoted name and ignores assumptions such as `positive=True`, which hold for all sizes.
    fn symbol(&mut self) -> Result<Dim, ExpressionError> {
        let Token::Quoted(name) = self.next()? else { return Err(self.wrong()) };
        if !is_symbol(name) {
            return Err(self.wrong());
        }
        while !self.takes(")") {
            self.expect(",")?;
            let Token::Word(_) = self.next()? else { return Err(self.wrong()) };
            self.expect("=")?;
            let Token::Word("True" | "False") = self.next()? else { return Err(self.wrong()) };
        }
        Ok((self.named)(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Dim, ExpressionError> {
        super::parse(text, &Dim::symbol)
    }

    #[test]
    fn both_writings_are_read() {
        for (text, expected) in [
            ("s0", "s0"),
            ("s0 + 1", "s0+1"),
            ("-2*s0 - (3 - s1)*s0", "s0*s1-s0*5"),
            ("4*s31//2", "s31*2"),
            ("s0**2", "s0*s0"),
            ("Symbol('s31', positive=True, integer=True)", "s31"),
            ("FloorDiv(Mul(Integer(2), Symbol('x')), Integer(2))", "x"),
            ("Add(Mul(Integer(-1), Symbol('s0')), Pow(Symbol('s1'), Integer(2)), 7)", "s1*s1-s0+7"),
            ("FloorDiv(Integer(7), Integer(2))", "3"),
        ] {
            assert_eq!(parse(text).map(|d| d.to_string()), Ok(expected.to_string()), "{text}");
        }
    }

    #[test]
    fn code_and_nonsense_are_refused() {
        for text in [
            "__import__('os').system('true')",
            "",
            "s0 +",
            "s0 s1",
            "Symbol(s0)",
            "Symbol('a b')",
            "Symbol('s0', x=1)",
            "Integer(s0)",
            "exec('1')",
            "s0 if s1 else 2",
            "s0[0]",
            "s0**s1",
            "s0**99",
            "99999999999999999999",
            "'s0",
            "s0 // 2",
            "é",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(matches!(parse(&"(".repeat(500)), Err(ExpressionError::Depth(_))));
        assert!(parse(&"s0+".repeat(5000)).is_err());
        assert!(parse("9223372036854775807 + 1").is_err());
    }
}
