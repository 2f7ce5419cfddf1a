//! What rounds of training gave, and what is made of it: medians, and ratios of rounds that ran one behind the other.

use std::fs;

/// One round of one way to train.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// Samples in a second by the wall clock.
    pub samples_per_s: f64,
    /// Seconds on processors for each minibatch, over all threads and processes.
    pub cpu_seconds: f64,
}

impl Round {
    /// So many minibatches in so many seconds.
    pub fn of(seconds: f64, cpu_seconds: f64, steps: u32, batch: usize) -> Round {
        let steps = f64::from(steps);
        Round { samples_per_s: steps * batch as f64 / seconds, cpu_seconds: cpu_seconds / steps }
    }
}

/// The middle of some numbers, the mean of two for an even count; nothing of none.
pub fn median(mut numbers: Vec<f64>) -> Option<f64> {
    numbers.sort_by(f64::total_cmp);
    let half = numbers.len() / 2;
    match numbers.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(numbers[half]),
        _ => Some((numbers[half - 1] + numbers[half]) / 2.0),
    }
}

/// The median over rounds of one figure.
pub fn middle(rounds: &[Round], figure: impl Fn(&Round) -> f64) -> Option<f64> {
    median(rounds.iter().map(figure).collect())
}

/// The median over rounds of how many times as fast `ours` was as `other` in the same round.
pub fn faster(ours: &[Round], other: &[Round]) -> Option<f64> {
    median(ours.iter().zip(other).map(|(a, b)| a.samples_per_s / b.samples_per_s).collect())
}

/// The median over rounds of how many times as much processor time `other` took.
pub fn cheaper(ours: &[Round], other: &[Round]) -> Option<f64> {
    median(ours.iter().zip(other).map(|(a, b)| b.cpu_seconds / a.cpu_seconds).collect())
}

/// Seconds that all living threads of this process have run; nothing where the system does not tell.
pub fn on_processors() -> Option<f64> {
    let mut nanoseconds = 0.0;
    for thread in fs::read_dir("/proc/self/task").ok()? {
        let text = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        nanoseconds += text.split(' ').next()?.parse::<f64>().ok()?;
    }
    Some(nanoseconds / 1e9)
}
