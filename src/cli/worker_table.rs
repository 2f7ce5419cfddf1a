//! The workers of a simulation as a table; of many workers, those alike share a row.

use crate::cli::stage_rows::{LEADING_ROWS, MAX_ROWS, MAX_UNFOLDED};
use crate::cli::stage_table::table;
use crate::cli::table::folded_rows;
use compiler::text::quantity;

/// A simulated worker: a device, or a tensor-parallel group.
#[derive(Clone, Debug)]
pub struct Worker {
    /// Stage and replica.
    pub name: String,
    /// Fraction of the time that it computes.
    pub busy: f64,
    /// The most micro-batches in flight.
    pub in_flight: usize,
    /// Peak memory per device.
    pub bytes: u64,
}

/// The table of all workers, which have this many devices each.
pub fn workers(workers: &[Worker], degree: u32) -> String {
    let cells = |worker: &Worker| {
        [format!("{:.1} %", worker.busy * 100.0), worker.in_flight.to_string(), quantity::bytes(worker.bytes)]
    };
    let header = ["worker", "busy", "peak in flight", "peak memory"];
    if workers.len() <= MAX_UNFOLDED {
        let rows = workers.iter().map(|worker| [&[worker.name.clone()][..], &cells(worker)].concat()).collect();
        return table(&header, &[1, 2, 3], rows);
    }
    // First worker, last worker, number, figures.
    let mut rows: Vec<(&str, &str, usize, [String; 3])> = Vec::new();
    for worker in workers {
        let cells = cells(worker);
        match rows.last_mut() {
            Some((_, last, count, last_cells)) if *last_cells == cells => (*last, *count) = (&worker.name, *count + 1),
            _ => rows.push((&worker.name, &worker.name, 1, cells)),
        }
    }
    let omitted =
        if rows.len() > MAX_ROWS { rows.drain(LEADING_ROWS..rows.len() - 1).map(|row| row.2).sum() } else { 0 };
    let row = |(first, last, count, cells): (&str, &str, usize, [String; 3])| {
        let name = if first == last { first.to_string() } else { format!("{first} to {last}") };
        let count = if degree > 1 { format!("{count} of {degree}") } else { count.to_string() };
        [&[name, count][..], &cells].concat()
    };
    let header = [&["worker", "workers"][..], &header[1..]].concat();
    let text = table(&header, &[1, 2, 3, 4], rows.into_iter().map(row).collect());
    match omitted {
        0 => text,
        _ => text + &folded_rows(&format!("{omitted} workers")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_alike_share_a_row() {
        let make_workers = |stages: usize, replicas: usize| -> Vec<Worker> {
            let worker = |at: usize| Worker {
                name: format!("{}.{}", at / replicas, at % replicas),
                busy: 0.5,
                in_flight: stages - at / replicas,
                bytes: 1000,
            };
            (0..stages * replicas).map(worker).collect()
        };
        let four_rows = workers(&make_workers(2, 2), 1);
        assert_eq!(four_rows.lines().count(), 5, "{four_rows}");
        let two_rows = workers(&make_workers(2, 96), 8);
        assert_eq!(two_rows.lines().count(), 3, "{two_rows}");
        let words = |line: &str| line.split_whitespace().map(str::to_string).collect::<Vec<_>>().join(" ");
        let second = two_rows.lines().nth(2).map(words).unwrap();
        assert_eq!(second, "1.0 to 1.95 96 of 8 50.0 % 1 1.000 kB");
        let limited = workers(&make_workers(100, 2), 1);
        assert_eq!(limited.lines().count(), 1 + LEADING_ROWS + 1 + 1, "{limited}");
        assert!(limited.ends_with("without 150 workers that differ; `--format json` prints all\n"), "{limited}");
    }
}
