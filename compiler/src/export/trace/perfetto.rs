//! A trace in Perfetto's own form: a stream of `TracePacket`s.
//!
//! The messages below are the few fields we write of `perfetto/protos/perfetto/trace/*.proto`, under their published numbers. Every
//! row is a track of its own below one process track; a span is a begin and an end, a curve a track of counter values. Times
//! are nanoseconds. Packets stand in order of time, so that a reader need not sort them.

use crate::export::trace::Trace;
use prost::Message;

/// A file: packets one after another.
#[derive(Clone, PartialEq, Message)]
pub struct File {
    /// The packets.
    #[prost(message, repeated, tag = "1")]
    pub packet: Vec<Packet>,
}

/// `TracePacket`: one thing that is said.
#[derive(Clone, PartialEq, Message)]
pub struct Packet {
    /// When, in nanoseconds.
    #[prost(uint64, optional, tag = "8")]
    pub timestamp: Option<u64>,
    /// Who says it. All packets of ours come in one sequence.
    #[prost(uint32, optional, tag = "10")]
    pub trusted_packet_sequence_id: Option<u32>,
    /// Something happened on a track.
    #[prost(message, optional, tag = "11")]
    pub track_event: Option<Event>,
    /// A track is named.
    #[prost(message, optional, tag = "60")]
    pub track_descriptor: Option<Track>,
}

/// `TrackDescriptor`.
#[derive(Clone, PartialEq, Message)]
pub struct Track {
    /// Its number in this file.
    #[prost(uint64, optional, tag = "1")]
    pub uuid: Option<u64>,
    /// Its name.
    #[prost(string, optional, tag = "2")]
    pub name: Option<String>,
    /// Set for the one track that all others are below.
    #[prost(message, optional, tag = "3")]
    pub process: Option<Process>,
    /// The track above.
    #[prost(uint64, optional, tag = "5")]
    pub parent_uuid: Option<u64>,
    /// Set for curves.
    #[prost(message, optional, tag = "8")]
    pub counter: Option<Unit>,
    /// How the tracks below are ordered: [`EXPLICIT`].
    #[prost(int32, optional, tag = "11")]
    pub child_ordering: Option<i32>,
    /// Its place among those below the same track.
    #[prost(int32, optional, tag = "12")]
    pub sibling_order_rank: Option<i32>,
}

/// `ProcessDescriptor`.
#[derive(Clone, PartialEq, Message)]
pub struct Process {
    /// Its number.
    #[prost(int32, optional, tag = "1")]
    pub pid: Option<i32>,
    /// Its name.
    #[prost(string, optional, tag = "6")]
    pub process_name: Option<String>,
}

/// `CounterDescriptor`.
#[derive(Clone, PartialEq, Message)]
pub struct Unit {
    /// What is counted: [`BYTES`].
    #[prost(int32, optional, tag = "3")]
    pub unit: Option<i32>,
}

/// `TrackEvent`.
#[derive(Clone, PartialEq, Message)]
pub struct Event {
    /// [`BEGIN`], [`END`] or [`COUNTER`].
    #[prost(int32, optional, tag = "9")]
    pub kind: Option<i32>,
    /// On which track.
    #[prost(uint64, optional, tag = "11")]
    pub track_uuid: Option<u64>,
    /// What kinds of thing.
    #[prost(string, repeated, tag = "22")]
    pub categories: Vec<String>,
    /// What.
    #[prost(string, optional, tag = "23")]
    pub name: Option<String>,
    /// The value of a curve from now on.
    #[prost(int64, optional, tag = "30")]
    pub counter_value: Option<i64>,
}

/// `TrackEvent.TYPE_SLICE_BEGIN`.
pub const BEGIN: i32 = 1;
/// `TrackEvent.TYPE_SLICE_END`.
pub const END: i32 = 2;
/// `TrackEvent.TYPE_COUNTER`.
pub const COUNTER: i32 = 4;
/// `CounterDescriptor.UNIT_SIZE_BYTES`.
pub const BYTES: i32 = 3;
/// `TrackDescriptor.EXPLICIT`.
pub const EXPLICIT: i32 = 3;

/// The number of the process track; rows and curves follow.
const PROCESS: u64 = 1;

/// The bytes of a trace.
pub fn protobuf(trace: &Trace<'_>) -> Vec<u8> {
    file(trace).encode_to_vec()
}

fn file(trace: &Trace<'_>) -> File {
    let process = Track {
        uuid: Some(PROCESS),
        process: Some(Process { pid: Some(1), process_name: Some(trace.run.to_string()) }),
        child_ordering: Some(EXPLICIT),
        ..Track::default()
    };
    let mut named = vec![process];
    let mut events: Vec<(u64, Event)> = Vec::new();
    for track in &trace.rows {
        let uuid = below(&mut named, &track.name, None);
        for span in &track.spans {
            let begin = Event {
                kind: Some(BEGIN),
                track_uuid: Some(uuid),
                categories: vec![span.activity.kind().to_string()],
                name: Some(span.activity.to_string()),
                counter_value: None,
            };
            let end = Event { kind: Some(END), track_uuid: Some(uuid), ..Event::default() };
            let start = nanoseconds(span.start);
            events.push((start, begin));
            events.push((nanoseconds(span.end).max(start), end));
        }
    }
    for counter in &trace.counters {
        let uuid = below(&mut named, &counter.name, Some(Unit { unit: Some(BYTES) }));
        for &(at, bytes) in &counter.points {
            let value = i64::try_from(bytes).unwrap_or(i64::MAX);
            let kind = Some(COUNTER);
            let event = Event { kind, track_uuid: Some(uuid), counter_value: Some(value), ..Event::default() };
            events.push((nanoseconds(at), event));
        }
    }
    // Stable, so that what ends where another begins ends first: spans of a row stand in order.
    events.sort_by_key(|(at, _)| *at);
    let packet = Packet { trusted_packet_sequence_id: Some(1), ..Packet::default() };
    let named = named.into_iter().map(|track| Packet { track_descriptor: Some(track), ..packet.clone() });
    let events = events.into_iter().map(|(at, event)| Packet {
        timestamp: Some(at),
        track_event: Some(event),
        ..packet.clone()
    });
    File { packet: named.chain(events).collect() }
}

/// Names one track more below the process, and gives its number.
fn below(named: &mut Vec<Track>, name: &str, counter: Option<Unit>) -> u64 {
    let rank = named.len() as i32;
    let uuid = PROCESS + named.len() as u64;
    let (name, parent_uuid) = (Some(name.to_string()), Some(PROCESS));
    let track =
        Track { uuid: Some(uuid), name, parent_uuid, counter, sibling_order_rank: Some(rank), ..Track::default() };
    named.push(track);
    uuid
}

fn nanoseconds(microseconds: f64) -> u64 {
    (microseconds.max(0.0) * 1e3).round() as u64
}
