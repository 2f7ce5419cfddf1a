//! Torch FX graphs: reads the archive that `torch.export.save` writes (`.pt2`) into a graph of core ops.
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
//! Entries are read by name from the mapped file; nothing is extracted, executed, loaded as code or evaluated.
//! Row-major weights stay views of the file.

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
