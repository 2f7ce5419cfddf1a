//! Chooses one option per layer of a stage, with limits on the sums of time and bytes: a multiple-choice knapsack.
//!
//! Usually the fastest options fit, or the leanest do not. In between, layers switch from fast to lean in the order of
//! time lost per byte saved. With a fractional last switch this gives a lower bound on the time; with a whole one a
//! feasible choice. If the limit lies between the two, all Pareto-optimal sums are listed layer by layer.

/// Largest number of Pareto-optimal sums per layer, and for all layers together.
const MOST_SUMS: usize = 4096;
const MOST_SUMS_TOGETHER: usize = 1 << 18;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chosen {
    /// Index of each layer's option.
    Picks(Vec<u16>),
    /// Proven infeasible.
    No,
    /// Nothing found, but not all sums were listed.
    Unknown,
}

pub type Offer = (f64, f64);

/// The options of layers in the order in which a stage that is too large takes leaner ones.
#[derive(Debug, Default)]
pub struct Menu {
    /// Of each layer, with its index.
    fastest: Vec<(u16, Offer)>,
    /// Smallest loss per saved byte first.
    steps: Vec<Step>,
}

#[derive(Debug)]
struct Step {
    layer: usize,
    to: u16,
    loses: f64,
    saves: f64,
}

/// What the order of the steps tells about a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is feasible after this many of the menu's steps; those of other layers do not count.
    After(usize),
    /// Proven infeasible.
    No,
    Unclear,
}

/// Picks one option per layer with sums of at most `time` and `bytes`. No layer may be empty. Adds the number of listed
/// sums to `combinations`.
pub fn choose(layers: &[Vec<Offer>], bytes: f64, time: f64, combinations: &mut u64) -> Chosen {
    let menu = Menu::of(layers);
    match menu.judge(|_| true, bytes, time) {
        Verdict::No => Chosen::No,
        Verdict::Unclear => list(layers, bytes, time, combinations),
        Verdict::After(steps) => {
            let mut picks: Vec<u16> = menu.fastest.iter().map(|(pick, _)| *pick).collect();
            menu.steps[..steps].iter().for_each(|step| picks[step.layer] = step.to);
            Chosen::Picks(picks)
        }
    }
}

impl Menu {
    /// The switches of a layer from its fastest to its leanest option follow the lower convex hull, so they come in order.
    /// A layer without options has none.
    pub fn of(layers: &[Vec<Offer>]) -> Menu {
        let mut menu = Menu::default();
        for (layer, offers) in layers.iter().enumerate() {
            let order = |a: &usize, b: &usize| {
                offers[*a].0.total_cmp(&offers[*b].0).then(offers[*a].1.total_cmp(&offers[*b].1))
            };
            let mut at = (0..offers.len()).min_by(order).unwrap_or_default();
            menu.fastest.push((at as u16, offers.get(at).copied().unwrap_or_default()));
            loop {
                let rate = |to: usize| (offers[to].0 - offers[at].0) / (offers[at].1 - offers[to].1);
                let leaner = (0..offers.len()).filter(|&to| offers[to].1 < offers[at].1);
                let next =
                    leaner.min_by(|&a, &b| rate(a).total_cmp(&rate(b)).then(offers[a].1.total_cmp(&offers[b].1)));
                let Some(to) = next else { break };
                let (loses, saves) = (offers[to].0 - offers[at].0, offers[at].1 - offers[to].1);
                menu.steps.push(Step { layer, to: to as u16, loses, saves });
                at = to;
            }
        }
        menu.steps.sort_by(|a, b| (a.loses / a.saves).total_cmp(&(b.loses / b.saves)));
        menu
    }

    /// Number of fastest options and of steps.
    pub fn size(&self) -> usize {
        self.fastest.len() + self.steps.len()
    }

    /// Judges a stage of the layers that it holds.
    pub fn judge(&self, holds: impl Fn(usize) -> bool, bytes: f64, time: f64) -> Verdict {
        let held = self.fastest.iter().enumerate().filter(|(layer, _)| holds(*layer));
        let (mut total_time, mut total_bytes) =
            held.fold((0.0, 0.0), |sum, (_, (_, offer))| (sum.0 + offer.0, sum.1 + offer.1));
        if total_time > time {
            return Verdict::No;
        }
        if total_bytes <= bytes {
            return Verdict::After(0);
        }
        for (at, step) in self.steps.iter().enumerate().filter(|(_, step)| holds(step.layer)) {
            let missing = total_bytes - bytes;
            if total_time + step.loses * (missing / step.saves).min(1.0) > time {
                return Verdict::No;
            }
            (total_time, total_bytes) = (total_time + step.loses, total_bytes - step.saves);
            if total_bytes <= bytes {
                return if total_time <= time { Verdict::After(at + 1) } else { Verdict::Unclear };
            }
        }
        // Within the rounding of the sums the lists decide.
        if total_bytes > bytes * (1.0 + 1e-9) { Verdict::No } else { Verdict::Unclear }
    }
}

/// Lists all sums layer by layer, without dominated ones and those that cannot stay within the limits.
fn list(layers: &[Vec<Offer>], bytes: f64, time: f64, combinations: &mut u64) -> Chosen {
    let max_sums = MOST_SUMS.min(MOST_SUMS_TOGETHER / layers.len().max(1));
    // Smallest time and bytes of the layers from each one on.
    let mut remaining = vec![(0.0, 0.0); layers.len() + 1];
    for (at, offers) in layers.iter().enumerate().rev() {
        let minimum = |part: fn(&Offer) -> f64| offers.iter().map(part).fold(f64::INFINITY, f64::min);
        remaining[at] =
            (remaining[at + 1].0 + minimum(|offer| offer.0), remaining[at + 1].1 + minimum(|offer| offer.1));
    }
    // Time, bytes, index of the previous sum, chosen option.
    let mut sums: Vec<Vec<(f64, f64, u32, u16)>> = vec![vec![(0.0, 0.0, 0, 0)]];
    let mut is_complete = true;
    for (at, offers) in layers.iter().enumerate() {
        let mut next = Vec::new();
        for (from, sum) in sums[at].iter().enumerate() {
            for (pick, offer) in offers.iter().enumerate() {
                let (sum_time, sum_bytes) = (sum.0 + offer.0, sum.1 + offer.1);
                if sum_time + remaining[at + 1].0 <= time && sum_bytes + remaining[at + 1].1 <= bytes {
                    next.push((sum_time, sum_bytes, from as u32, pick as u16));
                }
            }
        }
        *combinations += next.len() as u64;
        next.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let mut leanest = f64::INFINITY;
        next.retain(|sum| {
            let is_leaner = sum.1 < leanest;
            leanest = leanest.min(sum.1);
            is_leaner
        });
        is_complete &= next.len() <= max_sums;
        next.truncate(max_sums);
        sums.push(next);
    }
    let Some(mut last) = sums[layers.len()].first().copied() else {
        return if is_complete { Chosen::No } else { Chosen::Unknown };
    };
    let mut picks = vec![0; layers.len()];
    for at in (0..layers.len()).rev() {
        picks[at] = last.3;
        last = sums[at][last.2 as usize];
    }
    Chosen::Picks(picks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(state: &mut u64, below: u64) -> u64 {
        *state ^= *state >> 12;
        *state ^= *state << 25;
        *state ^= *state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d) % below
    }

    #[test]
    fn what_is_found_and_what_is_not_agree_with_all_choices() {
        let (mut feasible, mut infeasible) = (0, 0);
        for seed in 1..=3000u64 {
            let mut state = seed * 7919;
            let layers: Vec<Vec<Offer>> = (0..1 + next(&mut state, 5))
                .map(|_| {
                    let offer = |state: &mut u64| (next(state, 12) as f64, next(state, 12) as f64);
                    (0..1 + next(&mut state, 3)).map(|_| offer(&mut state)).collect()
                })
                .collect();
            let (bytes, time) = (next(&mut state, 30) as f64, next(&mut state, 30) as f64);
            let sum = |picks: &[u16]| {
                let picked = layers.iter().zip(picks).map(|(offers, &pick)| offers[usize::from(pick)]);
                picked.fold((0.0, 0.0), |sum, offer| (sum.0 + offer.0, sum.1 + offer.1))
            };
            let mut all_picks: Vec<Vec<u16>> = vec![Vec::new()];
            for offers in &layers {
                let longer = |picks: &Vec<u16>, pick: usize| [picks.as_slice(), &[pick as u16]].concat();
                all_picks =
                    all_picks.iter().flat_map(|picks| (0..offers.len()).map(|pick| longer(picks, pick))).collect();
            }
            let is_feasible = |picks: &[u16]| sum(picks).0 <= time && sum(picks).1 <= bytes;
            match choose(&layers, bytes, time, &mut 0) {
                Chosen::Picks(picks) => {
                    assert!(is_feasible(&picks), "seed {seed}");
                    feasible += 1;
                }
                Chosen::No => {
                    assert!(!all_picks.iter().any(|picks| is_feasible(picks)), "seed {seed}");
                    infeasible += 1;
                }
                Chosen::Unknown => panic!("seed {seed}: so few were not looked at"),
            }
        }
        assert!(feasible > 500 && infeasible > 500, "{feasible} {infeasible}");
    }
}
