//! np-train.
mod model;
pub use model::{Network, Shape, Weights};
