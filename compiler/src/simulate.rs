//! Discrete-event simulation of programs.
