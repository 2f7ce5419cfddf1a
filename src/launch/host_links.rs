//! Measures the links between the hosts of a cluster file, with one process on each host.

use crate::error::Error;
use crate::events::EventSink;
use crate::launch::role::{ProcessRequest, ProcessRole};
use compiler::cluster::write::to_toml;
use compiler::cluster::{BytesPerSecond, Cluster, Seconds};
use compiler::plan::links::Wire;
use profiler::host_links::{HostLink, measure, pairs};
use runtime::process::handshake::RunInput;
use runtime::process::meeting::Notice;
use runtime::process::run_status::RunStatus;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The measured links of a cluster.
pub struct HostLinks {
    /// The cluster with the measured values.
    pub cluster: Cluster,
    /// Levels with measured values.
    pub levels: BTreeSet<usize>,
    /// Every measured direction of a link between two hosts.
    pub links: Vec<HostLink>,
}

/// Measures the links between the hosts, which all call this. Only the first host gets the results.
pub fn between_hosts(
    request: &ProcessRequest,
    cluster: &Cluster,
    events: &dyn EventSink,
) -> Result<Option<HostLinks>, Error> {
    let ProcessRole::Member(member) = ProcessRole::find(request)? else {
        return Err(Error::bug("a host of a cluster file has no number"));
    };
    let hosts = cluster.hosts.len();
    let names = cluster.hosts.iter().enumerate().map(|(at, host)| format!("host {at} ({})", host.address)).collect();
    let mut lines: BTreeSet<(usize, usize)> = (1..hosts).map(|host| (0, host)).collect();
    lines.extend(pairs(hosts));
    let digest = Sha256::digest(to_toml(cluster).as_bytes());
    let inputs = vec![("the cluster files".to_string(), RunInput::Digest(digest.into()))];
    let notice = |notice| match notice {
        Notice::Waits(whom) => events.note(&whom),
        Notice::SentAway(whom) => events.warn(&whom),
    };
    let run_status = Arc::new(RunStatus::default());
    let mut connected = member.connect(request, (names, &lines, inputs), &run_status, &notice)?;
    let links = measure(&mut connected.connections, member.number(), hosts).map_err(|lost| {
        let host = &connected.names[lost.process];
        Error::negative("cannot measure the links between the hosts").because(format!("{host}: {}", lost.fault))
    })?;
    match member.number() {
        0 => Ok(Some(assign_links(cluster, links))),
        _ => Ok(None),
    }
}

/// Gives every level the slowest of its links.
fn assign_links(cluster: &Cluster, links: Vec<HostLink>) -> HostLinks {
    let mut measured = cluster.clone();
    let mut levels = BTreeSet::new();
    for link in &links {
        let Some(at) = level(cluster, link.from, link.to) else { continue };
        let (slowest, is_first) = (&mut measured.levels[at], levels.insert(at));
        if is_first || link.bytes_per_s < slowest.bandwidth.0 {
            slowest.bandwidth = BytesPerSecond(link.bytes_per_s);
        }
        if is_first || link.seconds > slowest.latency.0 {
            slowest.latency = Seconds(link.seconds);
        }
    }
    HostLinks { cluster: measured, levels, links }
}

/// The level at which the first devices of two hosts are connected.
fn level(cluster: &Cluster, left: usize, right: usize) -> Option<usize> {
    let first = |host: usize| cluster.hosts[..host].iter().map(|host| host.devices).sum::<u32>();
    Wire::between(&cluster.levels, [first(left), first(right)].into_iter()).map(|wire| wire.level)
}

/// True if this level connects devices of one host only, so this machine can measure it alone.
pub fn is_inside_hosts(cluster: &Cluster, at: usize) -> bool {
    (0..cluster.hosts.len()).all(|left| (0..left).all(|right| level(cluster, left, right) != Some(at)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::cluster::read::from_toml;

    #[test]
    fn each_level_gets_its_slowest_link() {
        let text = "schema = \"pipec.cluster/1\"\n[device]\nkind = \"cpu\"\n\
            [[level]]\nname = \"host\"\ncount = 2\nbandwidth = \"9GB/s\"\n\
            [[level]]\nname = \"rack\"\ncount = 2\nbandwidth = \"2GB/s\"\n\
            [[level]]\nname = \"room\"\ncount = 2\nbandwidth = \"1GB/s\"\n";
        let hosts: String = (0..4).map(|at| format!("[[host]]\naddress = \"h{at}:1\"\ndevices = 2\n")).collect();
        let cluster = from_toml(&format!("{text}{hosts}")).unwrap();
        let link = |from, to, bytes_per_s| HostLink { from, to, bytes_per_s, seconds: 1.0 / bytes_per_s };
        let HostLinks { cluster, levels, .. } =
            assign_links(&cluster, vec![link(0, 1, 5e8), link(1, 0, 4e8), link(0, 2, 1e8), link(3, 1, 3e9)]);
        let rates: Vec<f64> = cluster.levels.iter().map(|level| level.bandwidth.0).collect();
        assert_eq!((rates, levels), (vec![9e9, 4e8, 1e8], BTreeSet::from([1, 2])));
        assert_eq!(cluster.levels[2].latency.0, 1e-8);
        assert_eq!([0, 1, 2].map(|at| is_inside_hosts(&cluster, at)), [true, false, false]);
    }
}
