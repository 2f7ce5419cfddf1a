//! Operators that join the elements of axes, or put them in order, one row each.

use super::Row;
use crate::import::fx::lower::{reduce, scan};
use crate::op::{CumulativeKind, ReduceKind};

/// Reductions, running sums and orders.
pub const REDUCTION: &[Row] = &[
    ("sum", |s| reduce::reduce(s, ReduceKind::Sum)),
    ("mean", |s| reduce::reduce(s, ReduceKind::Mean)),
    ("prod", |s| reduce::reduce(s, ReduceKind::Prod)),
    ("amax", |s| reduce::reduce(s, ReduceKind::Max)),
    ("amin", |s| reduce::reduce(s, ReduceKind::Min)),
    ("max", |s| reduce::extreme(s, true)),
    ("min", |s| reduce::extreme(s, false)),
    ("argmax", |s| reduce::place(s, true)),
    ("argmin", |s| reduce::place(s, false)),
    ("any", |s| reduce::truth(s, false)),
    ("all", |s| reduce::truth(s, true)),
    ("var", |s| reduce::variance(s, false, false)),
    ("std", |s| reduce::variance(s, true, false)),
    ("var_mean", |s| reduce::variance(s, false, true)),
    ("logsumexp", reduce::log_sum_exp),
    ("linalg_vector_norm", |s| reduce::vector_norm(s, "ord")),
    ("softmax", |s| reduce::softmax(s, false)),
    ("_softmax", |s| reduce::softmax(s, false)),
    ("log_softmax", |s| reduce::softmax(s, true)),
    ("_log_softmax", |s| reduce::softmax(s, true)),
    ("nansum", |s| reduce::of_numbers(s, false)),
    ("nanmean", |s| reduce::of_numbers(s, true)),
    ("count_nonzero", reduce::count),
    ("std_mean", |s| reduce::variance(s, true, true)),
    ("aminmax", reduce::both_ends),
    ("linalg_matrix_norm", reduce::matrix_norm),
    ("special_logsumexp", reduce::log_sum_exp),
    ("histc", reduce::histogram),
    ("cumsum", |s| scan::cumulative(s, CumulativeKind::Sum)),
    ("cumprod", |s| scan::cumulative(s, CumulativeKind::Prod)),
    ("sort", scan::sort),
    ("argsort", scan::places),
    ("msort", scan::sort_first),
    ("topk", scan::top),
    ("kthvalue", scan::kth),
    ("median", scan::median),
    ("special_softmax", |s| reduce::softmax(s, false)),
];
