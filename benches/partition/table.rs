//! Markdown tables, and resource usage: CPU seconds and peak memory.

use std::fs;
use std::time::Instant;

pub struct Table {
    text: String,
    columns: usize,
}

impl Table {
    pub fn new(title: &str, columns: &[&str]) -> Table {
        let rule = columns.iter().map(|_| "---").collect::<Vec<_>>().join(" | ");
        Table { text: format!("\n## {title}\n\n| {} |\n| {rule} |\n", columns.join(" | ")), columns: columns.len() }
    }

    pub fn row(&mut self, cells: &[String]) {
        assert_eq!(cells.len(), self.columns, "a row has a cell for every column");
        self.text += &format!("| {} |\n", cells.join(" | "));
    }

    /// Adds a placeholder row for missing data.
    pub fn skipped_row(&mut self, name: &str) {
        self.text += &format!("| {name} | skipped: no shared data{} |\n", " |".repeat(self.columns - 2));
    }

    pub fn text(self) -> String {
        self.text
    }
}

/// Resource usage.
#[derive(Clone, Copy, Default)]
pub struct ResourceUsage {
    /// CPU seconds of this thread; wall time if the system does not report it.
    pub cpu_seconds: f64,
    /// Peak memory of the process in MiB, if the system reports it.
    pub peak_mib: Option<f64>,
}

impl ResourceUsage {
    /// Both as table cells.
    pub fn cells(&self) -> [String; 2] {
        let peak = self.peak_mib.map_or("–".to_string(), |mib| format!("{mib:.0}"));
        [format!("{:.3}", self.cpu_seconds), peak]
    }
}

/// Measures the resource usage of `work`.
pub fn measure_usage<T>(work: impl FnOnce() -> T) -> (T, ResourceUsage) {
    // On Linux, writing 5 resets the peak; other systems have no such file.
    let resets_peak = fs::write("/proc/self/clear_refs", "5").is_ok();
    let (clock, before) = (Instant::now(), thread_cpu_seconds());
    let value = work();
    let wall = clock.elapsed().as_secs_f64();
    let cpu_seconds = before.zip(thread_cpu_seconds()).map_or(wall, |(before, after)| after - before);
    (value, ResourceUsage { cpu_seconds, peak_mib: peak_mib().filter(|_| resets_peak) })
}

/// CPU seconds of this thread; planning is single-threaded.
fn thread_cpu_seconds() -> Option<f64> {
    let text = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(text.split(' ').next()?.parse::<f64>().ok()? / 1e9)
}

fn peak_mib() -> Option<f64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<f64>().ok()? / 1024.0)
}
