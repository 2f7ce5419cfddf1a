//! The planning flags of `pipec partition` that hold for every plan of a sweep.

use crate::cli::args::plan::PlanArguments;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use compiler::plan::problem::Target;
use compiler::plan::zero::Zero;
use compiler::profile::precision::Precision;
use pipec::costs::PrecisionChoice;
use pipec::plan::request::PlanOptions;
use pipec::plan::tensor_parallel::TensorParallel;
use pipec::plan::zero::ZeroStage;

/// The flags, with names, values and help of [`PlanArguments`].
const NAMES: [&str; 4] = ["tensor", "zero", "precision", "target"];

#[derive(Clone, Debug)]
pub struct SharedPlanArguments {
    /// The tensor-parallel degree.
    pub tensor: TensorParallel,
    /// The ZeRO stage.
    pub zero: ZeroStage,
    /// The precision.
    pub precision: Option<Precision>,
    /// The target framework.
    pub target: Option<Target>,
}

impl SharedPlanArguments {
    /// Sets these options.
    pub fn apply(&self, options: PlanOptions) -> PlanOptions {
        PlanOptions {
            tensor_parallel: Some(self.tensor),
            zero: Some(self.zero),
            precision: self.precision.map_or(PrecisionChoice::Usual, PrecisionChoice::Given),
            target: self.target,
            ..options
        }
    }
}

impl Args for SharedPlanArguments {
    fn augment_args(command: Command) -> Command {
        let plan_command = PlanArguments::augment_args(Command::new("plan"));
        let shared = plan_command.get_arguments().filter(|flag| NAMES.contains(&flag.get_id().as_str()));
        command.args(shared.cloned())
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SharedPlanArguments {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(SharedPlanArguments {
            tensor: matches.get_one("tensor").copied().unwrap_or_default(),
            zero: matches.get_one("zero").copied().unwrap_or(ZeroStage::Given(Zero::default())),
            precision: matches.get_one("precision").copied(),
            target: matches.get_one("target").and_then(|name: &String| Target::from_name(name)),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_those_of_partition() {
        let parse = |line: &str| {
            let command = SharedPlanArguments::augment_args(Command::new("sweep"));
            let matches = command.try_get_matches_from(format!("sweep {line}").split_whitespace())?;
            SharedPlanArguments::from_arg_matches(&matches)
        };
        let arguments = parse("--tensor 8 --zero 1 --precision bf16 --target megatron").unwrap();
        assert_eq!(
            (arguments.tensor, arguments.zero),
            (TensorParallel::Degree(8), ZeroStage::Given(Zero::over_all(1)))
        );
        assert_eq!((arguments.precision, arguments.target), (Some(Precision::Bf16), Some(Target::Megatron)));
        let defaults = parse("").unwrap();
        assert_eq!((defaults.tensor, defaults.zero), (TensorParallel::Never, ZeroStage::Given(Zero::default())));
        assert_eq!((defaults.precision, defaults.target), (None, None));
        assert!(parse("--tensor 99").is_err() && parse("--zero 4").is_err());
    }
}
