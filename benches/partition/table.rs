//! Markdown tables, and what a run costs: CPU seconds and the most memory.

use std::fs;
use std::time::Instant;

/// A table under way.
pub struct Table {
    text: String,
    columns: usize,
}

impl Table {
    /// A table with a title and these columns.
    pub fn new(title: &str, columns: &[&str]) -> Table {
        let rule = columns.iter().map(|_| "---").collect::<Vec<_>>().join(" | ");
        Table { text: format!("\n## {title}\n\n| {} |\n| {rule} |\n", columns.join(" | ")), columns: columns.len() }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: &[String]) {
        assert_eq!(cells.len(), self.columns, "a row has a cell for every column");
        self.text += &format!("| {} |\n", cells.join(" | "));
    }

    /// Adds a row that is not there for want of data.
    pub fn skipped(&mut self, name: &str) {
        self.text += &format!("| {name} | skipped: no shared data{} |\n", " |".repeat(self.columns - 2));
    }

    /// The Markdown.
    pub fn text(self) -> String {
        self.text
    }
}

/// What something took.
#[derive(Clone, Copy, Default)]
pub struct Spent {
    /// Seconds of this thread on a processor; by the wall clock where the system does not tell.
    pub cpu_seconds: f64,
    /// Mebibytes of the process at its fullest meanwhile, where the system tells.
    pub peak_mib: Option<f64>,
}

impl Spent {
    /// Both, as two cells.
    pub fn cells(&self) -> [String; 2] {
        let peak = self.peak_mib.map_or("–".to_string(), |mib| format!("{mib:.0}"));
        [format!("{:.3}", self.cpu_seconds), peak]
    }
}

/// Does something, and says what it took.
pub fn spending<T>(work: impl FnOnce() -> T) -> (T, Spent) {
    // Linux forgets the peak so far when 5 is written here; elsewhere there is no such file.
    let forgets = fs::write("/proc/self/clear_refs", "5").is_ok();
    let (clock, before) = (Instant::now(), on_processor());
    let value = work();
    let wall = clock.elapsed().as_secs_f64();
    let cpu_seconds = before.zip(on_processor()).map_or(wall, |(before, after)| after - before);
    (value, Spent { cpu_seconds, peak_mib: peak_mib().filter(|_| forgets) })
}

/// Seconds that this thread has run: planning has one thread.
fn on_processor() -> Option<f64> {
    let text = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(text.split(' ').next()?.parse::<f64>().ok()? / 1e9)
}

fn peak_mib() -> Option<f64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<f64>().ok()? / 1024.0)
}
