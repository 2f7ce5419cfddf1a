//! Parses, validates and prints `profile.json`.

use crate::profile::cost_graph::MAX_US;
use crate::profile::json::{self, JsonError};
use crate::profile::{Profile, SCHEMA};

/// Reasons why a profile is rejected.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProfileError {
    #[error(transparent)]
    Json(#[from] JsonError),
    /// Unsupported schema version.
    #[error("schema is `{found}`, expected `{SCHEMA}`")]
    Schema { found: String },
    /// The ids are not 0, 1, 2 ….
    #[error("ops[{index}] has id {found}; ids must be 0, 1, 2 … in order")]
    Id { index: usize, found: u32 },
    /// `model.ops` differs from the number of ops.
    #[error("model.ops is {stated}, the file lists {listed} ops")]
    Count { stated: u64, listed: usize },
    /// `weight_grad_us` exceeds `bwd_us`.
    #[error("{place}: `weight_grad_us` is {weight_grad_us}, but must not exceed `bwd_us`, which is {bwd_us}")]
    Part {
        /// For example `ops[3] (conv1)`.
        place: String,
        weight_grad_us: f64,
        bwd_us: f64,
    },
    /// No op takes any time.
    #[error("all times are 0, so nothing was measured; profile the model anew")]
    NoTime,
    #[error("`settings.workers` is 0; it must be at least 1")]
    Workers,
    /// A range whose end is below its start.
    #[error("whole: `range_us` is {low} to {high}; the second must not be less than the first")]
    Range { low: f64, high: f64 },
    /// A time or fraction is negative, not a number, or too large.
    #[error("{place}: `{field}` is {value}; it must be from 0 to {MAX_US:e}")]
    Figure {
        /// `ops[3] (conv1)` or `whole`.
        place: String,
        field: &'static str,
        value: f64,
    },
}

/// Parses and validates a profile.
pub fn from_json(text: &str) -> Result<Profile, ProfileError> {
    let profile: Profile = json::read(text)?;
    check(&profile)?;
    Ok(profile)
}

/// Prints a profile; fails if it is invalid, so that every written file can be read.
pub fn to_json(profile: &Profile) -> Result<String, ProfileError> {
    check(profile)?;
    Ok(json::print(profile)?)
}

/// JSON Schema of the file.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(Profile).to_value()
}

/// Validates a profile.
pub fn check(profile: &Profile) -> Result<(), ProfileError> {
    if profile.schema != SCHEMA {
        let found = profile.schema.chars().take(40).map(|c| if c.is_control() { '?' } else { c }).collect();
        return Err(ProfileError::Schema { found });
    }
    if profile.model.ops != profile.ops.len() as u64 {
        return Err(ProfileError::Count { stated: profile.model.ops, listed: profile.ops.len() });
    }
    for (index, op) in profile.ops.iter().enumerate() {
        if op.id as usize != index {
            return Err(ProfileError::Id { index, found: op.id });
        }
        let place = || format!("ops[{index}] ({})", op.name.escape_debug());
        for (field, value) in [("fwd_us", op.fwd_us), ("bwd_us", op.bwd_us), ("spread", op.spread)] {
            check_range(place, field, value)?;
        }
        if let Some(update_us) = op.update_us {
            check_range(place, "update_us", update_us)?;
        }
        if let Some(weight_grad_us) = op.weight_grad_us {
            check_range(place, "weight_grad_us", weight_grad_us)?;
            if weight_grad_us > op.bwd_us {
                return Err(ProfileError::Part { place: place(), weight_grad_us, bwd_us: op.bwd_us });
            }
        }
    }
    let is_timeless = profile.ops.iter().all(|op| op.fwd_us == 0.0 && op.bwd_us == 0.0);
    if is_timeless && profile.ops.iter().any(|op| op.flops > 0) {
        return Err(ProfileError::NoTime);
    }
    if profile.settings.workers == 0 {
        return Err(ProfileError::Workers);
    }
    if let Some(whole) = &profile.whole {
        check_range(|| "whole".to_string(), "fwd_us", whole.fwd_us)?;
        check_range(|| "whole".to_string(), "bwd_us", whole.bwd_us)?;
        if let Some([low, high]) = whole.range_us {
            [low, high].into_iter().try_for_each(|value| check_range(|| "whole".to_string(), "range_us", value))?;
            if low > high {
                return Err(ProfileError::Range { low, high });
            }
        }
    }
    Ok(())
}

fn check_range(place: impl Fn() -> String, field: &'static str, value: f64) -> Result<(), ProfileError> {
    if (0.0..=MAX_US).contains(&value) { Ok(()) } else { Err(ProfileError::Figure { place: place(), field, value }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Whole;

    const FILE: &str = r#"{"schema":"pipec.profile/1","model":{"file":"m.onnx","sha256":"00","ops":1},
        "device":{"name":"cpu","driver":"","memory_bytes":1},
        "settings":{"dtype":"f32","micro_batch":8,"warmup":1,"runs":3,"seed":0},"method":"measured",
        "ops":[{"id":0,"name":"a","module":"","op":"relu","fwd_us":1.5,"bwd_us":2.0,"spread":0.1,"param_bytes":0,
        "saved_bytes":4,"out_bytes":4,"workspace_bytes":0,"flops":1,"source":"measured"}],"whole":{"fwd_us":1,"bwd_us":2}}"#;

    #[test]
    fn round_trip() {
        let profile = from_json(FILE).unwrap();
        let text = to_json(&profile).unwrap();
        assert_eq!(from_json(&text).unwrap(), profile);
        assert_eq!((profile.sum().bwd_us, profile.weight_grad_us()), (2.0, None));
    }

    #[test]
    fn an_interval_is_that_of_the_runs_and_of_the_model() {
        let interval = |range: &str| {
            let file = FILE.replace("\"bwd_us\":2}", &format!("\"bwd_us\":2{range}}}"));
            from_json(&file).unwrap().whole.unwrap().interval()
        };
        assert_eq!(interval(""), None);
        assert_eq!(interval(",\"range_us\":[2.7,3.6]"), Some([0.72, 1.44]));
        assert_eq!(interval(",\"range_us\":[3.1,3.6]"), Some([0.8, 1.44]));
        let tiny = Whole { fwd_us: 1e-310, bwd_us: 0.0, range_us: Some([0.0, 1.0]) };
        assert_eq!(tiny.interval(), None);
    }

    #[test]
    fn the_part_of_weights_is_optional() {
        assert!(!to_json(&from_json(FILE).unwrap()).unwrap().contains("weight_grad_us"));
        let profile = from_json(&FILE.replace("\"bwd_us\":2.0", "\"bwd_us\":2.0,\"weight_grad_us\":0.5")).unwrap();
        assert_eq!((profile.ops[0].weight_grad_us, profile.weight_grad_us()), (Some(0.5), Some(0.5)));
        assert_eq!(from_json(&to_json(&profile).unwrap()).unwrap(), profile);
    }

    #[test]
    fn refuses_wrong_figures() {
        let error = |from: &str, to: &str| from_json(&FILE.replace(from, to)).unwrap_err().to_string();
        assert!(error("\"fwd_us\":1.5", "\"fwd_us\":-1").contains("ops[0] (a): `fwd_us`"));
        let weights = |us: &str| error("\"bwd_us\":2.0", &format!("\"bwd_us\":2.0,\"weight_grad_us\":{us}"));
        assert!(weights("-1").contains("ops[0] (a): `weight_grad_us`"));
        assert!(weights("2.5").contains("`weight_grad_us` is 2.5, but must not exceed `bwd_us`, which is 2"));
        let timeless = FILE.replace("\"fwd_us\":1.5,\"bwd_us\":2.0", "\"fwd_us\":0,\"bwd_us\":0");
        assert_eq!(from_json(&timeless), Err(ProfileError::NoTime));
        assert!(error("\"id\":0", "\"id\":7").contains("id 7"));
        assert!(error("\"seed\":0", "\"seed\":0,\"workers\":0").contains("`settings.workers` is 0"));
        assert!(error("\"bwd_us\":2}", "\"bwd_us\":2,\"range_us\":[4,3]}").contains("is 4 to 3"));
        assert!(error("\"bwd_us\":2}", "\"bwd_us\":2,\"range_us\":[-1,3]}").contains("whole: `range_us`"));
        assert!(error("\"ops\":1}", "\"ops\":2}").contains("lists 1"));
        assert!(error("\"id\":0,", "\"id\":0,\"id\":0,").contains("duplicate"));
        assert!(error("\"flops\"", "\"flaps\"").contains("flaps"));
        assert!(error("\"fwd_us\":1.5", "\"fwd_us\":NaN").contains("line 4"));
        assert!(error("\"param_bytes\":0", "\"param_bytes\":-1").contains("ops[0].param_bytes"));
    }
}
