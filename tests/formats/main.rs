//! JSON Schemas of file formats, and the structure of the workspace.

mod schema;
mod tidy;
