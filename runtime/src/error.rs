//! What can go wrong while running a model.

use crate::transfer::ReadFault;
use std::path::PathBuf;

/// Result of the runtime.
pub type Result<T> = std::result::Result<T, Error>;

/// Each message is one line that says where, and what to try.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the artifact directory is wrong.
    #[error(transparent)]
    Format(#[from] np_formats::Error),
    /// The backend refused.
    #[error(transparent)]
    Kernel(#[from] np_kernels::Error),
    /// A row did not arrive. The engine has been reset and may be used again.
    #[error("{path}: {fault}")]
    Read {
        /// The neuron file.
        path: PathBuf,
        /// Where, and why.
        fault: ReadFault,
    },
    /// A selector's files do not fit together.
    #[error("{0}")]
    Selector(String),
    /// An option, or options together, ask for what cannot be.
    #[error("{0}")]
    Options(String),
    /// More positions than the context has.
    #[error("{positions} tokens do not fit a context of {context}; shorten the prompt or raise --context")]
    Context {
        /// Positions asked for.
        positions: usize,
        /// Positions that there are.
        context: usize,
    },
    /// A token that the model does not have.
    #[error("token {token} is outside the model's vocabulary of {vocab}; is the tokenizer this model's?")]
    Token {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// The chosen settings do not fit the memory.
    #[error("{needed} needed and {budget} available: {remedy}")]
    Memory {
        /// Bytes needed, for people.
        needed: String,
        /// Bytes available, for people.
        budget: String,
        /// What to try.
        remedy: String,
    },
}
