//! Minimises a sum of unary and pairwise costs over discrete variables.
//!
//! First, dominated states are removed (dead-end elimination, Goldstein, Biophysical Journal 66, 1994): state i of v is
//! removed if for some j,
//!
//!   cost(i) - cost(j) + Σ over neighbours n of  min over x of  (cost(i, x) - cost(j, x))  ≥ 0
//!
//! Then variables are eliminated one by one (bucket elimination, Dechter 1999): all costs that contain v are summed and
//! minimised over v, which leaves one cost of its neighbours. [`order`] chooses the sequence. The graphs of models with
//! gradients resemble chains and ladders, so tables stay small and the result is exact.
//!
//! If a table would exceed the limit, or all together the limit on work, costs are divided into groups that choose v's
//! state independently (mini-buckets). The result is then a lower bound. States are chosen in reverse order and improved
//! by local search, and the gap to the bound shows that the solution may not be optimal.

use crate::tensor_parallel::cost::{NEVER, Time, sum};
use crate::tensor_parallel::order::order;
use std::collections::{BTreeMap, BTreeSet};

/// Default table size limit, in entries.
pub const MOST_ENTRIES: usize = 1 << 22;

/// Sums per entry of the largest table that an elimination may compute, by default in a quarter of a second. If it has
/// more, its tables are smaller, but not smaller than the least.
const WORK: usize = 32;
const LEAST_ENTRIES: usize = 1 << 12;

/// A cost function of discrete variables.
#[derive(Clone, Debug, Default)]
pub struct Factors {
    /// Per variable, the cost of each state.
    pub unary: Vec<Vec<Time>>,
    /// Per pair of variables, the lower first, a row-major table of costs.
    pub pairs: BTreeMap<(usize, usize), Vec<Time>>,
}

/// An assignment of states, with its cost and a lower bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    pub states: Vec<usize>,
    pub cost: Time,
    /// Lower bound on the cost of any assignment.
    pub bound: Time,
}

impl Factors {
    /// Adds a variable with these state costs; returns its index.
    pub fn variable(&mut self, costs: Vec<Time>) -> usize {
        self.unary.push(costs);
        self.unary.len() - 1
    }

    /// Adds a pairwise cost; `cost` gets the states of `a` and `b`.
    pub fn add(&mut self, a: usize, b: usize, cost: impl Fn(usize, usize) -> Time) {
        if a == b {
            self.unary[a]
                .iter_mut()
                .enumerate()
                .for_each(|(state, cost_of_state)| *cost_of_state = sum(*cost_of_state, cost(state, state)));
            return;
        }
        let (low, high) = (a.min(b), a.max(b));
        let [rows, columns] = [low, high].map(|v| self.unary[v].len());
        let table = self.pairs.entry((low, high)).or_insert_with(|| vec![0; rows * columns]);
        for (at, entry) in table.iter_mut().enumerate() {
            let (row, column) = (at / columns, at % columns);
            *entry = sum(*entry, if a < b { cost(row, column) } else { cost(column, row) });
        }
    }

    pub fn cost(&self, states: &[usize]) -> Time {
        let unary = self.unary.iter().zip(states).map(|(unary, state)| unary[*state]);
        let pairs = self.pairs.iter().map(|((a, b), table)| table[states[*a] * self.unary[*b].len() + states[*b]]);
        unary.chain(pairs).fold(0, sum)
    }

    /// Minimises with tables of at most `most_entries` entries. Ties go to earlier states.
    pub fn minimize(&self, most_entries: usize) -> Solution {
        let alive = Pruning::of(self).alive();
        let of_alive = |(costs, alive): (&Vec<Time>, &Vec<usize>)| alive.iter().map(|state| costs[*state]).collect();
        let mut unary_costs: Vec<Vec<Time>> = self.unary.iter().zip(&alive).map(of_alive).collect();
        let mut tables: Vec<Table> = Vec::new();
        for (&(a, b), table) in &self.pairs {
            let columns = self.unary[b].len();
            let row = |row: &usize| alive[b].iter().map(|column| table[row * columns + column]).collect::<Vec<_>>();
            let costs: Vec<Time> = alive[a].iter().flat_map(row).collect();
            // A table with a variable of one state is a cost of the other variable.
            let only = if alive[a].len() == 1 { b } else { a };
            if alive[a].len() == 1 || alive[b].len() == 1 {
                unary_costs[only].iter_mut().zip(costs).for_each(|(total, cost)| *total = sum(*total, cost));
            } else {
                tables.push(Table { scope: vec![a, b], sizes: vec![alive[a].len(), alive[b].len()], costs });
            }
        }
        let unary = |(v, costs): (usize, Vec<Time>)| Table { scope: vec![v], sizes: vec![costs.len()], costs };
        let tables: Vec<Table> = unary_costs.into_iter().enumerate().map(unary).chain(tables).collect();
        let sizes: Vec<usize> = alive.iter().map(Vec::len).collect();
        let steps = elimination(&tables, &sizes, most_entries);
        let (tables, bound) = eliminate(tables, &sizes, &steps);
        let mut chosen = vec![0; sizes.len()];
        for Step { variable: v, bucket, .. } in steps.iter().rev() {
            let cost = |state: usize, chosen: &mut Vec<usize>| {
                chosen[*v] = state;
                bucket.iter().map(|at| tables[*at].at(chosen)).fold(0, sum)
            };
            let best = (0..sizes[*v]).min_by_key(|state| (cost(*state, &mut chosen), *state));
            chosen[*v] = best.expect("every variable has a live state");
        }
        let mut states: Vec<usize> = chosen.iter().zip(&alive).map(|(at, alive)| alive[*at]).collect();
        let mut cost = self.cost(&states);
        if cost > bound {
            cost = self.improve(&mut states);
        }
        Solution { states, cost, bound }
    }

    /// Local search: changes one state at a time while the cost decreases; returns the cost.
    fn improve(&self, states: &mut [usize]) -> Time {
        let mut neighbours = vec![Vec::new(); self.unary.len()];
        for &(a, b) in self.pairs.keys() {
            neighbours[a].push(b);
            neighbours[b].push(a);
        }
        let local = |states: &[usize], v: usize, state: usize| {
            let pair = |&n: &usize| match v < n {
                true => self.pairs[&(v, n)][state * self.unary[n].len() + states[n]],
                false => self.pairs[&(n, v)][states[n] * self.unary[v].len() + state],
            };
            neighbours[v].iter().map(pair).fold(self.unary[v][state], sum)
        };
        // Terminates because the integer cost decreases; the limit only bounds the time.
        for _ in 0..1000 {
            let mut changed = false;
            for v in 0..self.unary.len() {
                let best = (0..self.unary[v].len()).min_by_key(|state| (local(states, v, *state), *state));
                let best = best.expect("every variable has a state");
                if local(states, v, best) < local(states, v, states[v]) {
                    states[v] = best;
                    changed = true;
                }
            }
            if !changed {
                break;
            }
        }
        self.cost(states)
    }
}

/// A cost table of several variables; the last variable of the scope varies fastest.
#[derive(Clone, Debug)]
struct Table {
    scope: Vec<usize>,
    sizes: Vec<usize>,
    costs: Vec<Time>,
}

impl Table {
    fn at(&self, chosen: &[usize]) -> Time {
        let index = self.scope.iter().zip(&self.sizes).fold(0, |index, (v, size)| index * size + chosen[*v]);
        self.costs[index]
    }

    /// Index stride of a variable; 0 if it is not in the scope.
    fn stride(&self, v: usize) -> usize {
        match self.scope.iter().position(|variable| *variable == v) {
            Some(at) => self.sizes[at + 1..].iter().product(),
            None => 0,
        }
    }
}

/// The elimination of one variable. Tables have numbers: first those of the problem, then the new ones in order.
struct Step {
    variable: usize,
    /// The tables that contain it.
    bucket: Vec<usize>,
    /// The same, divided; each group becomes one table.
    groups: Vec<Vec<usize>>,
}

/// The elimination with the largest tables, up to `most_entries`, whose work is within the limit.
fn elimination(tables: &[Table], sizes: &[usize], most_entries: usize) -> Vec<Step> {
    let mut neighbours: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); sizes.len()];
    for table in tables {
        for v in &table.scope {
            neighbours[*v].extend(table.scope.iter().filter(|n| *n != v));
        }
    }
    let order = order(&neighbours, sizes);
    let most_work = most_entries.saturating_mul(WORK) as u64;
    let mut most = most_entries;
    loop {
        let (steps, work) = steps(tables, sizes, &order, most);
        if work <= most_work || most <= LEAST_ENTRIES {
            return steps;
        }
        most /= 4;
    }
}

/// The steps of an elimination, and the number of sums that they compute.
fn steps(tables: &[Table], sizes: &[usize], order: &[usize], most_entries: usize) -> (Vec<Step>, u64) {
    let mut scopes: Vec<BTreeSet<usize>> = tables.iter().map(|table| table.scope.iter().copied().collect()).collect();
    let mut tables_of: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); sizes.len()];
    for (at, scope) in scopes.iter().enumerate() {
        for v in scope {
            tables_of[*v].insert(at);
        }
    }
    let (mut steps, mut work) = (Vec::with_capacity(order.len()), 0u64);
    for &variable in order {
        let bucket: Vec<usize> = std::mem::take(&mut tables_of[variable]).into_iter().collect();
        bucket.iter().flat_map(|at| &scopes[*at]).for_each(|v| tables_of[*v].retain(|at| !bucket.contains(at)));
        let divided = groups(&bucket, &scopes, variable, sizes, most_entries);
        let mut groups = Vec::with_capacity(divided.len());
        for (scope, members) in divided {
            let sums = entries(&scope, sizes).saturating_mul(sizes[variable]).saturating_mul(members.len());
            work = work.saturating_add(sums as u64);
            for v in &scope {
                tables_of[*v].insert(scopes.len());
            }
            scopes.push(scope);
            groups.push(members);
        }
        steps.push(Step { variable, bucket, groups });
    }
    (steps, work)
}

fn entries(scope: &BTreeSet<usize>, sizes: &[usize]) -> usize {
    scope.iter().fold(1usize, |n, v| n.saturating_mul(sizes[*v]))
}

/// Partitions the tables that contain a variable into groups within the limit on joint states; a single group if
/// possible. Each group has the scope of its new table.
fn groups(
    bucket: &[usize],
    scopes: &[BTreeSet<usize>],
    v: usize,
    sizes: &[usize],
    most_entries: usize,
) -> Vec<(BTreeSet<usize>, Vec<usize>)> {
    let mut groups: Vec<(BTreeSet<usize>, Vec<usize>)> = Vec::new();
    for &table in bucket {
        let scope: BTreeSet<usize> = scopes[table].iter().copied().filter(|n| *n != v).collect();
        let fits = |(group_scope, _): &&mut (BTreeSet<usize>, Vec<usize>)| {
            entries(&group_scope.union(&scope).copied().collect(), sizes) <= most_entries
        };
        match groups.iter_mut().find(fits) {
            Some((group_scope, members)) => {
                group_scope.extend(scope);
                members.push(table);
            }
            None => groups.push((scope, vec![table])),
        }
    }
    groups
}

/// Eliminates all variables. Returns all tables, and the sum of the remaining constants.
fn eliminate(mut tables: Vec<Table>, sizes: &[usize], steps: &[Step]) -> (Vec<Table>, Time) {
    let mut bound = 0;
    for Step { variable, groups, .. } in steps {
        for group in groups {
            let members: Vec<&Table> = group.iter().map(|at| &tables[*at]).collect();
            let table = eliminate_variable(&members, *variable, sizes);
            if table.scope.is_empty() {
                bound = sum(bound, table.costs[0]);
            }
            tables.push(table);
        }
    }
    (tables, bound)
}

/// Sums these tables and minimises over a variable, giving a table of their other variables.
fn eliminate_variable(tables: &[&Table], v: usize, sizes: &[usize]) -> Table {
    let scope: BTreeSet<usize> = tables.iter().flat_map(|t| t.scope.iter().copied()).filter(|n| *n != v).collect();
    let scope: Vec<usize> = scope.into_iter().collect();
    let scope_sizes: Vec<usize> = scope.iter().map(|n| sizes[*n]).collect();
    let strides: Vec<Vec<usize>> = tables.iter().map(|t| scope.iter().map(|n| t.stride(*n)).collect()).collect();
    let steps: Vec<usize> = tables.iter().map(|t| t.stride(v)).collect();
    let mut costs = Vec::with_capacity(scope_sizes.iter().product());
    let mut digits = vec![0usize; scope.len()];
    let mut offsets = vec![0usize; tables.len()];
    let mut row = vec![0; sizes[v]];
    loop {
        row.fill(0);
        for (at, table) in tables.iter().enumerate() {
            let mut entry = offsets[at];
            for total in &mut row {
                *total = sum(*total, table.costs[entry]);
                entry += steps[at];
            }
        }
        costs.push(row.iter().copied().min().unwrap_or(NEVER));
        // The next assignment; the last variable varies fastest.
        let Some(at) = (0..scope.len()).rev().find(|at| digits[*at] + 1 < scope_sizes[*at]) else { break };
        digits[at] += 1;
        offsets.iter_mut().zip(&strides).for_each(|(offset, strides)| *offset += strides[at]);
        for later in at + 1..scope.len() {
            offsets.iter_mut().zip(&strides).for_each(|(offset, strides)| *offset -= strides[later] * digits[later]);
            digits[later] = 0;
        }
    }
    Table { scope, sizes: scope_sizes, costs }
}

/// State of the dead-end elimination.
struct Pruning<'a> {
    factors: &'a Factors,
    neighbours: Vec<Vec<Neighbour<'a>>>,
    alive: Vec<Vec<usize>>,
}

/// A variable that shares a table with another one.
struct Neighbour<'a> {
    variable: usize,
    table: &'a [Time],
    /// Distance in the table between states of the other variable, and between states of this one.
    strides: [usize; 2],
}

impl Neighbour<'_> {
    fn cost(&self, state: usize, other: usize) -> Time {
        self.table[state * self.strides[0] + other * self.strides[1]]
    }
}

impl<'a> Pruning<'a> {
    fn of(factors: &'a Factors) -> Pruning<'a> {
        let mut neighbours: Vec<Vec<Neighbour<'a>>> = factors.unary.iter().map(|_| Vec::new()).collect();
        for (&(a, b), table) in &factors.pairs {
            let columns = factors.unary[b].len();
            neighbours[a].push(Neighbour { variable: b, table, strides: [columns, 1] });
            neighbours[b].push(Neighbour { variable: a, table, strides: [1, columns] });
        }
        let alive = factors.unary.iter().map(|costs| (0..costs.len()).collect()).collect();
        Pruning { factors, neighbours, alive }
    }

    fn alive(mut self) -> Vec<Vec<usize>> {
        // Removing a state may make a neighbour's state removable.
        let mut queue: BTreeSet<usize> = (0..self.alive.len()).collect();
        while let Some(v) = queue.pop_first() {
            let before = self.alive[v].len();
            let mut at = 0;
            while at < self.alive[v].len() {
                let state = self.alive[v][at];
                let is_dominated =
                    self.alive[v].iter().any(|other| *other != state && self.dominates(v, *other, state));
                if is_dominated {
                    self.alive[v].remove(at);
                } else {
                    at += 1;
                }
            }
            if self.alive[v].len() < before {
                queue.extend(self.neighbours[v].iter().map(|neighbour| neighbour.variable));
            }
        }
        self.alive
    }

    /// Tests whether `better` costs no more than `state` for all states of the neighbours; on ties the earlier state
    /// stays.
    fn dominates(&self, v: usize, better: usize, state: usize) -> bool {
        let costs = &self.factors.unary[v];
        if costs[state] >= NEVER {
            return costs[better] < NEVER || better < state;
        }
        if costs[better] >= NEVER {
            return false;
        }
        let mut gain = i128::from(costs[state]) - i128::from(costs[better]);
        for neighbour in &self.neighbours[v] {
            let mut least: Option<i128> = None;
            for &x in &self.alive[neighbour.variable] {
                let (a, b) = (neighbour.cost(state, x), neighbour.cost(better, x));
                if a >= NEVER {
                    continue;
                }
                if b >= NEVER {
                    return false;
                }
                let difference = i128::from(a) - i128::from(b);
                least = Some(least.map_or(difference, |least| least.min(difference)));
            }
            // A state without a compatible state of some neighbour is infeasible.
            let Some(least) = least else { return true };
            gain += least;
        }
        gain > 0 || (gain == 0 && better < state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Random(u64);

    impl Random {
        fn below(&mut self, limit: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % limit
        }
    }

    fn random(seed: u64) -> Factors {
        let mut random = Random(seed);
        let mut factors = Factors::default();
        let count = 2 + random.below(6) as usize;
        for _ in 0..count {
            let states = 1 + random.below(4);
            let costs = (0..states).map(|_| random.below(20)).collect();
            factors.variable(costs);
        }
        for a in 0..count {
            for b in a + 1..count {
                if random.below(3) > 0 {
                    continue;
                }
                let entries = factors.unary[a].len() * factors.unary[b].len();
                let table = (0..entries).map(|_| if random.below(6) == 0 { NEVER } else { random.below(20) });
                let table = table.collect();
                factors.pairs.insert((a, b), table);
            }
        }
        factors
    }

    fn exhaustive(factors: &Factors) -> Time {
        let mut states = vec![0; factors.unary.len()];
        let mut best = NEVER;
        loop {
            best = best.min(factors.cost(&states));
            let Some(at) = (0..states.len()).find(|at| states[*at] + 1 < factors.unary[*at].len()) else { return best };
            states[at] += 1;
            states[..at].fill(0);
        }
    }

    #[test]
    fn the_least_sum_is_that_of_trying_everything() {
        for seed in 0..400 {
            let factors = random(seed);
            let best = exhaustive(&factors);
            let solution = factors.minimize(MOST_ENTRIES);
            assert_eq!(solution.cost, factors.cost(&solution.states), "seed {seed}");
            assert_eq!((solution.cost, solution.bound), (best, best), "seed {seed}");
            // With small tables, the cost is at least the optimum and the bound at most.
            let hurried = factors.minimize(3);
            assert!(hurried.bound <= best && best <= hurried.cost, "seed {seed}: {hurried:?}, best {best}");
        }
    }

    #[test]
    fn a_long_ladder_needs_small_tables() {
        let mut factors = Factors::default();
        for v in 0..2000 {
            factors.variable((0..4).map(|state| (v * 7 + state * 13) % 11).collect());
        }
        for v in 0..1999usize {
            factors.add(v, v + 1, |a, b| if a == b { 0 } else { 3 });
            if v >= 1000 {
                factors.add(v, 1999 - v, |a, b| if a == b { 0 } else { 2 });
            }
        }
        let solution = factors.minimize(1 << 10);
        assert_eq!(solution.cost, solution.bound);
    }
}
