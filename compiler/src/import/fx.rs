//! Torch FX graphs: from an archive written by `torch.export.save` (`.pt2`) to a graph of core ops.
//!
//! ```text
//! file --map--> bytes --archive--> entries --schema--> ExportedProgram --program, weight--> Program --lower--> Graph
//! ```
//!
//! ```python
//! program = torch.export.export(model.train(), (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
//! torch.export.save(program, "model.pt2")
//! ```
//!
//! Entries are read by name from the mapped file; nothing is extracted or executed. Weights in row-major order stay
//! views into the file.

pub mod archive;
pub mod entries;
pub mod error;
pub mod expression;
pub mod guards;
pub mod inline;
pub mod legacy;
pub mod lower;
pub mod program;
pub mod schema;
pub mod weight;
