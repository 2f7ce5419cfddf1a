//! Reads instances of "Piper: Multidimensional Planner for DNN Parallelization": JSON with nodes, their configurations,
//! edges and devices.
//!
//! ```text
//! {"maxDevices": 10, "maxMemoryPerDevice": 8e10, "bandwidth": 2.5e10, "mbsInBatch": 256,
//!  "nodes": [{"id": 1, "name": "node1", "TMPCs": {"1": [{"id": "vanilla", "timePerSample": 25.7, "parameterSize": 1.3e8,
//!    "memoryUsageA": 1.3e7, "memoryUsageB": 2.6e8, "syncTimeFw": {}, "syncTimeBw": {"3": 0}}, …]}}, …],
//!  "edges": [{"sourceId": 1, "destId": 3, "communicationCost": 13107200}, …]}
//! ```
//!
//! `TMPCs` maps a tensor-parallel degree to the choices at that degree. The keys of `syncTimeFw` are ids of
//! predecessors, those of `syncTimeBw` ids of successors. `maxBatchSize` is an alias for the number of micro-batches. A
//! choice uses recomputation if its id says so (`activation recomp`).

use crate::piper::model::{Choice, Hybrid, Layer, Link, MAX_CHOICES, MAX_LAYERS};
use compiler::profile::json::{self, JsonError};
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, de};
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::marker::PhantomData;

/// Maximum file size in bytes.
pub const MAX_BYTES: usize = 256 << 20;

/// Maximum number of devices, and degree of tensor parallelism.
pub const MAX_COUNT: u64 = 4096;

/// Maximum number of micro-batches, as of `--microbatches`.
pub const MAX_MICROBATCHES: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum PiperError {
    #[error("{0}")]
    Json(#[from] JsonError),
    #[error("`nodes` is empty")]
    Empty,
    #[error("{what} has {found} entries; the limit is {limit}")]
    TooMany {
        /// `nodes`, `edges` or the choices of a node.
        what: String,
        found: usize,
        limit: usize,
    },
    #[error("`{field}` is {found}; it must be from 1 to {most}")]
    Count { field: &'static str, found: u64, most: u64 },
    #[error("{place}: `{field}` is {found:?}; it must be {range}")]
    Number {
        /// The node or edge, or the file.
        place: String,
        field: &'static str,
        found: f64,
        range: &'static str,
    },
    #[error("`nodes[{at}]` repeats the id {id} of `nodes[{first}]`")]
    Duplicate {
        /// Index in `nodes`.
        at: usize,
        /// Index of the earlier node.
        first: usize,
        id: i64,
    },
    /// Missing or duplicate choices.
    #[error("node {id}: {what}")]
    Choices { id: i64, what: String },
    /// An edge to an unknown node, or a duplicate edge.
    #[error("`edges[{at}]`: {what}")]
    Edge {
        /// Index in `edges`.
        at: usize,
        what: String,
    },
    #[error("the edges form a cycle, which contains or precedes node {id}")]
    Ring {
        /// A node on the cycle or after it.
        id: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    max_devices: u64,
    max_memory_per_device: f64,
    bandwidth: f64,
    #[serde(alias = "maxBatchSize")]
    mbs_in_batch: u64,
    nodes: Vec<FileNode>,
    edges: Vec<FileEdge>,
}

#[derive(Deserialize)]
struct FileNode {
    id: i64,
    #[serde(default)]
    name: String,
    #[serde(rename = "TMPCs")]
    choices: Entries<u32, Vec<FileChoice>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct FileChoice {
    id: String,
    time_per_sample: f64,
    parameter_size: f64,
    memory_usage_a: f64,
    memory_usage_b: f64,
    sync_time_fw: Entries<i64, f64>,
    sync_time_bw: Entries<i64, f64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct FileEdge {
    source_id: i64,
    dest_id: i64,
    communication_cost: f64,
}

/// A JSON object with numeric keys, without duplicates, in file order.
struct Entries<K, V>(Vec<(K, V)>);

impl<'de, K, V> Deserialize<'de> for Entries<K, V>
where
    K: std::str::FromStr + Ord + Copy,
    V: Deserialize<'de>,
{
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Entries<K, V>, D::Error> {
        struct Object<K, V>(PhantomData<(K, V)>);
        impl<'de, K: std::str::FromStr + Ord + Copy, V: Deserialize<'de>> Visitor<'de> for Object<K, V> {
            type Value = Entries<K, V>;
            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object whose keys are numbers")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<K, V>, A::Error> {
                let (mut entries, mut keys) = (Vec::new(), BTreeSet::new());
                while let Some(key) = map.next_key::<String>()? {
                    let shown: String = key.chars().take(20).filter(|c| !c.is_control()).collect();
                    let number: K =
                        key.parse().map_err(|_| de::Error::custom(format!("key `{shown}` is not a number")))?;
                    if !keys.insert(number) {
                        return Err(de::Error::custom(format!("duplicate key `{shown}`")));
                    }
                    entries.push((number, map.next_value()?));
                }
                Ok(Entries(entries))
            }
        }
        from.deserialize_map(Object(PhantomData))
    }
}

pub fn read(text: &str) -> Result<Hybrid, PiperError> {
    let file: File = json::read(text)?;
    for (what, found, limit) in
        [("`nodes`", file.nodes.len(), MAX_LAYERS), ("`edges`", file.edges.len(), 16 * MAX_LAYERS)]
    {
        if found > limit {
            return Err(PiperError::TooMany { what: what.to_string(), found, limit });
        }
    }
    if file.nodes.is_empty() {
        return Err(PiperError::Empty);
    }
    let counts = [("maxDevices", file.max_devices, MAX_COUNT), ("mbsInBatch", file.mbs_in_batch, MAX_MICROBATCHES)];
    for (field, found, most) in counts {
        if !(1..=most).contains(&found) {
            return Err(PiperError::Count { field, found, most });
        }
    }
    let bytes_per_device = quantity("the file", "maxMemoryPerDevice", file.max_memory_per_device)?;
    if !(1.0..=1e18).contains(&file.bandwidth) {
        let (place, field, range) = ("the file".to_string(), "bandwidth", "from 1 to 1e18");
        return Err(PiperError::Number { place, field, found: file.bandwidth, range });
    }
    let mut index: HashMap<i64, u32> = HashMap::with_capacity(file.nodes.len());
    for (at, node) in file.nodes.iter().enumerate() {
        if let Some(first) = index.insert(node.id, at as u32) {
            return Err(PiperError::Duplicate { at, first: first as usize, id: node.id });
        }
    }
    let links = links(&file.edges, &index)?;
    let mut touching: Vec<Vec<u32>> = vec![Vec::new(); file.nodes.len()];
    for (at, link) in links.iter().enumerate() {
        touching[link.from as usize].push(at as u32);
        touching[link.to as usize].push(at as u32);
    }
    let ids: Vec<i64> = file.nodes.iter().map(|node| node.id).collect();
    let mut layers = Vec::with_capacity(file.nodes.len());
    let mut degrees: BTreeSet<u32> = BTreeSet::new();
    for (at, (node, touching)) in file.nodes.into_iter().zip(touching).enumerate() {
        let neighbours = Neighbours { at: at as u32, links: &links, touching: &touching, ids: &ids };
        let choices = choices(node.id, node.choices.0, &neighbours)?;
        degrees.extend(choices.iter().map(|(degree, _)| *degree));
        layers.push(Layer { name: node.id.to_string(), title: node.name, choices, links: touching });
    }
    if degrees.len() > MAX_CHOICES {
        let what = "the list of tensor-parallel degrees".to_string();
        return Err(PiperError::TooMany { what, found: degrees.len(), limit: MAX_CHOICES });
    }
    let hybrid = Hybrid {
        layers,
        links,
        devices: file.max_devices as u32,
        bytes_per_device,
        bandwidth: file.bandwidth,
        microbatches: file.mbs_in_batch as u32,
    };
    let order = hybrid.order();
    if order.len() < hybrid.layers.len() {
        let ordered: BTreeSet<u32> = order.into_iter().collect();
        let in_ring = (0..hybrid.layers.len()).find(|&layer| !ordered.contains(&(layer as u32))).unwrap_or_default();
        return Err(PiperError::Ring { id: hybrid.layers[in_ring].name.clone() });
    }
    Ok(hybrid)
}

fn quantity(place: &str, field: &'static str, found: f64) -> Result<f64, PiperError> {
    let is_valid = found.is_finite() && (0.0..=1e15).contains(&found);
    let range = "from 0 to 1e15";
    if is_valid { Ok(found) } else { Err(PiperError::Number { place: place.to_string(), field, found, range }) }
}

fn links(edges: &[FileEdge], index: &HashMap<i64, u32>) -> Result<Vec<Link>, PiperError> {
    let mut pairs = BTreeSet::new();
    let mut links = Vec::with_capacity(edges.len());
    for (at, edge) in edges.iter().enumerate() {
        let invalid = |what: String| PiperError::Edge { at, what };
        let node = |id: i64| {
            index.get(&id).copied().ok_or_else(|| invalid(format!("names node {id}, which `nodes` does not have")))
        };
        let (from, to) = (node(edge.source_id)?, node(edge.dest_id)?);
        if !pairs.insert((from, to)) {
            return Err(invalid(format!("{} -> {} is a duplicate", edge.source_id, edge.dest_id)));
        }
        let bytes = quantity(&format!("`edges[{at}]`"), "communicationCost", edge.communication_cost)?;
        links.push(Link { from, to, bytes });
    }
    Ok(links)
}

struct Neighbours<'a> {
    at: u32,
    links: &'a [Link],
    touching: &'a [u32],
    ids: &'a [i64],
}

fn choices(
    id: i64,
    file_choices: Vec<(u32, Vec<FileChoice>)>,
    neighbours: &Neighbours<'_>,
) -> Result<Vec<(u32, Vec<Choice>)>, PiperError> {
    let invalid = |what: String| PiperError::Choices { id, what };
    let place = format!("node {id}");
    let mut by_degree: Vec<(u32, Vec<Choice>)> = Vec::new();
    for (degree, file_choices) in file_choices {
        if !(1..=MAX_COUNT as u32).contains(&degree) {
            return Err(invalid(format!("the tensor-parallel degree {degree} must be from 1 to {MAX_COUNT}")));
        }
        if file_choices.len() > MAX_CHOICES {
            let what = format!("`TMPCs[{degree}]` of node {id}");
            return Err(PiperError::TooMany { what, found: file_choices.len(), limit: MAX_CHOICES });
        }
        let mut choices: Vec<Choice> = Vec::with_capacity(file_choices.len());
        for choice in file_choices {
            if choices.iter().any(|known| known.name == choice.id) {
                return Err(invalid(format!(
                    "two choices of degree {degree} are named `{}`",
                    choice.id.escape_debug()
                )));
            }
            choices.push(Choice {
                time: quantity(&place, "timePerSample", choice.time_per_sample)?,
                weight_bytes: quantity(&place, "parameterSize", choice.parameter_size)?,
                bytes_in_flight: quantity(&place, "memoryUsageA", choice.memory_usage_a)?,
                bytes_standing: quantity(&place, "memoryUsageB", choice.memory_usage_b)?,
                sync: sync(id, &choice, neighbours)?,
                recomputes: choice.id.contains("recomp"),
                name: choice.id,
            });
        }
        if !choices.is_empty() {
            by_degree.push((degree, choices));
        }
    }
    if by_degree.is_empty() {
        return Err(invalid("`TMPCs` has no choice".to_string()));
    }
    by_degree.sort_by_key(|(degree, _)| *degree);
    Ok(by_degree)
}

/// For each edge of a layer, the extra bytes that a choice transfers.
fn sync(id: i64, choice: &FileChoice, neighbours: &Neighbours<'_>) -> Result<Vec<f64>, PiperError> {
    let invalid = |what: String| PiperError::Choices { id, what };
    let name = choice.id.escape_debug();
    let place = format!("node {id}, choice `{name}`");
    let forward: HashMap<i64, f64> = choice.sync_time_fw.0.iter().copied().collect();
    let backward: HashMap<i64, f64> = choice.sync_time_bw.0.iter().copied().collect();
    let mut counts = [0usize; 2];
    let mut sync = Vec::with_capacity(neighbours.touching.len());
    for &link in neighbours.touching {
        let link = &neighbours.links[link as usize];
        let is_read = link.to == neighbours.at;
        let other = neighbours.ids[if is_read { link.from } else { link.to } as usize];
        let (field, list) = if is_read { ("syncTimeFw", &forward) } else { ("syncTimeBw", &backward) };
        let Some(&bytes) = list.get(&other) else {
            return Err(invalid(format!(
                "`{field}` of choice `{name}` has no entry for node {other}, to which there is \
                an edge"
            )));
        };
        counts[usize::from(is_read)] += 1;
        sync.push(quantity(&place, field, bytes)?);
    }
    if counts != [backward.len(), forward.len()] {
        return Err(invalid(format!("`syncTimeFw` or `syncTimeBw` of choice `{name}` names a node without an edge")));
    }
    Ok(sync)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{"maxDevices": 4, "maxMemoryPerDevice": 100, "bandwidth": 10, "mbsInBatch": 8,
        "nodes": [
          {"id": 7, "name": "a", "TMPCs": {"2": [{"id": "half", "timePerSample": 1.5, "parameterSize": 3, "memoryUsageA": 1,
            "memoryUsageB": 2, "syncTimeFw": {}, "syncTimeBw": {"3": 0.25}}],
            "1": [{"id": "activation recomp", "timePerSample": 4, "parameterSize": 6, "memoryUsageA": 0, "memoryUsageB": 4,
            "syncTimeFw": {}, "syncTimeBw": {"3": 0}}]}},
          {"id": 3, "TMPCs": {"1": [{"id": "vanilla", "timePerSample": 2, "parameterSize": 0, "memoryUsageA": 1,
            "memoryUsageB": 0, "syncTimeFw": {"7": 0.5}, "syncTimeBw": {}}]}}],
        "edges": [{"sourceId": 7, "destId": 3, "communicationCost": 5}]}"#;

    #[test]
    fn reads() {
        let hybrid = read(FILE).unwrap();
        assert_eq!((hybrid.devices, hybrid.microbatches, hybrid.bandwidth), (4, 8, 10.0));
        let [first, second] = hybrid.layers.as_slice() else { panic!("two layers") };
        assert_eq!(first.choices.iter().map(|(degree, _)| *degree).collect::<Vec<_>>(), [1, 2]);
        assert!(first.at(1)[0].recomputes && !first.at(2)[0].recomputes && first.at(3).is_empty());
        assert_eq!(
            (first.at(2)[0].sync.as_slice(), second.at(1)[0].sync.as_slice()),
            ([0.25].as_slice(), [0.5].as_slice())
        );
        assert_eq!(hybrid.links, [Link { from: 0, to: 1, bytes: 5.0 }]);
        assert_eq!(hybrid.order(), [0, 1]);
        assert_eq!(read(&FILE.replace("mbsInBatch", "maxBatchSize")).unwrap(), hybrid);
    }

    #[test]
    fn refuses() {
        let with = |from: &str, to: &str| read(&FILE.replace(from, to)).unwrap_err().to_string();
        assert_eq!(with("\"id\": 3", "\"id\": 7"), "`nodes[1]` repeats the id 7 of `nodes[0]`");
        assert_eq!(with("\"destId\": 3", "\"destId\": 9"), "`edges[0]`: names node 9, which `nodes` does not have");
        assert_eq!(with("1.5", "-1"), "node 7: `timePerSample` is -1.0; it must be from 0 to 1e15");
        assert_eq!(with("\"maxDevices\": 4", "\"maxDevices\": 0"), "`maxDevices` is 0; it must be from 1 to 4096");
        assert_eq!(read(&FILE.replace("\"mbsInBatch\": 8", "\"mbsInBatch\": 1048576")).unwrap().microbatches, 1 << 20);
        let error = with("\"mbsInBatch\": 8", "\"mbsInBatch\": 1048577");
        assert_eq!(error, "`mbsInBatch` is 1048577; it must be from 1 to 1048576");
        assert_eq!(
            with("\"bandwidth\": 10", "\"bandwidth\": 0"),
            "the file: `bandwidth` is 0.0; it must be from 1 to 1e18"
        );
        assert!(with("\"1\": [{\"id\": \"activation", "\"2\": [{\"id\": \"activation").contains("duplicate key `2`"));
        assert!(with("\"2\": [{\"id\": \"half", "\"x\": [{\"id\": \"half").contains("key `x` is not a number"));
        assert!(with("\"syncTimeFw\": {\"7\": 0.5}", "\"syncTimeFw\": {}").contains("no entry for node 7"));
        assert!(
            with("\"syncTimeFw\": {\"7\": 0.5}", "\"syncTimeFw\": {\"7\": 0, \"8\": 0}").contains("without an edge")
        );
        let ring =
            FILE.replace("\"destId\": 3", "\"destId\": 7").replace("{\"3\":", "{\"7\":").replace("{\"7\": 0.5}", "{}");
        let ring = ring.replace("\"syncTimeFw\": {}", "\"syncTimeFw\": {\"7\": 0}");
        assert!(read(&ring).is_err(), "an edge from a node to itself");
        assert!(
            with("\"TMPCs\": {\"1\": [{\"id\": \"vanilla\"", "\"TMPCs\": {\"0\": [{\"id\": \"vanilla\"")
                .contains("the tensor-parallel degree 0 must be from 1 to 4096")
        );
    }
}
