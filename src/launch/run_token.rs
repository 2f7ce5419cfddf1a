//! The token that the processes of a run share: from a file, from the environment, or made for processes that are
//! started here.

use crate::error::Error;
use crate::files::input;
use crate::help;
use crate::launch::role::ProcessRequest;
use runtime::process::authentication::{RunToken, SHORTEST_TOKEN};
use runtime::process::run_status::LinkError;
use std::net::ToSocketAddrs;

/// The variable with the token. A command line would show it to every user of the machine.
pub const VARIABLE: &str = "PIPEC_RUN_TOKEN";

/// Maximum size of a token file in bytes.
const MOST_BYTES: u64 = 1 << 12;

/// The token of a request, or none. A file has precedence over the environment.
pub fn find_token(request: &ProcessRequest) -> Result<RunToken, Error> {
    let too_short = || {
        let help = format!("make one with `openssl rand -hex 32`: it needs at least {SHORTEST_TOKEN} characters");
        Error::input("the run token is too short").with_help(help)
    };
    if let Some(path) = &request.token_file {
        let text = input::text(path, MOST_BYTES)?;
        return RunToken::of(&text).ok_or_else(|| too_short().because(format!("it is in {}", path.display())));
    }
    match request.environment.get(VARIABLE).filter(|text| !text.is_empty()) {
        Some(text) => {
            RunToken::of(text).ok_or_else(|| too_short().because(format!("it is in the variable {VARIABLE}")))
        }
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

/// Refuses hosts of which this one has only a loopback address, if the others must reach it from elsewhere.
pub fn check_reachable(hosts: &[&str], own_host: usize) -> Result<(), Error> {
    let is_local = |address: &str| {
        address
            .to_socket_addrs()
            .ok()
            .map(|mut addresses| addresses.all(|address| address.ip().to_canonical().is_loopback()))
    };
    let Some(address) = hosts.get(own_host).filter(|address| is_local(address) == Some(true)) else { return Ok(()) };
    match hosts.iter().any(|host| is_local(host) == Some(false)) {
        false => Ok(()),
        true => Err(Error::input(format!("other hosts cannot reach {address}"))
            .because("it is a loopback address on this machine")
            .with_help("write an address of the network between the hosts, for example 10.0.0.1:29500")),
    }
}

#[cfg(test)]
mod tests {
    use super::check_reachable;

    #[test]
    fn a_loopback_address_is_for_hosts_on_one_machine() {
        assert!(check_reachable(&["127.0.0.1:1", "127.0.0.1:2"], 1).is_ok());
        assert!(check_reachable(&["192.0.2.1:1", "192.0.2.2:2"], 1).is_ok());
        assert!(check_reachable(&["192.0.2.1:1", "127.0.1.1:2"], 0).is_ok());
        let refused = check_reachable(&["192.0.2.1:1", "127.0.1.1:2"], 1).unwrap_err();
        assert!(refused.to_string().contains("other hosts cannot reach 127.0.1.1:2"), "{refused}");
    }
}
