//! Arithmetic on buffers.
//!
//! - [`Backend`]: the closed list of operations of a transformer whose MLP rows come and go. [`Cpu`] implements it; it
//!   is always there, it is the reference, and it is fast.
//! - [`Rows`]: slots that hold whole records, on huge [`Pages`], used where they lie.
//! - [`RopeTable`]: rotary angles, computed once.
//!
//! Nothing here knows a file, a token or a plan. Activations and sums are f32; 16-bit weights are only converted.
//! Results don't depend on the number of threads, and the order of additions over neurons is fixed by their ids
//! ([`NEURON_BLOCK`]): which slots they lie in, and which others lie there, changes no bit.

mod backend;
#[cfg(test)]
mod backend_tests;
mod cpu;
mod error;
mod pages;
mod rows;

pub use backend::{AttentionShape, Backend, KvDtype, NEURON_BLOCK, Observed, Output};
pub use cpu::{Cpu, CpuBuffer, CpuKvCache, CpuMatrix, RopeTable};
pub use error::{Error, Result};
pub use pages::{HUGE_PAGE_BYTES, Pages};
pub use rows::Rows;
