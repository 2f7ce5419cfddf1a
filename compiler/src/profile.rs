//! What every op costs, and where the number came from.
