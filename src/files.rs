//! Files of users: bounded reads, detection by content, atomic writes that overwrite only files of the same type.

pub mod detect;
pub mod input;
pub mod missing;
pub mod output;
pub mod overwrite;
pub mod python;
