//! Training: batches in, the weights of the best epoch out.

use crate::model::{Network, Shape, values};
use crate::recall::Recall;
use crate::{Dataset, Epoch, Labels, Options, Report};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorData};
use np_formats::{PredictorNetwork, Projection};
use np_runtime::eval::negative_log_likelihood;
use np_runtime::select::score::argmax;
use rand::seq::SliceRandom;
use rand::{RngCore, SeedableRng};
use rand_xoshiro::Xoshiro256Plus;
use rayon::prelude::*;

/// Units of the hidden layer.
pub const WIDTH: usize = 512;
/// Tokens of a step. An update costs as much as the products of 50 tokens, so that small steps are slow.
const BATCH_TOKENS: usize = 256;
/// Steps over which the learning rate rises to its full size, or a quarter of all steps if those are fewer.
const WARM_UP_STEPS: usize = 30;
/// Training ends when this many epochs in a row have not lowered the loss on held-out tokens.
const PATIENCE_EPOCHS: usize = 2;

/// What one network learns, and what it is measured by.
pub struct Task<'a> {
    /// Features.
    pub dataset: &'a Dataset,
    /// What to name.
    pub projection: Projection,
    /// The right names.
    pub labels: &'a Labels,
    /// Tables and true masks.
    pub recall: &'a Recall,
}

/// Trains a network from random weights, and tells `report` each epoch. Returns the weights of the epoch whose loss on
/// held-out tokens was lowest.
pub fn fit<B: AutodiffBackend>(
    task: &Task<'_>,
    options: &Options,
    device: &B::Device,
    report: &mut dyn Report,
) -> PredictorNetwork {
    let shape = Shape {
        features: task.dataset.geometry.hidden,
        width: WIDTH,
        heads: task.labels.heads,
        centroids: task.labels.centroids,
    };
    let stream = match task.projection {
        Projection::Joint => 0,
        Projection::Separate => 1,
    };
    let mut rng = Xoshiro256Plus::seed_from_u64(options.seed.wrapping_mul(2).wrapping_add(stream));
    let start = shape.random(rng.next_u64());
    let mut trainer = Trainer::<B> {
        network: Network::new(&start, device),
        optimizer: AdamConfig::new().with_beta_1(0.9).with_beta_2(0.98).with_epsilon(1e-8).init(),
        device,
    };
    let mut order = task.dataset.train.clone();
    let steps = order.len().div_ceil(BATCH_TOKENS);
    let majority = majority_accuracy(task.dataset, task.labels);
    let mut best = (f64::INFINITY, 0, start);
    for epoch in 1..=options.epochs {
        order.shuffle(&mut rng);
        let mut loss = 0.0;
        for (step, tokens) in order.chunks(BATCH_TOKENS).enumerate() {
            let done = (epoch - 1) * steps + step;
            let rate = options.learning_rate * rate_share(done, options.epochs * steps);
            loss += trainer.step(task, tokens, rate) * tokens.len() as f64;
            report.step(task.projection, done + 1, options.epochs * steps);
        }
        let tried = trainer.try_on(task);
        let kept = tried.loss < best.0;
        if kept {
            best = (tried.loss, epoch, trainer.network.weights());
        }
        report.epoch(&Epoch {
            projection: task.projection,
            epoch,
            train_loss: loss / (order.len() * shape.heads) as f64,
            held_out_loss: tried.loss,
            accuracy: tried.accuracy,
            majority_accuracy: majority,
            recall: tried.recall,
            static_recall: task.recall.static_recall,
            kept,
        });
        if epoch - best.1 >= PATIENCE_EPOCHS {
            break;
        }
    }
    best.2
}

/// A network in training.
struct Trainer<'a, B: AutodiffBackend> {
    network: Network<B>,
    optimizer: burn::optim::adaptor::OptimizerAdaptor<burn::optim::Adam, Network<B>, B>,
    device: &'a B::Device,
}

/// How a network does on held-out tokens.
struct Tried {
    /// Nats per head.
    loss: f64,
    /// Share of heads whose likeliest centroid is the right one.
    accuracy: f64,
    /// See [`Recall`].
    recall: f64,
}

impl<B: AutodiffBackend> Trainer<'_, B> {
    /// Learns from a batch and returns its loss before that, summed over heads and averaged over tokens.
    fn step(&mut self, task: &Task<'_>, tokens: &[u32], rate: f64) -> f64 {
        let features = batch(task.dataset, tokens, self.device);
        let labels = TensorData::new(task.labels.gather(tokens), [tokens.len() * task.labels.heads, 1]);
        let labels = Tensor::from_data(labels, self.device);
        let (sloped, loss) = self.network.loss(features, labels, task.labels.centroids);
        let slopes = GradientsParams::from_grads(sloped.backward(), &self.network);
        self.network = self.optimizer.step(rate, self.network.clone(), slopes);
        f64::from(values(loss)[0])
    }

    fn try_on(&self, task: &Task<'_>) -> Tried {
        let network = Network::<B::InnerBackend>::new(&self.network.weights(), self.device);
        let logits = |tokens: &[u32]| values(network.logits(batch(task.dataset, tokens, self.device)));
        let (heads, centroids) = (task.labels.heads, task.labels.centroids);
        let (mut loss, mut hits) = (0.0, 0);
        for tokens in task.dataset.held_out.chunks(BATCH_TOKENS) {
            let logits = logits(tokens);
            let scored: Vec<(f64, bool)> = logits
                .par_chunks_exact(centroids)
                .zip(tokens.par_iter().flat_map_iter(|&token| task.labels.row(token)).collect::<Vec<_>>())
                .map(|(logits, &label)| {
                    (negative_log_likelihood(logits, u32::from(label)), argmax(logits) == usize::from(label))
                })
                .collect();
            loss += scored.iter().map(|(loss, _)| loss).sum::<f64>();
            hits += scored.iter().filter(|(_, hit)| *hit).count();
        }
        let count = (task.dataset.held_out.len() * heads) as f64;
        let recall = task.recall.of(&logits(&task.recall.sample));
        Tried { loss: loss / count, accuracy: hits as f64 / count, recall }
    }
}

/// Features (tokens, H) on a device.
fn batch<B: Backend>(dataset: &Dataset, tokens: &[u32], device: &B::Device) -> Tensor<B, 2> {
    let shape = [tokens.len(), dataset.geometry.hidden];
    Tensor::from_data(TensorData::new(dataset.gather(tokens), shape), device)
}

/// The share of the full learning rate at a step: up in a line, then down as a cosine.
fn rate_share(step: usize, steps: usize) -> f64 {
    let warm_up = WARM_UP_STEPS.min(steps / 4);
    if step < warm_up {
        return (step + 1) as f64 / warm_up as f64;
    }
    let way = (step - warm_up) as f64 / (steps - warm_up) as f64;
    0.5 + 0.5 * (std::f64::consts::PI * way).cos()
}

/// Accuracy on held-out tokens of always naming each head's most frequent centroid: what an accuracy must be read
/// beside.
fn majority_accuracy(dataset: &Dataset, labels: &Labels) -> f64 {
    let hits = (0..labels.heads).map(|head| {
        let mut counts = vec![0u32; labels.centroids];
        dataset.train.iter().for_each(|&token| counts[usize::from(labels.row(token)[head])] += 1);
        let most = (0..labels.centroids).max_by_key(|&label| (counts[label], usize::MAX - label));
        dataset.held_out.iter().filter(|&&token| Some(usize::from(labels.row(token)[head])) == most).count()
    });
    hits.sum::<usize>() as f64 / (labels.heads * dataset.held_out.len()) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_and_falls() {
        assert_eq!(rate_share(0, 1000), 1.0 / 30.0);
        assert_eq!(rate_share(29, 1000), 1.0);
        assert_eq!(rate_share(30, 1000), 1.0);
        assert!((rate_share(515, 1000) - 0.5).abs() < 1e-9);
        assert!(rate_share(999, 1000) < 1e-5);
        assert_eq!(rate_share(0, 1), 1.0);
        assert_eq!(rate_share(0, 4), 1.0);
    }
}
