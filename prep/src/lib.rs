//! From a model as it is published to an artifact directory that the engine runs.
//!
//! - [`download`], [`import`]: a hub's repository, a GGUF file or another directory becomes a checkpoint directory.
//! - [`Checkpoint`]: such a directory, checked when opened and read a piece at a time.
//! - [`repack`]: a checkpoint becomes an artifact directory, one layer at a time.
//! - [`collect`]: the runtime's own layers run over a text, and leave traces of which neurons matter.
//! - [`build`]: traces become the vocabulary of masks that selectors choose from.
//! - [`verify`], [`inspect`]: whether a directory is whole, and what it holds.
//!
//! Invariants: memory is bounded by a layer, never by the model. A step that was killed goes on when it is run again,
//! and its result is the same to the byte. Nothing appears under its name before it is whole.

mod centroids;
mod checkpoint;
mod checkpoint_writer;
mod cluster;
mod collect;
mod convert;
mod error;
mod gguf;
mod gguf_metadata;
mod gguf_tokenizer;
mod hub;
mod import;
mod inspect;
mod locate;
mod progress;
mod provenance;
mod repack;
mod residual_file;
mod tables;
mod tensors;
mod threshold;
mod verify;

#[cfg(test)]
mod test_checkpoint;
#[cfg(test)]
mod test_gguf;
#[cfg(test)]
mod test_hub;

pub use centroids::{BuildOptions, build};
pub use checkpoint::Checkpoint;
pub use cluster::{ClusterOptions, Clusters, PackedMasks, cluster};
pub use collect::{CollectOptions, collect};
pub use error::{Error, Result};
pub use hub::{HubSettings, download};
pub use import::{Imported, import};
pub use inspect::{Inspection, inspect};
pub use progress::Progress;
pub use provenance::source_of;
pub use repack::repack;
pub use tensors::{ModelTensor, model_tensors};
pub use verify::{Verified, verify};
