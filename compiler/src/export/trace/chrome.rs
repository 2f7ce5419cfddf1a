//! Trace as JSON for Perfetto and `chrome://tracing`.
//!
//! Each [`Track`](crate::simulate::Track) is a thread with its name, each counter is a counter event. The process name
//! is the kind of run; `ts` and `dur` are microseconds.

use crate::export::trace::Trace;
use serde_json::{Value, json};

pub fn json(trace: &Trace<'_>) -> String {
    let mut events = vec![json!({"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": trace.run}})];
    for (row, track) in trace.rows.iter().enumerate() {
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
    for counter in &trace.counters {
        for (ts, bytes) in &counter.points {
            events.push(json!({"ph": "C", "name": counter.name, "pid": 0, "ts": ts, "args": {"bytes": bytes}}));
        }
    }
    let document: Value = json!({"displayTimeUnit": "ms", "traceEvents": events});
    document.to_string()
}
