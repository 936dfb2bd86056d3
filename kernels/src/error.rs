//! What can go wrong when memory is made or filled.

use std::io;

/// A result whose error is this crate's.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a backend could not do what it was asked. Wrong shapes are bugs and assert instead.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused memory.
    #[error("could not allocate {bytes} bytes; try a smaller --memory or --context")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
    },
    /// The weights could not be brought in; the source says from where.
    #[error("could not fill a matrix of {rows} x {columns}: {source}")]
    Fill {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        columns: usize,
        /// What the caller's reader said.
        source: io::Error,
    },
    /// A worker thread could not be started.
    #[error("could not start worker thread {worker}: {source}; try fewer threads")]
    Thread {
        /// Index of the worker.
        worker: usize,
        /// What the system said.
        source: io::Error,
    },
}
