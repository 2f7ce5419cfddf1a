//! The token that the processes of a run share: from a file, from the environment, or made for processes that are
//! started here.

use crate::error::Error;
use crate::files::input;
use crate::help;
use crate::launch::role::ProcessRequest;
use runtime::process::authentication::{RunToken, SHORTEST_TOKEN};
use runtime::process::run_status::LinkError;

/// The variable with the token. A command line would show it to every user of the machine.
pub const VARIABLE: &str = "PIPEC_RUN_TOKEN";

/// Maximum size of a token file in bytes.
const MOST_BYTES: u64 = 1 << 12;

/// The token of a request, or none. A file has precedence over the environment.
pub fn given(request: &ProcessRequest) -> Result<RunToken, Error> {
    let short = || {
        let help = format!("make one with `openssl rand -hex 32`: it needs at least {SHORTEST_TOKEN} characters");
        Error::input("the run token is too short").with_help(help)
    };
    if let Some(path) = &request.token_file {
        let text = input::text(path, MOST_BYTES)?;
        return RunToken::of(&text).ok_or_else(|| short().because(format!("it is in {}", path.display())));
    }
    match request.environment.get(VARIABLE).filter(|text| !text.is_empty()) {
        Some(text) => RunToken::of(text).ok_or_else(|| short().because(format!("it is in the variable {VARIABLE}"))),
        None => Ok(RunToken::default()),
    }
}

/// Refuses addresses that other machines can reach if there is no token.
pub fn check(token: &RunToken, addresses: &[&str]) -> Result<(), Error> {
    let Some(address) = token.exposed(addresses.iter().copied()) else { return Ok(()) };
    let exposed = LinkError::Exposed { address: address.to_string() };
    let failure = Error::input("the processes of the run cannot connect").because(&exposed);
    Err(help::link(&exposed).into_iter().fold(failure, Error::with_help))
}
