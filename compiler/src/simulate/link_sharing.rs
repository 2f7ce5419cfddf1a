//! What is on its way over ports that carry several things at once, and when each arrives.
//!
//! All that goes over a port gets an equal share of it, and goes as fast as the fullest of its ports lets it:
//!
//! ```text
//! rate  =  1 / max over its ports: the number of flows there
//! ```
//!
//! Links between processes and the copy engines of devices come close to that. What a flow leaves of a port because another of its ports
//! is fuller is not given to the others there, so that a start or an end changes only what it shares a port with.
//!
//! A flow whose rate changes arrives at another time. The moment that was posted before then means nothing any more: each change has a
//! number, and a moment of an earlier number is passed over.

use crate::plan::ports::Port;
use crate::schedule::event_queue::EventQueue;

/// A list of ports, by the order in which [`Flows::way`] was told of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkRoute(u32);

/// What is on its way, each carrying a `W` that comes out when it has arrived.
pub struct Flows<W> {
    ways: Vec<Vec<Port>>,
    /// Of each port, which flows it carries.
    ports: Vec<Vec<u32>>,
    flows: Vec<Flow<W>>,
    /// Places of `flows` that are free again.
    free: Vec<u32>,
    arrivals: EventQueue<(u32, u32)>,
}

struct Flow<W> {
    what: W,
    way: LinkRoute,
    /// What takes none is on no port.
    takes_time: bool,
    /// Microseconds that are left of it at full rate, as of `since`.
    left: f64,
    since: f64,
    /// How many the fullest of its ports carries; 0 before it is on its way.
    among: u32,
    /// Counts its changes of rate, and those of whatever had its place before.
    change: u32,
}

impl<W: Copy> Flows<W> {
    /// Nothing on its way, at time 0.
    pub fn new() -> Self {
        Self { ways: Vec::new(), ports: Vec::new(), flows: Vec::new(), free: Vec::new(), arrivals: EventQueue::new() }
    }

    /// Makes a list of ports known.
    pub fn way(&mut self, ports: Vec<Port>) -> LinkRoute {
        let most = ports.iter().map(|&port| port as usize + 1).max().unwrap_or(0);
        self.ports.resize_with(self.ports.len().max(most), Vec::new);
        self.ways.push(ports);
        LinkRoute(self.ways.len() as u32 - 1)
    }

    /// Sends something on its way that takes so many microseconds where nothing else goes.
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

    /// When the next flow may arrive, as the bits of a time.
    pub fn next_time(&self) -> Option<u64> {
        self.arrivals.next_time()
    }

    /// Goes on to that time, and gives what has arrived, if something has.
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

    /// Gives all flows that are on their way over some of these ports the rate that they have from now on.
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

    /// What arrives when, of flows that begin at some times.
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
        // Alone until 2; both at half rate until the second has arrived at 6; alone again.
        assert_eq!(arrivals(&[(0.0, 10.0, &[0, 1]), (2.0, 2.0, &[0, 3])]), [(1, 6.0), (0, 12.0)]);
        // Three into one port: the port is never idle, and what it carries is done in the sum of the times.
        let three: [(f64, f64, &[Port]); 3] = [(0.0, 3.0, &[0, 9]), (0.0, 3.0, &[1, 9]), (0.0, 3.0, &[2, 9])];
        assert_eq!(arrivals(&three), [(0, 9.0), (1, 9.0), (2, 9.0)]);
    }

    #[test]
    fn the_fullest_port_sets_the_rate() {
        // Port 1 carries three, so that flow 0 leaves two thirds of port 0, of which flow 3 takes its half and no more.
        let found = arrivals(&[(0.0, 1.0, &[0, 1]), (0.0, 1.0, &[1]), (0.0, 1.0, &[1]), (0.0, 1.0, &[0])]);
        assert_eq!(found, [(3, 2.0), (0, 3.0), (1, 3.0), (2, 3.0)]);
    }

    #[test]
    fn what_takes_no_time_arrives_at_once() {
        assert_eq!(arrivals(&[(0.0, 4.0, &[0]), (1.0, 0.0, &[0])]), [(1, 1.0), (0, 4.0)]);
    }
}
