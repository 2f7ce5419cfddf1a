//! Non-contiguous placement: simulated annealing from a known placement (Kirkpatrick, Gelatt and Vecchi 1983).
//!
//! A move puts a unit, or a connected part of a device, on another device, or swaps two units. The energy is the p-norm
//! of the device loads with a high power: unlike the maximum, it tells which of two equally loaded devices is easier to
//! relieve. The placement with the smallest maximum load is kept. Random numbers come from a fixed seed.

use crate::placement::units::Units;

/// Exponent of the energy; high, so that the largest load dominates, but other loads still count.
const POWER: i32 = 12;

const TURNS: (usize, usize) = (6_000, 3_000_000);

const STARTS: u64 = 3;

/// Initial temperature, relative to the initial energy.
const HEAT: f64 = 0.02;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Accelerators, the first devices.
    pub devices: usize,
    /// Hosts, the other devices.
    pub hosts: usize,
    /// Bytes per accelerator.
    pub bytes: f64,
}

impl Limits {
    fn total(&self) -> usize {
        self.devices + self.hosts
    }

    fn is_host(&self, device: u32) -> bool {
        device as usize >= self.devices
    }
}

/// Returns a placement (device of each unit) that is at least as good as `start`.
pub fn anywhere(units: &Units, start: &[u32], limits: Limits, seed: u64) -> Vec<u32> {
    let initial = State::new(units, start.to_vec(), limits);
    let mut best = (initial.max_load(), start.to_vec());
    if units.len() < 2 || limits.total() < 2 {
        return best.1;
    }
    let turns = (TURNS.0 * units.len()).min(TURNS.1 / STARTS as usize);
    for start in 0..STARTS {
        let mut numbers = Numbers(seed ^ (start + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut state = State::new(units, best.1.clone(), limits);
        let scale = state.energy().max(f64::MIN_POSITIVE);
        let mut energy = 1.0;
        let mut moves = Vec::new();
        for turn in 0..turns {
            let heat = HEAT * (1.0 - turn as f64 / turns as f64).powi(3);
            state.propose(&mut numbers, &mut moves);
            if moves.is_empty() {
                continue;
            }
            let next = state.energy() / scale;
            let is_accepted =
                state.is_feasible() && (next <= energy || numbers.fraction() < ((energy - next) / heat).exp());
            if !is_accepted {
                state.undo(&moves);
                continue;
            }
            energy = next;
            let worst = state.max_load();
            if worst < best.0 {
                best = (worst, state.device_of.clone());
            }
        }
    }
    best.1
}

struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = if self.0 == 0 { 1 } else { self.0 };
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, count: usize) -> usize {
        ((u128::from(self.next()) * count as u128) >> 64) as usize
    }

    fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

struct State<'a> {
    units: &'a Units,
    limits: Limits,
    device_of: Vec<u32>,
    loads: Vec<f64>,
    bytes: Vec<f64>,
    /// Units that share a tensor or a precedence with each unit.
    neighbours: Vec<Vec<u32>>,
}

impl State<'_> {
    fn new<'a>(units: &'a Units, device_of: Vec<u32>, limits: Limits) -> State<'a> {
        let empty = vec![0.0; limits.total()];
        let mut neighbours: Vec<Vec<u32>> = (0..units.len())
            .map(|unit| units.before[unit].iter().chain(&units.after[unit]).copied().collect())
            .collect();
        for tensor in &units.tensors {
            for &to in &tensor.to {
                neighbours[tensor.from as usize].push(to);
                neighbours[to as usize].push(tensor.from);
            }
        }
        for (unit, list) in neighbours.iter_mut().enumerate() {
            list.sort_unstable();
            list.dedup();
            list.retain(|&other| other as usize != unit);
        }
        let mut state = State { units, limits, device_of, loads: empty.clone(), bytes: empty, neighbours };
        for unit in 0..units.len() {
            let device = state.device_of[unit];
            state.loads[device as usize] += state.time(unit, device);
            state.bytes[device as usize] += state.bytes(unit, device);
        }
        (0..units.tensors.len()).for_each(|tensor| state.charge(tensor, 1.0));
        state
    }

    fn time(&self, unit: usize, device: u32) -> f64 {
        if self.limits.is_host(device) { self.units.host_time[unit] } else { self.units.time[unit] }
    }

    /// Bytes that count towards the limit; hosts have none.
    fn bytes(&self, unit: usize, device: u32) -> f64 {
        if self.limits.is_host(device) { 0.0 } else { self.units.bytes[unit] }
    }

    fn may_hold(&self, unit: usize, device: u32) -> bool {
        self.limits.is_host(device) || self.units.time[unit].is_finite()
    }

    /// Adds (sign 1) or removes (sign -1) the load of a tensor on every device.
    fn charge(&mut self, tensor: usize, sign: f64) {
        let tensor = &self.units.tensors[tensor];
        let home = self.device_of[tensor.from as usize];
        let mut is_sent = false;
        for (at, &to) in tensor.to.iter().enumerate() {
            let device = self.device_of[to as usize];
            // There are few readers, so a linear scan is faster than a set.
            let is_new = !tensor.to[..at].iter().any(|&other| self.device_of[other as usize] == device);
            if device != home && is_new {
                is_sent = true;
                if !self.limits.is_host(device) {
                    self.loads[device as usize] += sign * tensor.cost;
                }
            }
        }
        if is_sent && !self.limits.is_host(home) {
            self.loads[home as usize] += sign * tensor.cost;
        }
    }

    fn assign(&mut self, unit: usize, device: u32) {
        let units = self.units;
        units.touching[unit].iter().for_each(|&tensor| self.charge(tensor as usize, -1.0));
        let previous = std::mem::replace(&mut self.device_of[unit], device);
        self.loads[previous as usize] -= self.time(unit, previous);
        self.bytes[previous as usize] -= self.bytes(unit, previous);
        self.loads[device as usize] += self.time(unit, device);
        self.bytes[device as usize] += self.bytes(unit, device);
        units.touching[unit].iter().for_each(|&tensor| self.charge(tensor as usize, 1.0));
    }

    /// Proposes a move; `moves` receives the moved units with their previous devices.
    fn propose(&mut self, numbers: &mut Numbers, moves: &mut Vec<(usize, u32)>) {
        moves.clear();
        let unit = numbers.below(self.units.len());
        let home = self.device_of[unit];
        if numbers.below(4) == 0 {
            let other = numbers.below(self.units.len());
            let away = self.device_of[other];
            if away != home && self.may_hold(unit, away) && self.may_hold(other, home) {
                self.assign(unit, away);
                self.assign(other, home);
                moves.extend([(unit, home), (other, away)]);
            }
            return;
        }
        // Usually to a neighbour's device; elsewhere every tensor would have to be sent.
        let neighbours = &self.neighbours[unit];
        let device = match numbers.below(4) {
            0 => numbers.below(self.limits.total()) as u32,
            _ if neighbours.is_empty() => return,
            _ => self.device_of[neighbours[numbers.below(neighbours.len())] as usize],
        };
        if device == home || !self.may_hold(unit, device) {
            return;
        }
        let mut max_moves = 1;
        while max_moves < self.units.len() && numbers.below(3) != 0 {
            max_moves *= 2;
        }
        let max_moves = 1 + numbers.below(max_moves);
        self.assign(unit, device);
        moves.push((unit, home));
        let mut next = 0;
        while moves.len() < max_moves && next < moves.len() {
            let from = moves[next].0;
            next += 1;
            for at in 0..self.neighbours[from].len() {
                let to = self.neighbours[from][at] as usize;
                let may_move = self.device_of[to] == home && self.may_hold(to, device);
                if moves.len() < max_moves && may_move && numbers.below(4) != 0 {
                    self.assign(to, device);
                    moves.push((to, home));
                }
            }
        }
    }

    fn undo(&mut self, moves: &[(usize, u32)]) {
        for &(unit, device) in moves.iter().rev() {
            self.assign(unit, device);
        }
    }

    fn is_feasible(&self) -> bool {
        self.bytes.iter().all(|&bytes| bytes <= self.limits.bytes)
    }

    fn max_load(&self) -> f64 {
        self.loads.iter().copied().fold(0.0, f64::max)
    }

    fn energy(&self) -> f64 {
        let worst = self.max_load().max(f64::MIN_POSITIVE);
        // Divides by the largest load so that the power cannot overflow.
        worst * self.loads.iter().map(|load| (load / worst).powi(POWER)).sum::<f64>().powf(1.0 / f64::from(POWER))
    }
}
