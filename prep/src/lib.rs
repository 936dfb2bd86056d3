//! From a model as it is published to an artifact directory that the engine runs.
//!
//! - [`Checkpoint`]: a Hugging Face directory, checked when opened and read a piece at a time.
//! - [`import`]: GGUF files and other directories become a checkpoint in one normal form.

mod checkpoint;
mod checkpoint_writer;
mod convert;
mod error;
mod gguf;
mod gguf_metadata;
mod gguf_tokenizer;
mod import;
mod locate;
mod progress;
mod provenance;
mod tensors;

#[cfg(test)]
mod test_checkpoint;
#[cfg(test)]
mod test_gguf;

pub use checkpoint::Checkpoint;
pub use error::{Error, Result};
pub use import::{Imported, import};
pub use progress::Progress;
pub use provenance::source_of;
pub use tensors::{ModelTensor, model_tensors};
