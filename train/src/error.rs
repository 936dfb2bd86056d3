//! What can go wrong while training.

use std::path::PathBuf;

/// Result of training.
pub type Result<T> = std::result::Result<T, Error>;

/// Each message is one line that says where, and what to try.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the artifact directory is wrong.
    #[error(transparent)]
    Format(#[from] np_formats::Error),
    /// A tensor's values can't be those of a whole preparation.
    #[error("{path}: tensor {tensor}: {problem}")]
    Values {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// Labels and vocabulary are of two builds, as after a build that was stopped between them.
    #[error("{labels} and {centroids} are of two builds; run `np-prep build-centroids` again")]
    TwoBuilds {
        /// The labels.
        labels: PathBuf,
        /// The vocabulary.
        centroids: PathBuf,
    },
    /// There are too few tokens to train on some and to try the rest.
    #[error("{path}: {tokens} usable tokens are too few to train on; run `np-prep collect` again with more text")]
    TooFewTokens {
        /// The features.
        path: PathBuf,
        /// Tokens that are not the first of their sequence.
        tokens: usize,
    },
    /// Nothing was clustered that could be predicted.
    #[error("{path}: no labels of any layer; a model needs two layers, and `np-prep build-centroids` must have run")]
    NoLabels {
        /// The labels.
        path: PathBuf,
    },
    /// This program was built without the CUDA backend.
    #[error("this np-train has no CUDA backend; build it with `--features train-cuda`, or train with --backend cpu")]
    CudaNotCompiledIn,
    /// The CUDA backend is there, the driver or its compiler is not.
    #[error("no CUDA: {0}; install it, or train with --backend cpu")]
    NoCuda(&'static str),
}
