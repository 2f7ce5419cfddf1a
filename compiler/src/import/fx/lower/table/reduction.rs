//! Table of reductions, cumulative operators and sorting.

use super::Row;
use crate::import::fx::lower::{reduce, scan};
use crate::op::{CumulativeKind, ReduceKind};

pub const REDUCTION: &[Row] = &[
    ("sum", |s| reduce::reduce(s, ReduceKind::Sum)),
    ("mean", |s| reduce::reduce(s, ReduceKind::Mean)),
    ("prod", |s| reduce::reduce(s, ReduceKind::Prod)),
    ("amax", |s| reduce::reduce(s, ReduceKind::Max)),
    ("amin", |s| reduce::reduce(s, ReduceKind::Min)),
    ("max", |s| reduce::extreme(s, true)),
    ("min", |s| reduce::extreme(s, false)),
    ("argmax", |s| reduce::arg_extreme(s, true)),
    ("argmin", |s| reduce::arg_extreme(s, false)),
    ("any", |s| reduce::any_or_all(s, false)),
    ("all", |s| reduce::any_or_all(s, true)),
    ("var", |s| reduce::variance(s, false, false)),
    ("std", |s| reduce::variance(s, true, false)),
    ("var_mean", |s| reduce::variance(s, false, true)),
    ("logsumexp special_logsumexp", reduce::log_sum_exp),
    ("linalg_vector_norm", |s| reduce::vector_norm(s, "ord")),
    ("softmax _softmax special_softmax", |s| reduce::softmax(s, false)),
    ("log_softmax _log_softmax", |s| reduce::softmax(s, true)),
    ("nansum", |s| reduce::of_numbers(s, false)),
    ("nanmean", |s| reduce::of_numbers(s, true)),
    ("count_nonzero", reduce::count),
    ("std_mean", |s| reduce::variance(s, true, true)),
    ("aminmax", reduce::min_max),
    ("linalg_matrix_norm", reduce::matrix_norm),
    ("histc", reduce::histogram),
    ("cumsum", |s| scan::cumulative(s, CumulativeKind::Sum)),
    ("cumprod", |s| scan::cumulative(s, CumulativeKind::Prod)),
    ("sort", scan::sort),
    ("argsort", scan::argsort),
    ("msort", scan::sort_first),
    ("topk", scan::top),
    ("kthvalue", scan::kth),
    ("median", scan::median),
];
