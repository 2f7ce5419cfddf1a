//! Placements without the rule of contiguity: a local search from a known placement.
//!
//! A unit, or a connected part of a device, moves to another device, or two units change places. A worse state is taken with a chance that falls with the turns
//! (simulated annealing, Kirkpatrick, Gelatt and Vecchi 1983). What is made less is the sum of a high power of the loads, which
//! unlike their maximum tells of two full devices which is nearer to being emptied; the best maximum met is kept. The numbers
//! that look random come from a fixed seed.

use crate::partition::device_placement::units::Units;

/// Power of the loads. High enough that the fullest device rules, low enough that the others have a say.
const POWER: i32 = 12;

/// Turns for each unit, and the most in all.
const TURNS: (usize, usize) = (6_000, 3_000_000);

/// Starts from the same placement with other numbers.
const STARTS: u64 = 3;

/// Highest heat, as a share of the first energy.
const HEAT: f64 = 0.02;

/// What a search is bound by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Devices there are.
    pub devices: usize,
    /// Bytes on each.
    pub bytes: f64,
}

/// A placement at least as good as `start`: the device of each unit.
pub fn anywhere(units: &Units, start: &[u32], limits: Limits, seed: u64) -> Vec<u32> {
    let begin = State::new(units, start.to_vec(), limits);
    let mut best = (begin.worst(), start.to_vec());
    if units.len() < 2 || limits.devices < 2 {
        return best.1;
    }
    let turns = (TURNS.0 * units.len()).min(TURNS.1 / STARTS as usize);
    for start in 0..STARTS {
        let mut numbers = Numbers(seed ^ (start + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut state = State::new(units, best.1.clone(), limits);
        let scale = state.energy().max(f64::MIN_POSITIVE);
        let mut energy = 1.0;
        let mut moved = Vec::new();
        for turn in 0..turns {
            let heat = HEAT * (1.0 - turn as f64 / turns as f64).powi(3);
            state.propose(&mut numbers, &mut moved);
            if moved.is_empty() {
                continue;
            }
            let next = state.energy() / scale;
            let is_taken = state.fits() && (next <= energy || numbers.fraction() < ((energy - next) / heat).exp());
            if !is_taken {
                state.undo(&moved);
                continue;
            }
            energy = next;
            let worst = state.worst();
            if worst < best.0 {
                best = (worst, state.device_of.clone());
            }
        }
    }
    best.1
}

/// xorshift64*, seeded.
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
    /// Units that each unit exchanges tensors with or is ordered against.
    near: Vec<Vec<u32>>,
}

impl State<'_> {
    fn new<'a>(units: &'a Units, device_of: Vec<u32>, limits: Limits) -> State<'a> {
        let empty = vec![0.0; limits.devices];
        let mut near: Vec<Vec<u32>> = (0..units.len())
            .map(|unit| units.before[unit].iter().chain(&units.after[unit]).copied().collect())
            .collect();
        for tensor in &units.tensors {
            for &to in &tensor.to {
                near[tensor.from as usize].push(to);
                near[to as usize].push(tensor.from);
            }
        }
        for (unit, list) in near.iter_mut().enumerate() {
            list.sort_unstable();
            list.dedup();
            list.retain(|&other| other as usize != unit);
        }
        let mut state = State { units, limits, device_of, loads: empty.clone(), bytes: empty, near };
        for unit in 0..units.len() {
            let device = state.device_of[unit] as usize;
            state.loads[device] += units.time[unit];
            state.bytes[device] += units.bytes[unit];
        }
        (0..units.tensors.len()).for_each(|tensor| state.charge(tensor, 1.0));
        state
    }

    /// Adds or takes what every device is charged for a tensor.
    fn charge(&mut self, tensor: usize, sign: f64) {
        let tensor = &self.units.tensors[tensor];
        let home = self.device_of[tensor.from as usize];
        let mut leaves = false;
        for (at, &to) in tensor.to.iter().enumerate() {
            let device = self.device_of[to as usize];
            // Readers are few: looking back for one on the same device is faster than a set.
            let is_new = !tensor.to[..at].iter().any(|&other| self.device_of[other as usize] == device);
            if device != home && is_new {
                self.loads[device as usize] += sign * tensor.cost;
                leaves = true;
            }
        }
        if leaves {
            self.loads[home as usize] += sign * tensor.cost;
        }
    }

    fn put(&mut self, unit: usize, device: u32) {
        let units = self.units;
        units.touching[unit].iter().for_each(|&tensor| self.charge(tensor as usize, -1.0));
        let old = std::mem::replace(&mut self.device_of[unit], device) as usize;
        self.loads[old] -= units.time[unit];
        self.bytes[old] -= units.bytes[unit];
        self.loads[device as usize] += units.time[unit];
        self.bytes[device as usize] += units.bytes[unit];
        units.touching[unit].iter().for_each(|&tensor| self.charge(tensor as usize, 1.0));
    }

    /// Moves a unit, or a connected part of a device, or changes two units; gives what was moved and from where.
    fn propose(&mut self, numbers: &mut Numbers, moved: &mut Vec<(usize, u32)>) {
        moved.clear();
        let unit = numbers.below(self.units.len());
        let home = self.device_of[unit];
        if numbers.below(4) == 0 {
            let other = numbers.below(self.units.len());
            let away = self.device_of[other];
            if away != home {
                self.put(unit, away);
                self.put(other, home);
                moved.extend([(unit, home), (other, away)]);
            }
            return;
        }
        // Most often to where a neighbour is: elsewhere every tensor must travel.
        let near = &self.near[unit];
        let device = match numbers.below(4) {
            0 => numbers.below(self.limits.devices) as u32,
            _ if near.is_empty() => return,
            _ => self.device_of[near[numbers.below(near.len())] as usize],
        };
        if device == home {
            return;
        }
        let mut most = 1;
        while most < self.units.len() && numbers.below(3) != 0 {
            most *= 2;
        }
        let most = 1 + numbers.below(most);
        self.put(unit, device);
        moved.push((unit, home));
        let mut next = 0;
        while moved.len() < most && next < moved.len() {
            let from = moved[next].0;
            next += 1;
            for at in 0..self.near[from].len() {
                let to = self.near[from][at] as usize;
                if moved.len() < most && self.device_of[to] == home && numbers.below(4) != 0 {
                    self.put(to, device);
                    moved.push((to, home));
                }
            }
        }
    }

    fn undo(&mut self, moved: &[(usize, u32)]) {
        for &(unit, device) in moved.iter().rev() {
            self.put(unit, device);
        }
    }

    fn fits(&self) -> bool {
        self.bytes.iter().all(|&bytes| bytes <= self.limits.bytes)
    }

    fn worst(&self) -> f64 {
        self.loads.iter().copied().fold(0.0, f64::max)
    }

    fn energy(&self) -> f64 {
        let worst = self.worst().max(f64::MIN_POSITIVE);
        // The largest load is taken out first, so that no power overflows.
        worst * self.loads.iter().map(|load| (load / worst).powi(POWER)).sum::<f64>().powf(1.0 / f64::from(POWER))
    }
}
