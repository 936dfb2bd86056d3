//! What can be wrong with bytes on disk.

use crate::RecordFault;
use std::io;
use std::path::{Path, PathBuf};

/// Result of reading or writing one of our files.
pub type Result<T> = std::result::Result<T, Error>;

/// Each message is one line that names the file, what is wrong and, where there is one, the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
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
    /// A file that must be there is not.
    #[error("{path}: not found; {remedy}")]
    Missing {
        /// The file.
        path: PathBuf,
        /// What to do.
        remedy: &'static str,
    },
    /// Not JSON, or not the JSON that is expected.
    #[error("{path}: {source}")]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's words.
        source: serde_json::Error,
    },
    /// A key of a model's config is missing, wrong or not supported.
    #[error("{path}: {key}: {problem}")]
    Config {
        /// The config.
        path: PathBuf,
        /// The key.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The file is shorter or longer than its header says.
    #[error("{path}: {actual} bytes, expected {expected}: cut off or not whole; {remedy}")]
    Length {
        /// The file.
        path: PathBuf,
        /// Its length.
        actual: u64,
        /// The length that its header implies.
        expected: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// The file's header is not what the format demands.
    #[error("{path}: {problem}")]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor is missing, or of another shape or type than expected.
    #[error("{path}: tensor {tensor}: {problem}")]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The bytes do not have the checksum that was written with them.
    #[error("{path}: checksum mismatch: the file is damaged; {remedy}")]
    Checksum {
        /// The file.
        path: PathBuf,
        /// What to do.
        remedy: &'static str,
    },
    /// The file was made from another model or another preparation than the one it lies with.
    #[error("{path}: made from {found}, but this directory holds {expected}; {remedy}")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Fingerprint in the file.
        found: String,
        /// Fingerprint of the directory.
        expected: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A record of a neuron file is damaged or lies in the wrong place.
    #[error("{path}: layer {layer}, neuron {neuron}, byte {offset}: {fault}; run `np-prep repack` again")]
    Record {
        /// The neuron file.
        path: PathBuf,
        /// Layer that was read.
        layer: u16,
        /// Neuron that was read.
        neuron: u32,
        /// Where its record begins.
        offset: u64,
        /// What is wrong with it.
        fault: RecordFault,
    },
    /// A byte outside all records is not zero.
    #[error("{path}: byte {offset}: {problem}; run `np-prep repack` again")]
    Gap {
        /// The neuron file.
        path: PathBuf,
        /// The byte.
        offset: u64,
        /// What was expected there.
        problem: &'static str,
    },
}

/// Turns an I/O failure into [`Error::Io`], with the file and the action named.
pub(crate) fn io_error(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io { path: path.into(), action, source }
}
