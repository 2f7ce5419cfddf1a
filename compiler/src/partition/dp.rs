//! PipeDream's dynamic program over hierarchical interconnect levels (Narayanan et al., SOSP 2019, section 3.1).

pub mod nested_partition;
pub mod pipedream;
pub mod uneven_levels;
