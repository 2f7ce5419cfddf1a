//! Links between the devices of connected processes (NCCL): how processes agree on them.
//!
//! With `--nccl`, every process offers its device to all that it is connected to. Two that exchange tensors open a link in
//! each direction. The lower-numbered makes the ids. All open the links of pairs in the same order, so nobody waits for
//! ever.

use crate::device::api::Device;
use crate::device::error::DeviceError;
use crate::device::tensor_link::{LinkEnd, TensorLink, Transport};
use crate::process::fields::Fields;
use crate::process::frame::{FrameError, Kind};
use crate::process::process_group::Group;
use crate::process::run_status::{LinkError, abort};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The links to a process.
#[derive(Clone)]
pub struct TensorLinks {
    pub outgoing: Arc<dyn TensorLink>,
    pub incoming: Arc<dyn TensorLink>,
}

/// What a process offers to another: its device's identity, and ids of links to and from it. Empty for a process
/// that it exchanges no tensors with.
#[derive(Debug, Default, PartialEq, Eq)]
struct Offer {
    identity: Vec<u8>,
    ids: [Vec<u8>; 2],
}

impl Offer {
    fn encode(&self) -> Vec<u8> {
        let mut content = Vec::new();
        for part in [&self.identity, &self.ids[0], &self.ids[1]] {
            content.extend((part.len() as u32).to_le_bytes());
            content.extend(part);
        }
        content
    }

    fn decode(content: &[u8]) -> Result<Offer, FrameError> {
        let mut fields = Fields::of(content);
        let mut part = || {
            let bytes = fields.u32("the length of an offer")? as usize;
            fields.bytes(bytes, "an offer").map(<[u8]>::to_vec)
        };
        let offer = Offer { identity: part()?, ids: [part()?, part()?] };
        fields.end()?;
        Ok(offer)
    }
}

/// The transport of a process, or why it has none. A process without workers needs none.
pub type Offered = Result<Option<Arc<dyn Transport>>, String>;

/// The transport of a process whose workers share one device.
pub fn transport(devices: &[Arc<dyn Device>], workers: impl Iterator<Item = usize>) -> Offered {
    let mut own = workers.filter_map(|worker| devices.get(worker % devices.len().max(1)));
    let Some(first) = own.next() else { return Ok(None) };
    if !own.all(|other| Arc::ptr_eq(first, other)) {
        return Err("`--nccl` requires one GPU for each process, but this one has several".to_string());
    }
    first
        .transport()
        .map(Some)
        .ok_or_else(|| format!("`--nccl` requires a GPU and NCCL 2.7 or later: {}", first.info().name))
}

/// Opens the links of this process; none if the run did not ask for them. A process that cannot ends the run.
pub fn connect(group: &mut Group, offered: Option<Offered>) -> Result<BTreeMap<usize, TensorLinks>, LinkError> {
    let (own, peer) = (group.part.own, group.names[group.part.own].clone());
    let opened = match offered {
        None => return Ok(BTreeMap::new()),
        Some(Ok(transport)) => open(group, transport.as_deref()),
        Some(Err(what)) => Err(LinkError::Failed { process: own, peer: peer.clone(), what }),
    };
    if let Err(LinkError::Failed { process, what, .. }) = &opened
        && *process == own
    {
        let end = abort(&LinkError::Reported { process: Some(own), peer, doing: None, what: what.clone() });
        // A peer may have ended already.
        group.talks.values_mut().for_each(|talk| drop(talk.say(end.kind, &end.head)));
    }
    opened
}

fn open(group: &mut Group, transport: Option<&dyn Transport>) -> Result<BTreeMap<usize, TensorLinks>, LinkError> {
    let own = group.part.own;
    let (names, lines) = (group.names.clone(), group.lines.clone());
    let exchanges = |process: usize| lines.contains(&(own.min(process), own.max(process)));
    let failed = |process: usize, what: String| LinkError::Failed { process, peer: names[process].clone(), what };
    let lost = |process: usize, fault| LinkError::Lost { process, peer: names[process].clone(), doing: None, fault };
    let here = |fault: DeviceError| failed(own, fault.to_string());
    let mut own_offers = BTreeMap::new();
    for (&process, talk) in &mut group.talks {
        let offer = match transport.filter(|_| exchanges(process)) {
            Some(transport) if own < process => Offer {
                identity: transport.identity(),
                ids: [transport.new_id().map_err(here)?, transport.new_id().map_err(here)?],
            },
            Some(transport) => Offer { identity: transport.identity(), ids: Default::default() },
            None => Offer::default(),
        };
        talk.say(Kind::Devices, &offer.encode()).map_err(|fault| lost(process, fault))?;
        own_offers.insert(process, offer);
    }
    let mut links = BTreeMap::new();
    for (&process, talk) in &mut group.talks {
        let content = talk.expect(Kind::Devices).map_err(|fault| lost(process, fault))?;
        let content = content.map_err(|what| failed(process, what))?;
        let offers = [&own_offers[&process], &Offer::decode(&content).map_err(|fault| lost(process, fault))?];
        let Some(transport) = transport else { continue };
        if offers.iter().any(|offer| offer.identity.is_empty()) {
            continue;
        }
        if offers[0].identity == offers[1].identity {
            let what = format!("`--nccl` requires a GPU for each process, but {} has the same one", names[process]);
            return Err(failed(own, what));
        }
        let (ids, ends) = match own < process {
            true => (&offers[0].ids, [LinkEnd::Sending, LinkEnd::Receiving]),
            false => (&offers[1].ids, [LinkEnd::Receiving, LinkEnd::Sending]),
        };
        let first = transport.open(&ids[0], ends[0]).map_err(here)?;
        let second = transport.open(&ids[1], ends[1]).map_err(here)?;
        let (outgoing, incoming) = if own < process { (first, second) } else { (second, first) };
        links.insert(process, TensorLinks { outgoing, incoming });
    }
    Ok(links)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_read_back() {
        let offer = Offer { identity: vec![1, 2], ids: [vec![3], Vec::new()] };
        let bytes = offer.encode();
        assert_eq!(Offer::decode(&bytes), Ok(offer));
        assert!((0..bytes.len()).all(|length| Offer::decode(&bytes[..length]).is_err()));
        assert_eq!(Offer::decode(&Offer::default().encode()), Ok(Offer::default()));
    }
}
