//! A timeline as a trace that Perfetto and `chrome://tracing` open.
//!
//! One row for each [`Track`], named as the track: workers first, then links. Simulation and training write the same rows, so the
//! two files can be laid above each other. `pid` tells which run it is, `ts` and `dur` are microseconds.

use serde_json::{Value, json};

use crate::simulate::Track;

/// The JSON text of a trace with these rows, in this order. `run` names it: `simulation` or `training`.
pub fn trace<'a>(run: &str, tracks: impl IntoIterator<Item = &'a Track>) -> String {
    let mut events = vec![json!({"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": run}})];
    for (row, track) in tracks.into_iter().enumerate() {
        events.push(json!({"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": track.name}}));
        events.push(json!({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": row, "args": {"sort_index": row}}));
        for span in &track.spans {
            events.push(json!({
                "ph": "X",
                "name": span.activity.to_string(),
                "cat": span.activity.kind(),
                "pid": 0,
                "tid": row,
                "ts": span.start,
                "dur": span.end - span.start,
            }));
        }
    }
    let whole: Value = json!({"displayTimeUnit": "ms", "traceEvents": events});
    whole.to_string()
}
