//! Model options: named numbers, fractions and booleans, each with a default and a range.
//!
//! Each model's file lists its options next to the code that reads them; the zoo collects the lists:
//!
//! ```
//! use models::choice::{Choice, Given, Setting};
//! const CHOICES: &[Choice] = &[
//!     Choice::number("layers", 2, 1, 10_000, "number of blocks"),
//!     Choice::fraction("dropout", 0.1, "dropout rate"),
//! ];
//! let given = Given::new("tiny", CHOICES, &[("layers".to_string(), Setting::Number(3))].into()).unwrap();
//! assert_eq!((given.number("layers"), given.fraction("dropout")), (3, 0.1));
//! assert!(given.is_set("layers") && !given.is_set("dropout"));
//! ```

use std::collections::BTreeMap;
use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Setting {
    Number(usize),
    /// In [0, 1).
    Fraction(f64),
    Truth(bool),
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Setting::Number(value) => value.fmt(f),
            Setting::Fraction(value) => value.fmt(f),
            Setting::Truth(value) => value.fmt(f),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    pub name: &'static str,
    /// The default, which also determines the type.
    pub usual: Setting,
    /// Minimum; numbers only.
    pub least: usize,
    /// Maximum; numbers only. It catches typing errors and keeps sizes computable.
    pub most: usize,
    pub about: &'static str,
}

impl Choice {
    pub const fn number(name: &'static str, usual: usize, least: usize, most: usize, about: &'static str) -> Self {
        Self { name, usual: Setting::Number(usual), least, most, about }
    }

    /// A number from 1 to a million, for widths and vocabularies.
    pub const fn width(name: &'static str, usual: usize, about: &'static str) -> Self {
        Self::number(name, usual, 1, 1_000_000, about)
    }

    /// A number in [0, 1).
    pub const fn fraction(name: &'static str, usual: f64, about: &'static str) -> Self {
        Self { name, usual: Setting::Fraction(usual), least: 0, most: 0, about }
    }

    pub const fn truth(name: &'static str, usual: bool, about: &'static str) -> Self {
        Self { name, usual: Setting::Truth(usual), least: 0, most: 0, about }
    }

    pub fn read(&self, text: &str) -> Result<Setting, String> {
        match self.usual {
            Setting::Number(_) => text.parse().map(Setting::Number).map_err(|_| "write an integer".to_string()),
            Setting::Fraction(_) => text.parse().map(Setting::Fraction).map_err(|_| "write a number".to_string()),
            Setting::Truth(_) => text.parse().map(Setting::Truth).map_err(|_| "write true or false".to_string()),
        }
    }

    fn allows(&self, setting: Setting) -> Result<(), String> {
        match (self.usual, setting) {
            (Setting::Number(_), Setting::Number(value)) if value < self.least => {
                Err(format!("it must be at least {}", self.least))
            }
            (Setting::Number(_), Setting::Number(value)) if value > self.most => {
                Err(format!("it must be at most {}", self.most))
            }
            (Setting::Fraction(_), Setting::Fraction(value)) if !(0.0..1.0).contains(&value) => {
                Err("it must be at least 0 and below 1".to_string())
            }
            (Setting::Number(_), Setting::Number(_))
            | (Setting::Fraction(_), Setting::Fraction(_))
            | (Setting::Truth(_), Setting::Truth(_)) => Ok(()),
            (usual, _) => Err(format!("it has another type than {usual}, its default")),
        }
    }
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ChoiceError {
    #[error("`{model}` has no option `{}`; it has {}", option.escape_default(), list(choices))]
    Unknown { model: &'static str, option: String, choices: &'static [Choice] },
    #[error("`{option}` of `{model}` cannot be {value}: {why}")]
    Value { model: &'static str, option: &'static str, value: Setting, why: String },
}

fn list(choices: &[Choice]) -> String {
    choices.iter().map(|choice| format!("`{}`", choice.name)).collect::<Vec<_>>().join(", ")
}

#[derive(Debug, Clone, PartialEq)]
pub struct Given {
    model: &'static str,
    choices: &'static [Choice],
    settings: BTreeMap<String, Setting>,
}

impl Given {
    /// Validates `settings`; other options have their defaults.
    pub fn new(
        model: &'static str,
        choices: &'static [Choice],
        settings: &BTreeMap<String, Setting>,
    ) -> Result<Self, ChoiceError> {
        for (option, &value) in settings {
            let choice = choices.iter().find(|choice| choice.name == option);
            let choice = choice.ok_or_else(|| ChoiceError::Unknown { model, option: option.clone(), choices })?;
            choice.allows(value).map_err(|why| ChoiceError::Value { model, option: choice.name, value, why })?;
        }
        Ok(Self { model, choices, settings: settings.clone() })
    }

    /// True if the option was given explicitly.
    pub fn is_set(&self, name: &str) -> bool {
        self.settings.contains_key(name)
    }

    /// The value of a number. `name` must be a number option of the model.
    pub fn number(&self, name: &str) -> usize {
        match self.setting(name) {
            Some(Setting::Number(value)) => value,
            _ => unreachable!("`{}` has no number option `{name}`", self.model),
        }
    }

    /// The value of a fraction. `name` must be a fraction option of the model.
    pub fn fraction(&self, name: &str) -> f64 {
        match self.setting(name) {
            Some(Setting::Fraction(value)) => value,
            _ => unreachable!("`{}` has no fraction option `{name}`", self.model),
        }
    }

    /// The value of a boolean. `name` must be a boolean option of the model.
    pub fn truth(&self, name: &str) -> bool {
        match self.setting(name) {
            Some(Setting::Truth(value)) => value,
            _ => unreachable!("`{}` has no boolean option `{name}`", self.model),
        }
    }

    /// An error for a number that is incompatible with other options.
    pub fn refuse(&self, option: &'static str, why: impl Into<String>) -> ChoiceError {
        let value = Setting::Number(self.number(option));
        ChoiceError::Value { model: self.model, option, value, why: why.into() }
    }

    /// An error unless `option` divides `multiple`.
    pub fn divides(&self, option: &'static str, multiple: &'static str) -> Result<(), ChoiceError> {
        match self.number(multiple).is_multiple_of(self.number(option)) {
            true => Ok(()),
            false => Err(self.refuse(option, format!("`{multiple}` must be a multiple of it"))),
        }
    }

    fn setting(&self, name: &str) -> Option<Setting> {
        let usual = || self.choices.iter().find(|choice| choice.name == name).map(|choice| choice.usual);
        self.settings.get(name).copied().or_else(usual)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHOICES: &[Choice] = &[
        Choice::number("size", 8, 4, 64, "height and width"),
        Choice::number("half", 4, 1, 64, "part of the size"),
        Choice::fraction("dropout", 0.5, "dropout rate"),
        Choice::truth("tied", true, "whether weights are shared"),
    ];

    fn given(settings: &[(&str, Setting)]) -> Result<Given, ChoiceError> {
        let settings = settings.iter().map(|(name, value)| ((*name).to_string(), *value)).collect();
        Given::new("model", CHOICES, &settings)
    }

    #[test]
    fn what_is_not_said_is_usual() {
        let given = given(&[("tied", Setting::Truth(false))]).unwrap();
        assert_eq!((given.number("size"), given.fraction("dropout"), given.truth("tied")), (8, 0.5, false));
        assert!(given.is_set("tied") && !given.is_set("size"));
    }

    #[test]
    fn values_are_read_as_their_kind() {
        assert_eq!(CHOICES[0].read("12"), Ok(Setting::Number(12)));
        assert_eq!(CHOICES[2].read("0.25"), Ok(Setting::Fraction(0.25)));
        assert_eq!(CHOICES[3].read("true"), Ok(Setting::Truth(true)));
        assert!(CHOICES[0].read("-1").is_err() && CHOICES[3].read("1").is_err());
    }

    #[test]
    fn what_is_out_of_bounds_is_refused() {
        let error_of = |name, value| given(&[(name, value)]).unwrap_err().to_string();
        assert_eq!(error_of("size", Setting::Number(65)), "`size` of `model` cannot be 65: it must be at most 64");
        assert_eq!(error_of("size", Setting::Number(0)), "`size` of `model` cannot be 0: it must be at least 4");
        assert!(error_of("dropout", Setting::Fraction(f64::NAN)).contains("below 1"));
        assert!(error_of("dropout", Setting::Number(1)).contains("another type"));
        assert!(error_of("depth", Setting::Number(1)).contains("it has `size`, `half`, `dropout`, `tied`"));
        let odd = given(&[("half", Setting::Number(3))]).unwrap();
        assert!(odd.divides("half", "size").unwrap_err().to_string().contains("`size` must be a multiple of it"));
    }
}
