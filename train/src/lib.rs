//! Trains the predictor: the small network that names centroids for all later layers from the first layer's output.
//!
//! - [`train_predictor`]: an artifact directory with traces and vocabulary in, `predictor.safetensors` out.
//! - [`Report`] is told each [`Epoch`]: losses, accuracy beside that of the most frequent centroids, and what counts,
//!   the recall of the resulting active sets beside that of the best fixed set.
//!
//! Invariants: all layers' heads are trained at once from one shared hidden layer, one network for joint centroids and
//! one for gate and up apart. On the CPU the same seed gives the same bytes. The file appears only when it is whole.

mod dataset;
mod error;
mod export;
mod fit;
#[cfg(feature = "train-cuda")]
mod gpu;
mod model;
mod recall;
#[cfg(test)]
mod train_tests;

pub use dataset::{Dataset, Labels};
pub use error::{Error, Result};
pub use export::export;
pub use fit::{Task, WIDTH, fit};
pub use model::{Network, Shape};
pub use recall::Recall;

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::AutodiffBackend;
use np_formats::Projection;
use std::path::{Path, PathBuf};

/// How to train.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Options {
    /// The network to train; one for each projection that was clustered when `None`.
    pub projection: Option<Projection>,
    /// What computes.
    pub compute: Compute,
    /// Same seed, same bytes (on the CPU).
    pub seed: u64,
    /// Passes over the training tokens at most.
    pub epochs: usize,
    /// Step size at its highest.
    pub learning_rate: f64,
}

/// What computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Compute {
    /// All cores.
    Cpu,
    /// The first CUDA device, in a program built with the feature `train-cuda`.
    Cuda,
}

/// How a network does after one pass over the training tokens. Shares are of 1.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Epoch {
    /// Which network.
    pub projection: Projection,
    /// Passes so far.
    pub epoch: usize,
    /// Mean cross-entropy during the pass, in nats per head.
    pub train_loss: f64,
    /// Cross-entropy on held-out tokens, in nats per head.
    pub held_out_loss: f64,
    /// Share of heads on held-out tokens whose likeliest centroid is the right one.
    pub accuracy: f64,
    /// The same when each head always names its most frequent centroid.
    pub majority_accuracy: f64,
    /// Share of the true top K that the resulting active sets have, on a sample of held-out tokens.
    pub recall: f64,
    /// The same of the K neurons of most energy.
    pub static_recall: f64,
    /// Whether these weights are the best so far.
    pub kept: bool,
}

/// Who is told how training goes.
pub trait Report {
    /// A step is done: `done` of `total` of this network, fewer if training ends early.
    fn step(&mut self, projection: Projection, done: usize, total: usize);
    /// An epoch is done.
    fn epoch(&mut self, epoch: &Epoch);
}

impl Default for Options {
    fn default() -> Self {
        Self { projection: None, compute: Compute::Cpu, seed: 0, epochs: 4, learning_rate: 2e-3 }
    }
}

/// Trains on the traces and vocabulary of an artifact directory and writes its `predictor.safetensors`. Returns that
/// file's path.
pub fn train_predictor(directory: &Path, options: &Options, report: &mut dyn Report) -> Result<PathBuf> {
    match options.compute {
        Compute::Cpu => train_on::<Autodiff<Flex>>(directory, options, report),
        #[cfg(not(feature = "train-cuda"))]
        Compute::Cuda => Err(Error::CudaNotCompiledIn),
        #[cfg(feature = "train-cuda")]
        Compute::Cuda => {
            gpu::check()?;
            train_on::<Autodiff<burn::backend::Cuda>>(directory, options, report)
        }
    }
}

fn train_on<B: AutodiffBackend>(directory: &Path, options: &Options, report: &mut dyn Report) -> Result<PathBuf> {
    let dataset = Dataset::open(directory)?;
    let there = dataset.projections()?;
    let device = B::Device::default();
    let mut networks = Vec::new();
    for projection in options.projection.map_or(there, |only| vec![only]) {
        let labels = dataset.labels(projection)?;
        let recall = Recall::open(&dataset, projection)?;
        let task = Task { dataset: &dataset, projection, labels: &labels, recall: &recall };
        networks.push((projection, fit::<B>(&task, options, &device, report)));
    }
    export(&dataset, &networks)
}
