//! Traces of one run in both formats have the same rows, spans and counters.

use compiler::export::trace::encode::encode;
use compiler::export::trace::perfetto::{self, BEGIN, BYTES, COUNTER, END};
use compiler::export::trace::{Form, Trace};
use compiler::plan::schedule::Schedule;
use compiler::schedule::Pipeline;
use compiler::schedule::generators::schedule;
use compiler::schedule::semantics::StepCount;
use compiler::simulate::run::{Machine, simulate};
use compiler::simulate::{Activity, Span, Timeline, Track};
use prost::Message;
use serde_json::Value;
use std::collections::BTreeMap;

fn timeline(minibatches: u32) -> Timeline {
    let mut pipeline = Pipeline::balanced(&[2, 1], 2.0);
    pipeline.stages[0].all_reduce = 0.5;
    pipeline.edges[0].forward_us = 0.25;
    pipeline.stages.iter_mut().for_each(|stage| (stage.param_bytes, stage.saved_bytes) = (1000, 10));
    let program = schedule(Schedule::OneFOneBRr, &pipeline, StepCount::minibatches(minibatches)).unwrap();
    simulate(&program, &pipeline, &Machine::of(&pipeline)).unwrap()
}

/// Row, name, start and end in nanoseconds.
type Spans = Vec<(String, String, u64, u64)>;
type Points = Vec<(String, u64, u64)>;

fn read_json(trace: &Trace<'_>) -> (Vec<String>, Spans, Points) {
    let value: Value = serde_json::from_slice(&encode(trace, "run.json")).unwrap();
    let nanoseconds = |value: &Value| (value.as_f64().unwrap() * 1e3).round() as u64;
    let (mut rows, mut spans, mut points) = (Vec::new(), Vec::new(), Vec::new());
    for event in value["traceEvents"].as_array().unwrap() {
        let name = event["name"].as_str().unwrap().to_string();
        match event["ph"].as_str().unwrap() {
            "M" if name == "thread_name" => rows.push(event["args"]["name"].as_str().unwrap().to_string()),
            "X" => {
                let start = nanoseconds(&event["ts"]);
                let end = (event["ts"].as_f64().unwrap() + event["dur"].as_f64().unwrap()) * 1e3;
                spans.push((rows[event["tid"].as_u64().unwrap() as usize].clone(), name, start, end.round() as u64));
            }
            "C" => points.push((name, nanoseconds(&event["ts"]), event["args"]["bytes"].as_u64().unwrap())),
            _ => {}
        }
    }
    (rows, spans, points)
}

fn read_perfetto(trace: &Trace<'_>) -> (Vec<String>, Spans, Points) {
    let file = perfetto::File::decode(&encode(trace, "run.pftrace")[..]).unwrap();
    let mut names = BTreeMap::new();
    let mut rows = Vec::new();
    let mut open: BTreeMap<u64, (String, u64)> = BTreeMap::new();
    let (mut spans, mut points, mut time) = (Vec::new(), Vec::new(), 0);
    for packet in &file.packet {
        if let Some(track) = &packet.track_descriptor {
            let name = match (&track.process, &track.name) {
                (Some(process), _) => process.process_name.clone().unwrap(),
                (None, name) => name.clone().unwrap(),
            };
            if track.process.is_none() {
                assert_eq!(track.parent_uuid, Some(1));
                match &track.counter {
                    Some(counter) => assert_eq!(counter.unit, Some(BYTES)),
                    None => rows.push(name.clone()),
                }
            }
            assert!(names.insert(track.uuid.unwrap(), name).is_none(), "a track number twice");
            continue;
        }
        let (at, event) = (packet.timestamp.unwrap(), packet.track_event.as_ref().unwrap());
        assert!(at >= time, "packets stand in order of time");
        time = at;
        let uuid = event.track_uuid.unwrap();
        let row = names[&uuid].clone();
        match event.kind.unwrap() {
            BEGIN => assert!(open.insert(uuid, (event.name.clone().unwrap(), at)).is_none(), "{row} overlaps"),
            END => {
                let (name, start) = open.remove(&uuid).unwrap();
                spans.push((row, name, start, at));
            }
            COUNTER => points.push((row, at, event.counter_value.unwrap() as u64)),
            kind => panic!("an event of type {kind}"),
        }
    }
    assert!(open.is_empty());
    (rows, spans, points)
}

#[test]
fn both_forms_say_the_same() {
    let timeline = timeline(4);
    let trace = Trace::simulation(&timeline);
    let (rows, mut spans, mut points) = read_json(&trace);
    assert_eq!(rows, ["0.0", "0.1", "1.0", "0.0 > 1.0", "0.1 > 1.0", "all-reduce 0"]);
    // Eight forwards, eight backwards, four transfers, two all-reduces.
    assert_eq!(spans.len(), 22);
    assert!(spans.iter().any(|(row, name, ..)| row == "0.1" && name == "0F3"));
    assert!(spans.iter().any(|(row, name, ..)| row == "all-reduce 0" && name == "all-reduce 0 round 1"));
    assert!(points.iter().any(|(name, ..)| name == "memory 1.0"));
    let (perfetto_rows, mut perfetto_spans, mut perfetto_points) = read_perfetto(&trace);
    assert_eq!(rows, perfetto_rows);
    spans.sort();
    perfetto_spans.sort();
    assert_eq!(spans, perfetto_spans);
    points.sort();
    perfetto_points.sort();
    assert_eq!(points, perfetto_points);
}

#[test]
fn training_has_the_rows_of_its_simulation() {
    let timeline = timeline(4);
    let measured: Vec<Track> = timeline.workers.clone();
    let rows = |trace: &Trace<'_>| read_perfetto(trace).0;
    let (simulated, trained) = (rows(&Trace::simulation(&timeline)), rows(&Trace::training(&measured)));
    assert_eq!(simulated[..trained.len()], trained);
}

/// A measured span may be shorter than a nanosecond, and adjacent spans must not overlap.
#[test]
fn spans_without_length_are_kept() {
    let span = |start, end| Span { activity: Activity::Wait, start, end };
    let track = Track { name: "0.0".to_string(), spans: vec![span(0.0, 1.0), span(1.0, 1.0), span(1.0, 2.0)] };
    let tracks = [track];
    let (_, spans, _) = read_perfetto(&Trace::training(&tracks));
    assert_eq!(
        spans.iter().map(|(.., start, end)| (*start, *end)).collect::<Vec<_>>(),
        [(0, 1000), (1000, 1000), (1000, 2000)]
    );
}

/// The published field numbers as bytes: packet 1, timestamp 8, sequence 10, event 11, descriptor 60.
#[test]
fn fields_have_their_published_numbers() {
    let track =
        Track { name: "w".to_string(), spans: vec![Span { activity: Activity::Wait, start: 0.001, end: 0.002 }] };
    let tracks = [track];
    let bytes = encode(&Trace::training(&tracks), "a.perfetto-trace");
    let expected: Vec<u8> = [
        // packet { sequence 1, descriptor { uuid 1, process { pid 1, name "training" }, ordering explicit } }
        &[0x0a, 23, 0x50, 1, 0xe2, 0x03, 18, 0x08, 1, 0x1a, 12, 0x08, 1, 0x32, 8][..],
        b"training",
        &[0x58, 3],
        // packet { sequence 1, descriptor { uuid 2, name "w", parent 1, rank 1 } }
        &[0x0a, 14, 0x50, 1, 0xe2, 0x03, 9, 0x08, 2, 0x12, 1, b'w', 0x28, 1, 0x60, 1],
        // packet { timestamp 1, sequence 1, event { begin, track 2, category "wait", name "wait" } }
        &[0x0a, 24, 0x40, 1, 0x50, 1, 0x5a, 18, 0x48, 1, 0x58, 2, 0xb2, 0x01, 4],
        b"wait",
        &[0xba, 0x01, 4],
        b"wait",
        // packet { timestamp 2, sequence 1, event { end, track 2 } }
        &[0x0a, 10, 0x40, 2, 0x50, 1, 0x5a, 4, 0x48, 2, 0x58, 2],
    ]
    .concat();
    assert_eq!(bytes, expected);
}

#[test]
fn the_name_of_the_file_says_the_form() {
    assert_eq!(["a.pftrace", "b.perfetto-trace"].map(Form::of), [Form::Perfetto; 2]);
    assert_eq!(["a.json", "trace", "pftrace.json"].map(Form::of), [Form::Chrome; 3]);
}
