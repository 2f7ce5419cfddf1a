//! Reads instances of "Efficient Algorithms for Device Placement of DNN Graph Operators": JSON with nodes, edges and
//! devices.
//!
//! ```text
//! {"maxFPGAs": 6, "maxSizePerFPGA": 1.7e10, "nodes": [{"id": 1, "name": "node1", "fpgaLatency": 0.7, "size": 5e7,
//!   "isBackwardNode": 0, "colorClass": 1}, …], "edges": [{"sourceId": 1, "destId": 3, "cost": 0.002}, …]}
//! ```
//!
//! Devices are the file's accelerators (`maxFPGAs`). [`read_with_hosts`] also reads the hosts: their number (`maxCPUs`),
//! the time of each node on one (`cpuLatency`), and the nodes that run on hosts only (`supportedOnFpga`). An output has
//! one cost; if its edges have different costs, the maximum counts.

use crate::placement::model::{MAX_NODES, Node, Placement};
use compiler::profile::json::{self, JsonError};
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;

/// Maximum file size in bytes.
pub const MAX_BYTES: usize = 256 << 20;

const MAX_DEVICES: u64 = 4096;

#[derive(Debug, thiserror::Error)]
pub enum PlacementError {
    #[error("{0}")]
    Json(#[from] JsonError),
    #[error("`nodes` is empty")]
    Empty,
    #[error("`{what}` has {found} entries; the limit is {limit}")]
    TooMany {
        /// `nodes` or `edges`.
        what: &'static str,
        found: usize,
        limit: usize,
    },
    #[error("`maxFPGAs` is {found}; it must be from 1 to {MAX_DEVICES}")]
    Devices { found: u64 },
    #[error("{place}: `{field}` is {found:?}; it must be from 0 to 1e15")]
    Number {
        /// The node or edge, or the file.
        place: String,
        field: &'static str,
        found: f64,
    },
    #[error("`nodes[{at}]` repeats the id {id} of `nodes[{first}]`")]
    Duplicate {
        /// Index in `nodes`.
        at: usize,
        /// Index of the earlier node.
        first: usize,
        id: i64,
    },
    #[error("`edges[{at}]` names node {id}, which `nodes` does not have")]
    UnknownNode {
        /// Index in `edges`.
        at: usize,
        id: i64,
    },
    #[error("node {id} is not supported on an accelerator (`supportedOnFpga`), and no host is used")]
    Unsupported { id: i64 },
    #[error("`maxCPUs` is {found}; it must be from 1 to {MAX_DEVICES}")]
    Hosts { found: u64 },
    #[error("node {id} has no `cpuLatency`, its time on a CPU")]
    NoHostTime { id: i64 },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    #[serde(rename = "maxFPGAs")]
    devices: u64,
    #[serde(rename = "maxSizePerFPGA")]
    bytes_per_device: f64,
    #[serde(rename = "maxCPUs", default)]
    hosts: Value,
    nodes: Vec<FileNode>,
    edges: Vec<FileEdge>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct FileNode {
    id: i64,
    #[serde(default)]
    name: String,
    fpga_latency: f64,
    #[serde(default)]
    cpu_latency: Value,
    #[serde(default)]
    size: f64,
    #[serde(default)]
    is_backward_node: Value,
    #[serde(default)]
    color_class: Option<i64>,
    #[serde(default)]
    supported_on_fpga: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct FileEdge {
    source_id: i64,
    dest_id: i64,
    cost: f64,
}

/// Parses an instance without its hosts.
pub fn read(text: &str) -> Result<Placement, PlacementError> {
    parse(text, false)
}

/// Parses an instance with its hosts. There is at least one.
pub fn read_with_hosts(text: &str) -> Result<Placement, PlacementError> {
    parse(text, true)
}

fn parse(text: &str, with_hosts: bool) -> Result<Placement, PlacementError> {
    let file: File = json::read(text)?;
    for (what, found) in [("nodes", file.nodes.len()), ("edges", file.edges.len())] {
        let limit = if what == "nodes" { MAX_NODES } else { 16 * MAX_NODES };
        if found > limit {
            return Err(PlacementError::TooMany { what, found, limit });
        }
    }
    if file.nodes.is_empty() {
        return Err(PlacementError::Empty);
    }
    if !(1..=MAX_DEVICES).contains(&file.devices) {
        return Err(PlacementError::Devices { found: file.devices });
    }
    let hosts = if with_hosts { file.hosts.as_u64().unwrap_or(0) } else { 0 };
    if with_hosts && !(1..=MAX_DEVICES).contains(&hosts) {
        return Err(PlacementError::Hosts { found: hosts });
    }
    let check_number = |place: &dyn Fn() -> String, field, found: f64| {
        let is_valid = found.is_finite() && (0.0..=1e15).contains(&found);
        if is_valid { Ok(found) } else { Err(PlacementError::Number { place: place(), field, found }) }
    };
    let bytes_per_device = check_number(&|| "the file".to_string(), "maxSizePerFPGA", file.bytes_per_device)?;
    let mut index: HashMap<i64, usize> = HashMap::with_capacity(file.nodes.len());
    let mut nodes = Vec::with_capacity(file.nodes.len());
    for (at, node) in file.nodes.into_iter().enumerate() {
        if let Some(first) = index.insert(node.id, at) {
            return Err(PlacementError::Duplicate { at, first, id: node.id });
        }
        let is_on_hosts_only =
            matches!(node.supported_on_fpga, Value::Bool(false)) || node.supported_on_fpga.as_f64() == Some(0.0);
        if is_on_hosts_only && !with_hosts {
            return Err(PlacementError::Unsupported { id: node.id });
        }
        let place = || format!("node {}", node.id);
        let time = check_number(&place, "fpgaLatency", node.fpga_latency)?;
        let host_time = match with_hosts {
            true => {
                let found = node.cpu_latency.as_f64().ok_or(PlacementError::NoHostTime { id: node.id })?;
                check_number(&place, "cpuLatency", found)?
            }
            false => 0.0,
        };
        nodes.push(Node {
            time: if is_on_hosts_only { f64::INFINITY } else { time },
            host_time,
            bytes: check_number(&place, "size", node.size)?,
            name: node.id.to_string(),
            title: node.name,
            transfer: 0.0,
            colour: node.color_class.map(|colour| colour as u64),
            is_backward: node.is_backward_node == Value::Bool(true)
                || node.is_backward_node.as_f64().is_some_and(|flag| flag != 0.0),
            readers: Vec::new(),
        });
    }
    for (at, edge) in file.edges.iter().enumerate() {
        let node_index = |id: i64| index.get(&id).copied().ok_or(PlacementError::UnknownNode { at, id });
        let (from, to) = (node_index(edge.source_id)?, node_index(edge.dest_id)?);
        let cost = check_number(&|| format!("`edges[{at}]`"), "cost", edge.cost)?;
        nodes[from].transfer = nodes[from].transfer.max(cost);
        if from != to {
            nodes[from].readers.push(to as u32);
        }
    }
    for node in &mut nodes {
        node.readers.sort_unstable();
        node.readers.dedup();
    }
    Ok(Placement { nodes, devices: file.devices as u32, hosts: hosts as u32, bytes_per_device })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{"maxFPGAs": 2, "maxSizePerFPGA": 100, "maxCPUs": 1,
        "nodes": [{"id": 7, "name": "a", "fpgaLatency": 1.5, "size": 10, "isBackwardNode": 0, "colorClass": 1, "supportedOnFpga": 1},
                  {"id": 3, "fpgaLatency": 2, "isBackwardNode": true}],
        "edges": [{"sourceId": 7, "destId": 3, "cost": 0.5, "size": 4}, {"sourceId": 7, "destId": 3, "cost": 0.25}]}"#;

    #[test]
    fn reads() {
        let placement = read(FILE).unwrap();
        assert_eq!((placement.devices, placement.nodes.len()), (2, 2));
        let [first, second] = placement.nodes.as_slice() else { panic!("two nodes") };
        assert_eq!((first.name.as_str(), first.time, first.transfer, first.colour), ("7", 1.5, 0.5, Some(1)));
        assert_eq!((first.readers.as_slice(), second.is_backward, second.colour), ([1].as_slice(), true, None));
    }

    #[test]
    fn refuses() {
        let with = |from: &str, to: &str| read(&FILE.replace(from, to)).unwrap_err().to_string();
        assert_eq!(with("\"id\": 3", "\"id\": 7"), "`nodes[1]` repeats the id 7 of `nodes[0]`");
        assert_eq!(with("\"destId\": 3", "\"destId\": 9"), "`edges[0]` names node 9, which `nodes` does not have");
        assert_eq!(with("1.5", "-1"), "node 7: `fpgaLatency` is -1.0; it must be from 0 to 1e15");
        assert_eq!(with("\"maxFPGAs\": 2", "\"maxFPGAs\": 0"), "`maxFPGAs` is 0; it must be from 1 to 4096");
        let error = with("\"supportedOnFpga\": 1", "\"supportedOnFpga\": false");
        assert!(error.starts_with("node 7 is not supported on an accelerator"), "{error}");
    }

    #[test]
    fn reads_hosts() {
        let text = FILE.replace("\"fpgaLatency\"", "\"cpuLatency\": 15, \"fpgaLatency\"");
        let placement = read_with_hosts(&text).unwrap();
        assert_eq!((placement.hosts, placement.nodes[0].host_time, placement.nodes[0].time), (1, 15.0, 1.5));
        assert_eq!(read(&text).unwrap(), read(FILE).unwrap());
        let host_only = read_with_hosts(&text.replace("\"supportedOnFpga\": 1", "\"supportedOnFpga\": false")).unwrap();
        assert_eq!((host_only.nodes[0].time, host_only.nodes[0].host_time), (f64::INFINITY, 15.0));
        let error = |text: &str| read_with_hosts(text).unwrap_err().to_string();
        assert_eq!(error(FILE), "node 7 has no `cpuLatency`, its time on a CPU");
        let no_hosts = text.replace("\"maxCPUs\": 1", "\"maxCPUs\": 0");
        assert_eq!(error(&no_hosts), "`maxCPUs` is 0; it must be from 1 to 4096");
    }
}
