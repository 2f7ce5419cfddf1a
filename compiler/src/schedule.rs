//! Schedules: from a plan to one program for each worker.
