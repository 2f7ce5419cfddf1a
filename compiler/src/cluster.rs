//! Clusters: levels of bandwidth and the devices below them.
