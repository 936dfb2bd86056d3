//! What can be wrong with what a preparation starts from.

use np_formats::Dtype;
use std::io;
use std::path::{Path, PathBuf};

/// Result of a step of preparation.
pub type Result<T> = std::result::Result<T, Error>;

/// Each message is one line that names the file, what is wrong and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// One of our own files, a config or a tensor file is not as it must be.
    #[error(transparent)]
    Format(#[from] np_formats::Error),
    /// The forward pass of the runtime failed.
    #[error(transparent)]
    Runtime(#[from] np_runtime::Error),
    /// The operating system refused.
    #[error("{path}: {action}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The file or directory can't be prepared as it is.
    #[error("{path}: {problem}")]
    Source {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// The index names shards that are not there.
    #[error(
        "{index}: {} of {total} shards are missing: {}; incomplete download? fetch them again",
        missing.len(), missing.join(", ")
    )]
    MissingShards {
        /// The index.
        index: PathBuf,
        /// Names of the shards that are not there.
        missing: Vec<String>,
        /// Shards that the index names.
        total: usize,
    },
    /// A tensor is of a type that nothing here computes with.
    #[error("{path}: tensor {tensor} is {dtype}; supported are F16, BF16 and F32: take a checkpoint in one of these")]
    UnsupportedDtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: String,
    },
    /// A value is too large for the 16-bit type it should become, or is not a number.
    #[error(
        "{path}: tensor {tensor}: value {index} ({value}) does not fit {}; {}",
        dtype.name(), overflow_remedy(*dtype)
    )]
    Overflow {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Place of the value in the tensor.
        index: usize,
        /// The value.
        value: f32,
        /// The type it should have become.
        dtype: Dtype,
    },
    /// The output directory already holds another model.
    #[error("{path}: holds {found}, not {wanted}; remove it or choose another directory")]
    Occupied {
        /// The output directory.
        path: PathBuf,
        /// What it holds.
        found: String,
        /// What should go there.
        wanted: String,
    },
    /// The hub has no such repository, or does not show it.
    #[error("{repo}: not found on {endpoint}, or private: check the name, or set HF_TOKEN to a token that may read it")]
    RepoNotFound {
        /// The repository.
        repo: String,
        /// The hub.
        endpoint: String,
    },
    /// The repository has no such revision.
    #[error("{repo}: no revision {revision:?}: check --revision (a branch, tag or commit)")]
    RevisionNotFound {
        /// The repository.
        repo: String,
        /// The revision.
        revision: String,
    },
    /// The hub wants a token, or another one.
    #[error("{repo}: access refused: {answer}; accept the terms on the model's page and set HF_TOKEN")]
    AccessRefused {
        /// The repository.
        repo: String,
        /// What the hub said.
        answer: String,
    },
    /// The hub did not answer, or not as a hub does.
    #[error("{repo}: {endpoint}: {problem}; try again: what has arrived is kept")]
    Hub {
        /// The repository.
        repo: String,
        /// The hub.
        endpoint: String,
        /// What went wrong.
        problem: String,
    },
    /// Offline, and not all files are there.
    #[error("{repo}: {file} is not in the cache {cache}, and HF_HUB_OFFLINE is set; unset it to download")]
    Offline {
        /// The repository.
        repo: String,
        /// The file.
        file: String,
        /// The cache.
        cache: PathBuf,
    },
    /// What arrived is not what the hub announced.
    #[error("{path}: {file} of {repo} arrived damaged ({problem}) and was removed; run the same command again")]
    DamagedDownload {
        /// The file that was removed.
        path: PathBuf,
        /// Its name in the repository.
        file: String,
        /// The repository.
        repo: String,
        /// How it differs.
        problem: String,
    },
}

fn overflow_remedy(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F16 => "use --dtype bf16",
        _ => "the checkpoint is damaged",
    }
}

/// Turns an I/O failure into [`Error::Io`], with the file and the action named.
pub(crate) fn io_error(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io { path: path.into(), action, source }
}
