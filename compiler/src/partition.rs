//! Partitioners: from a `Problem` to a `Plan`.
