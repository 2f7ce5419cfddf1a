//! Statistics of training rounds: medians, and ratios of adjacent rounds.

/// One round of one training mode.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// By wall time.
    pub samples_per_s: f64,
    /// CPU seconds per minibatch, over all threads and processes.
    pub cpu_seconds: f64,
}

impl Round {
    pub fn of(seconds: f64, cpu_seconds: f64, steps: u32, batch: usize) -> Round {
        let steps = f64::from(steps);
        Round { samples_per_s: steps * batch as f64 / seconds, cpu_seconds: cpu_seconds / steps }
    }
}

/// Two runs at the same time.
pub fn together([first, second]: [Round; 2]) -> Round {
    Round {
        samples_per_s: first.samples_per_s + second.samples_per_s,
        // Each counts the threads of both.
        cpu_seconds: (first.cpu_seconds + second.cpu_seconds) / 4.0,
    }
}

/// `None` for an empty list.
pub fn median(mut numbers: Vec<f64>) -> Option<f64> {
    numbers.sort_by(f64::total_cmp);
    let half = numbers.len() / 2;
    match numbers.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(numbers[half]),
        _ => Some((numbers[half - 1] + numbers[half]) / 2.0),
    }
}

/// The median of one figure over the rounds.
pub fn median_of(rounds: &[Round], figure: impl Fn(&Round) -> f64) -> Option<f64> {
    median(rounds.iter().map(figure).collect())
}

/// The median speedup of `ours` over `theirs` in the same rounds.
pub fn faster(ours: &[Round], theirs: &[Round]) -> Option<f64> {
    median(ours.iter().zip(theirs).map(|(a, b)| a.samples_per_s / b.samples_per_s).collect())
}

/// The median ratio of CPU times, `theirs` over `ours`.
pub fn cheaper(ours: &[Round], theirs: &[Round]) -> Option<f64> {
    median(ours.iter().zip(theirs).map(|(a, b)| b.cpu_seconds / a.cpu_seconds).collect())
}

/// CPU seconds of all threads, also of those that ended; `None` if the system does not report them.
#[cfg(unix)]
pub fn process_cpu_seconds() -> Option<f64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes the time through the pointer.
    let is_available = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) } == 0;
    is_available.then_some(time.tv_sec as f64 + time.tv_nsec as f64 / 1e9)
}

#[cfg(not(unix))]
pub fn process_cpu_seconds() -> Option<f64> {
    None
}
