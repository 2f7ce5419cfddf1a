//! Transfers that share ports, and their arrival times.
//!
//! All flows on a port get an equal share of it. A flow runs at the rate of its most loaded port:
//!
//! ```text
//! rate  =  1 / max over its ports: the number of flows there
//! ```
//!
//! This approximates links between processes and the copy engines of devices. A share that a flow cannot use, because
//! another of its ports is more loaded, is not given to others. A start or end therefore only affects flows on the same
//! ports.
//!
//! A flow whose rate changes arrives at another time. Its old arrival event becomes stale: each change has a number,
//! and events with an older number are skipped.

use crate::plan::ports::Port;
use crate::schedule::event_queue::EventQueue;

/// A list of ports, registered with [`Flows::way`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkRoute(u32);

/// Transfers in progress; each carries a `W` that is returned on arrival.
pub struct Flows<W> {
    ways: Vec<Vec<Port>>,
    ports: Vec<Vec<u32>>,
    flows: Vec<Flow<W>>,
    free: Vec<u32>,
    arrivals: EventQueue<(u32, u32)>,
}

struct Flow<W> {
    what: W,
    way: LinkRoute,
    /// Zero-length flows use no port.
    takes_time: bool,
    /// Remaining microseconds at full rate, as of `since`.
    left: f64,
    since: f64,
    /// Number of flows on its most loaded port; 0 before it starts.
    among: u32,
    /// Counts rate changes of this entry, including earlier flows.
    change: u32,
}

impl<W: Copy> Flows<W> {
    pub fn new() -> Self {
        Self { ways: Vec::new(), ports: Vec::new(), flows: Vec::new(), free: Vec::new(), arrivals: EventQueue::new() }
    }

    pub fn way(&mut self, ports: Vec<Port>) -> LinkRoute {
        let most = ports.iter().map(|&port| port as usize + 1).max().unwrap_or(0);
        self.ports.resize_with(self.ports.len().max(most), Vec::new);
        self.ways.push(ports);
        LinkRoute(self.ways.len() as u32 - 1)
    }

    /// Starts a transfer that takes `us` microseconds without contention.
    pub fn begin(&mut self, now: f64, us: f64, way: LinkRoute, what: W) {
        let mut flow = Flow { what, way, takes_time: us > 0.0, left: us, since: now, among: 0, change: 0 };
        let at = match self.free.pop() {
            Some(at) => {
                flow.change = self.flows[at as usize].change;
                self.flows[at as usize] = flow;
                at
            }
            None => {
                self.flows.push(flow);
                self.flows.len() as u32 - 1
            }
        };
        if us > 0.0 {
            for &port in &self.ways[way.0 as usize] {
                self.ports[port as usize].push(at);
            }
            self.share_anew(now, way);
        }
        self.pace(now, at);
    }

    /// Time of the next possible arrival, as float bits.
    pub fn next_time(&self) -> Option<u64> {
        self.arrivals.next_time()
    }

    /// Advances to that time; returns the arrived transfer unless the event is stale.
    pub fn take(&mut self) -> Option<W> {
        let (time, (at, change)) = self.arrivals.take()?;
        let flow = &mut self.flows[at as usize];
        if flow.change != change {
            return None;
        }
        flow.change = flow.change.wrapping_add(1);
        let (what, way, takes_time) = (flow.what, flow.way, flow.takes_time);
        self.free.push(at);
        if takes_time {
            for &port in &self.ways[way.0 as usize] {
                self.ports[port as usize].retain(|&other| other != at);
            }
            self.share_anew(f64::from_bits(time), way);
        }
        Some(what)
    }

    fn share_anew(&mut self, now: f64, way: LinkRoute) {
        for place in 0..self.ways[way.0 as usize].len() {
            let port = self.ways[way.0 as usize][place] as usize;
            for other in 0..self.ports[port].len() {
                let at = self.ports[port][other];
                if self.flows[at as usize].among > 0 {
                    self.pace(now, at);
                }
            }
        }
    }

    fn pace(&mut self, now: f64, at: u32) {
        let flow = &mut self.flows[at as usize];
        let fullest = self.ways[flow.way.0 as usize].iter().map(|&port| self.ports[port as usize].len()).max();
        let among = if flow.takes_time { fullest.unwrap_or(1).max(1) as u32 } else { 1 };
        if among != flow.among {
            if flow.among > 0 {
                flow.left = (flow.left - (now - flow.since) / f64::from(flow.among)).max(0.0);
            }
            (flow.since, flow.among) = (now, among);
            flow.change = flow.change.wrapping_add(1);
            self.arrivals.post((now + flow.left * f64::from(among)).to_bits(), (at, flow.change));
        }
    }
}

impl<W: Copy> Default for Flows<W> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrivals(begun: &[(f64, f64, &[Port])]) -> Vec<(usize, f64)> {
        let mut flows = Flows::new();
        let mut left = begun.iter().enumerate().peekable();
        let mut found = Vec::new();
        loop {
            let next = flows.next_time().map(f64::from_bits);
            match left.next_if(|(_, (at, ..))| next.is_none_or(|next| *at < next)) {
                Some((name, &(now, us, ports))) => {
                    let way = flows.way(ports.to_vec());
                    flows.begin(now, us, way, name);
                }
                None => match next {
                    Some(time) => found.extend(flows.take().map(|name| (name, time))),
                    None => return found,
                },
            }
        }
    }

    #[test]
    fn what_shares_no_port_goes_apart() {
        assert_eq!(
            arrivals(&[(0.0, 4.0, &[0, 1]), (1.0, 2.0, &[2, 3]), (5.0, 1.0, &[])]),
            [(1, 3.0), (0, 4.0), (2, 6.0)]
        );
    }

    #[test]
    fn a_port_is_shared_from_moment_to_moment() {
        // Alone until 2; both at half rate until the second arrives at 6; alone again.
        assert_eq!(arrivals(&[(0.0, 10.0, &[0, 1]), (2.0, 2.0, &[0, 3])]), [(1, 6.0), (0, 12.0)]);
        // Three flows into one port: it is never idle and ends after the sum of their times.
        let three: [(f64, f64, &[Port]); 3] = [(0.0, 3.0, &[0, 9]), (0.0, 3.0, &[1, 9]), (0.0, 3.0, &[2, 9])];
        assert_eq!(arrivals(&three), [(0, 9.0), (1, 9.0), (2, 9.0)]);
    }

    #[test]
    fn the_fullest_port_sets_the_rate() {
        // Port 1 has three flows, so flow 0 uses a third of port 0; flow 3 still gets only half of it.
        let found = arrivals(&[(0.0, 1.0, &[0, 1]), (0.0, 1.0, &[1]), (0.0, 1.0, &[1]), (0.0, 1.0, &[0])]);
        assert_eq!(found, [(3, 2.0), (0, 3.0), (1, 3.0), (2, 3.0)]);
    }

    #[test]
    fn what_takes_no_time_arrives_at_once() {
        assert_eq!(arrivals(&[(0.0, 4.0, &[0]), (1.0, 0.0, &[0])]), [(1, 1.0), (0, 4.0)]);
    }
}
