//! The delta engine: runs a model from a fixed number of resident neuron rows.
//!
//! - [`Engine`]: tokens in, logits out. The first d layers are dense; the others compute only their active sets, and
//!   only what an active set lacks is read while the dense layers compute.
//! - [`Selector`](select::Selector): the rule that names active sets.
//! - [`SlotMap`](slot_map::SlotMap), [`ReadPlan`](read_plan::ReadPlan): which row lies where, and what to read. Values,
//!   without a file or a thread.
//! - [`io`]: two readers behind one trait. [`transfer`] carries out plans, [`prefetch`] is the thread that does.
//! - [`text`], [`sampler`]: from characters to tokens and from logits to the next one.
//! - [`settings`], [`budget`]: what fits into memory.
//! - [`model`]: attention and the resident weights; preparation runs the same code layer by layer.
//!
//! Invariants: no network, no training, no clustering here. What is computed is the active set, no more and no less, so
//! the output never depends on what else lies in the slots. After start-up a token allocates nothing.

pub mod budget;
pub mod chat_template;
mod engine;
mod error;
pub mod eval;
pub mod generate;
pub mod importance;
pub mod io;
pub mod model;
mod predictor;
pub mod prefetch;
mod prefill;
pub mod read_plan;
pub mod row_store;
pub mod sampler;
pub mod select;
pub mod settings;
pub mod slot_map;
pub mod stats;
pub mod text;
pub mod transfer;

pub use engine::{Engine, MlpView, Watcher, open_neurons};
pub use error::{Error, Result};
pub use predictor::Predictor;
pub use prefill::LogitsSink;
pub use settings::{EngineOptions, KChoice, Mode, Settings};
pub use stats::{PrefillStats, TokenStats};
