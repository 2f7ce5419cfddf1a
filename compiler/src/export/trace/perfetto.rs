//! Trace in Perfetto's protobuf format: a stream of `TracePacket`s.
//!
//! The messages are the subset of `perfetto/protos/perfetto/trace/*.proto` that is written here, with the published
//! field numbers. Each row is a track below one process track; a span is a begin and an end event, a counter a track of
//! counter values. Times are nanoseconds. Packets are sorted by time, so readers need not sort them.

use crate::export::trace::Trace;
use prost::Message;

/// A sequence of packets.
#[derive(Clone, PartialEq, Message)]
pub struct File {
    #[prost(message, repeated, tag = "1")]
    pub packet: Vec<Packet>,
}

/// `TracePacket`.
#[derive(Clone, PartialEq, Message)]
pub struct Packet {
    /// Nanoseconds.
    #[prost(uint64, optional, tag = "8")]
    pub timestamp: Option<u64>,
    /// All packets belong to one sequence.
    #[prost(uint32, optional, tag = "10")]
    pub trusted_packet_sequence_id: Option<u32>,
    #[prost(message, optional, tag = "11")]
    pub track_event: Option<Event>,
    #[prost(message, optional, tag = "60")]
    pub track_descriptor: Option<Track>,
}

/// `TrackDescriptor`.
#[derive(Clone, PartialEq, Message)]
pub struct Track {
    /// Unique in the file.
    #[prost(uint64, optional, tag = "1")]
    pub uuid: Option<u64>,
    #[prost(string, optional, tag = "2")]
    pub name: Option<String>,
    /// Set for the root track.
    #[prost(message, optional, tag = "3")]
    pub process: Option<Process>,
    #[prost(uint64, optional, tag = "5")]
    pub parent_uuid: Option<u64>,
    /// Set for counters.
    #[prost(message, optional, tag = "8")]
    pub counter: Option<Unit>,
    /// Order of the child tracks: [`EXPLICIT`].
    #[prost(int32, optional, tag = "11")]
    pub child_ordering: Option<i32>,
    /// Index among the tracks with the same parent.
    #[prost(int32, optional, tag = "12")]
    pub sibling_order_rank: Option<i32>,
}

/// `ProcessDescriptor`.
#[derive(Clone, PartialEq, Message)]
pub struct Process {
    #[prost(int32, optional, tag = "1")]
    pub pid: Option<i32>,
    #[prost(string, optional, tag = "6")]
    pub process_name: Option<String>,
}

/// `CounterDescriptor`.
#[derive(Clone, PartialEq, Message)]
pub struct Unit {
    /// [`BYTES`].
    #[prost(int32, optional, tag = "3")]
    pub unit: Option<i32>,
}

/// `TrackEvent`.
#[derive(Clone, PartialEq, Message)]
pub struct Event {
    /// [`BEGIN`], [`END`] or [`COUNTER`].
    #[prost(int32, optional, tag = "9")]
    pub kind: Option<i32>,
    #[prost(uint64, optional, tag = "11")]
    pub track_uuid: Option<u64>,
    #[prost(string, repeated, tag = "22")]
    pub categories: Vec<String>,
    #[prost(string, optional, tag = "23")]
    pub name: Option<String>,
    /// The value of a counter from this time on.
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

/// Id of the process track; rows and counters follow.
const PROCESS: u64 = 1;

pub fn protobuf(trace: &Trace<'_>) -> Vec<u8> {
    let process = Track {
        uuid: Some(PROCESS),
        process: Some(Process { pid: Some(1), process_name: Some(trace.run.to_string()) }),
        child_ordering: Some(EXPLICIT),
        ..Track::default()
    };
    let mut tracks = vec![process];
    let mut events: Vec<(u64, Event)> = Vec::new();
    for track in &trace.rows {
        let uuid = add_track(&mut tracks, &track.name, None);
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
        let uuid = add_track(&mut tracks, &counter.name, Some(Unit { unit: Some(BYTES) }));
        for &(at, bytes) in &counter.points {
            let value = i64::try_from(bytes).unwrap_or(i64::MAX);
            let kind = Some(COUNTER);
            let event = Event { kind, track_uuid: Some(uuid), counter_value: Some(value), ..Event::default() };
            events.push((nanoseconds(at), event));
        }
    }
    // A stable sort keeps the end of a span before the begin of the next one, because the spans of a row are in order.
    events.sort_by_key(|(at, _)| *at);
    let packet = Packet { trusted_packet_sequence_id: Some(1), ..Packet::default() };
    let tracks = tracks.into_iter().map(|track| Packet { track_descriptor: Some(track), ..packet.clone() });
    let events = events.into_iter().map(|(at, event)| Packet {
        timestamp: Some(at),
        track_event: Some(event),
        ..packet.clone()
    });
    File { packet: tracks.chain(events).collect() }.encode_to_vec()
}

/// Adds a track below the process track and returns its id.
fn add_track(tracks: &mut Vec<Track>, name: &str, counter: Option<Unit>) -> u64 {
    let rank = tracks.len() as i32;
    let uuid = PROCESS + tracks.len() as u64;
    let (name, parent_uuid) = (Some(name.to_string()), Some(PROCESS));
    let track =
        Track { uuid: Some(uuid), name, parent_uuid, counter, sibling_order_rank: Some(rank), ..Track::default() };
    tracks.push(track);
    uuid
}

fn nanoseconds(microseconds: f64) -> u64 {
    (microseconds.max(0.0) * 1e3).round() as u64
}
