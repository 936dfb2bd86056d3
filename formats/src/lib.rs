//! The ground that the other crates stand on: bytes to values and back.
//!
//! - [`Mask`]: a set of neurons of one layer. Active, incoming and resident neurons and centroids are all masks.
//! - [`RecordLayout`] and [`Tag`]: one neuron's gate, up and down^T rows side by side, with a tag that says whose.
//! - [`NeuronFile`]: all records of a model, the only file format of our own.
//! - [`TensorFile`]: everything else is safetensors, with a parent and a checksum in the header.
//! - [`Manifest`]: pins what an artifact directory holds. [`Geometry`]: a model's sizes, from its `config.json`.
//! - [`LayerTrace`], [`Centroids`], [`PredictorWeights`]: what collection, clustering and training leave.
//!
//! Invariants: nothing here starts a thread or knows a GPU, a network or a clock. Bytes from disk give an [`Error`]
//! that names the file and the remedy, never a panic. A file appears under its name only when it is whole.

mod atomic_file;
mod centroids;
mod error;
mod fingerprint;
mod geometry;
mod manifest;
mod mask;
mod neuron_file;
mod predictor;
mod record;
mod tensor_file;
mod trace;

pub use atomic_file::{AtomicFile, partial_path, rename_durably};
pub use centroids::{CENTROIDS_NAME, Centroids, JointTable, Projection, SeparateTable, centroid_specs};
pub use error::{Error, Result};
pub use fingerprint::Fingerprint;
pub use geometry::{Dtype, Geometry, RopeScaling};
pub use manifest::{FORMAT_VERSION, MANIFEST_NAME, Manifest, PinnedFile, Source};
pub use mask::{MASK_WORD_BITS, Mask, Runs};
pub use neuron_file::{BLOCK_BYTES, LayerHash, NeuronFile, NeuronFileHeader, NeuronFileWriter};
pub use predictor::{FEATURE_CLIP, PREDICTOR_NAME, PredictorNetwork, PredictorWeights, predictor_specs};
pub use record::{RECORD_ALIGN_BYTES, RECORD_ROWS, RecordFault, RecordLayout, TAG_BYTES, Tag};
pub use safetensors::Dtype as TensorDtype;
pub use tensor_file::{HEADER_BYTES_MAX, TensorFile, TensorFileWriter, TensorSpec};
pub use trace::{
    Features, K_FRACTION_KEY, LayerTrace, TRACES_NAME, VOCABULARY_KEY, features_path, importance_from_u8,
    importance_to_u8, labels_path, layer_trace_path, layer_trace_specs,
};

/// Name of the neuron file in an artifact directory.
pub const NEURONS_NAME: &str = "neurons.bin";
/// Name of the file of resident tensors in an artifact directory.
pub const RESIDENT_NAME: &str = "resident.safetensors";
