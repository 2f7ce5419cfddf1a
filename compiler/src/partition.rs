//! Partitioners: from a `Problem` to a `Plan`.
//!
//! `planner` is the door: it calls a partitioner by name, fills in what every plan states, and lets `plan::check` judge the
//! result. A partitioner finds a `shape`: which ops form which group, nested by the levels of the cluster.

pub mod along;
pub mod best;
pub mod bound;
pub mod bucket;
pub mod build;
pub mod chunked;
pub mod counts;
pub mod crossing;
pub mod cuts;
pub mod data_parallel;
pub mod device_placement;
pub mod every;
pub mod exhaustive;
pub mod finish;
pub mod first;
pub mod fit;
pub mod fleet;
pub mod floor;
pub mod forward;
pub mod grouped;
pub mod hybrid;
pub mod in_flight;
pub mod joined;
pub mod lack;
pub mod lattice;
pub mod line;
pub mod linear;
pub mod milp;
pub mod mixed;
pub mod near;
pub mod orders;
pub mod pinned;
pub mod pipedream;
pub mod placed;
pub mod placement;
pub mod places;
pub mod planner;
pub mod played;
pub mod ranking;
pub mod reach;
pub mod search;
pub mod shape;
pub mod single;
pub mod spanning;
pub mod states;
pub mod tables;
pub mod terrain;
pub mod uniform;
pub mod units;
pub mod zero;
