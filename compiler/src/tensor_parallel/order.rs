//! Elimination orders that keep the tables small.
//!
//! An optimal order is NP-hard to find. Two greedy rules are simulated without tables: the fewest joint states of a
//! variable's neighbours, and the fewest new pairs of neighbours (min-fill). Each is tried several times with perturbed
//! scores, unless the work is little already. The order with the least work wins. Perturbations are deterministic, so
//! equal problems have equal orders.

use std::collections::BTreeSet;

const TRIES: u64 = 6;

/// Work per variable that takes less time than another try.
const LITTLE: u128 = 500;

/// Above the number of neighbours of any feasible table.
const MOST_NEIGHBOURS: usize = 64;

#[derive(Clone, Copy)]
enum Rule {
    FewestStates,
    FewestPairs,
}

/// An elimination order for variables with these neighbours and state counts.
pub fn order(neighbours: &[BTreeSet<usize>], states: &[usize]) -> Vec<usize> {
    let neighbours: Vec<Vec<usize>> = neighbours.iter().map(|own| own.iter().copied().collect()).collect();
    let mut best: Option<(u128, Vec<usize>)> = None;
    for seed in 0..TRIES {
        for rule in [Rule::FewestStates, Rule::FewestPairs] {
            let trial = EliminationTrial { neighbours: neighbours.clone(), states, rule, seed }.order();
            if best.as_ref().is_none_or(|(work, _)| trial.0 < *work) {
                best = Some(trial);
            }
        }
        if best.as_ref().is_some_and(|(work, _)| *work <= LITTLE * states.len() as u128) {
            break;
        }
    }
    best.map(|(_, order)| order).unwrap_or_default()
}

struct EliminationTrial<'a> {
    /// Ascending.
    neighbours: Vec<Vec<usize>>,
    states: &'a [usize],
    rule: Rule,
    seed: u64,
}

impl EliminationTrial<'_> {
    /// Simulates an elimination; returns its work and order.
    fn order(mut self) -> (u128, Vec<usize>) {
        let mut scores: Vec<u128> = (0..self.states.len()).map(|v| self.score(v)).collect();
        let mut queue: BTreeSet<(u128, usize)> = scores.iter().copied().zip(0..).collect();
        let (mut work, mut order) = (0u128, Vec::new());
        while let Some((_, v)) = queue.pop_first() {
            work = work.saturating_add(self.entries(v).saturating_mul(self.states[v] as u128));
            order.push(v);
            let neighbours = std::mem::take(&mut self.neighbours[v]);
            for &n in &neighbours {
                let own = &mut self.neighbours[n];
                own.extend(&neighbours);
                // A stable sort merges the two ascending runs.
                own.sort();
                own.dedup();
                own.retain(|other| *other != n && *other != v);
            }
            for &n in &neighbours {
                queue.remove(&(scores[n], n));
                scores[n] = self.score(n);
                queue.insert((scores[n], n));
            }
        }
        (work, order)
    }

    /// Number of joint states of a variable's neighbours.
    fn entries(&self, v: usize) -> u128 {
        self.neighbours[v].iter().fold(1, |n: u128, other| n.saturating_mul(self.states[*other] as u128))
    }

    fn score(&self, v: usize) -> u128 {
        let score = match self.rule {
            _ if self.neighbours[v].len() > MOST_NEIGHBOURS => u128::MAX >> 32,
            Rule::FewestStates => self.entries(v).min(u128::MAX >> 32),
            Rule::FewestPairs => {
                let neighbours = &self.neighbours[v];
                let mut pairs = 0u128;
                for (at, a) in neighbours.iter().enumerate() {
                    let mut adjacent = self.neighbours[*a].iter().peekable();
                    let non_adjacent = neighbours[at + 1..].iter().filter(|b| {
                        while adjacent.next_if(|other| other < b).is_some() {}
                        adjacent.peek() != Some(b)
                    });
                    pairs += non_adjacent.map(|b| (self.states[*a] * self.states[*b]) as u128).sum::<u128>();
                }
                pairs
            }
        };
        if self.seed == 0 {
            return score;
        }
        let mut hash = (v as u64 ^ (self.seed << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash ^= hash >> 29;
        (score + 1) * u128::from(64 + hash % 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_goes_from_its_ends() {
        let mut neighbours = vec![BTreeSet::from([3]); 6];
        neighbours[3] = (0..6).filter(|v| *v != 3).collect();
        let order = order(&neighbours, &[4; 6]);
        assert!(order.iter().position(|v| *v == 3) >= Some(4), "{order:?}");
        assert_eq!(order.iter().copied().collect::<BTreeSet<_>>(), (0..6).collect());
    }
}
