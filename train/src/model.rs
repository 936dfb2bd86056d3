//! The predictor as burn sees it: features in, one row of logits per head out.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::{softmax, silu};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, IndexingUpdateOp, Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256Plus;

/// Sizes of one network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Values of a token's features (H).
    pub features: usize,
    /// Units of the hidden layer.
    pub hidden: usize,
    /// Heads: one per layer for joint centroids, two per layer for separate ones.
    pub heads: usize,
    /// Centroids that each head tells apart (C).
    pub centroids: usize,
}

/// A network's weights as plain numbers, in the order of the file: rows are outputs.
#[derive(Clone, PartialEq, Debug)]
pub struct Weights {
    /// The sizes that the rest has.
    pub shape: Shape,
    /// (hidden, features)
    pub hidden_weight: Vec<f32>,
    /// (hidden)
    pub hidden_bias: Vec<f32>,
    /// (heads * centroids, hidden)
    pub heads_weight: Vec<f32>,
    /// (heads * centroids)
    pub heads_bias: Vec<f32>,
}

/// Linear, SiLU, and all heads side by side in one linear layer: one product instead of one per layer of the model.
#[derive(Module, Debug)]
pub struct Network<B: Backend> {
    hidden: Linear<B>,
    heads: Linear<B>,
}

impl Weights {
    /// Uniform random weights within 1 / sqrt(inputs), the same for the same seed on every backend. The backends'
    /// own generators are one per process, so that two trainings at once would not be repeatable.
    pub fn random(shape: Shape, seed: u64) -> Self {
        let mut rng = Xoshiro256Plus::seed_from_u64(seed);
        let mut uniform = |count: usize, inputs: usize| -> Vec<f32> {
            let bound = 1.0 / (inputs as f32).sqrt();
            (0..count).map(|_| rng.gen_range(-bound..bound)).collect()
        };
        let outputs = shape.heads * shape.centroids;
        Self {
            shape,
            hidden_weight: uniform(shape.hidden * shape.features, shape.features),
            hidden_bias: uniform(shape.hidden, shape.features),
            heads_weight: uniform(outputs * shape.hidden, shape.hidden),
            heads_bias: uniform(outputs, shape.hidden),
        }
    }

    /// The logits of one token (heads * centroids) from its standardised, clipped features (H), in plain arithmetic:
    /// what a reader of the file must compute.
    pub fn logits(&self, features: &[f32]) -> Vec<f32> {
        let hidden = affine(&self.hidden_weight, &self.hidden_bias, features);
        let hidden: Vec<f32> = hidden.into_iter().map(|value| value / (1.0 + (-value).exp())).collect();
        affine(&self.heads_weight, &self.heads_bias, &hidden)
    }
}

impl<B: burn::tensor::backend::AutodiffBackend> Network<B> {
    /// A network that starts from these weights.
    pub fn from_weights(weights: &Weights, device: &B::Device) -> Self {
        let shape = weights.shape;
        let outputs = shape.heads * shape.centroids;
        let linear = |inputs: usize, outputs: usize, weight: &[f32], bias: &[f32]| {
            let rows = Tensor::<B, 2>::from_data(TensorData::new(weight.to_vec(), [outputs, inputs]), device);
            let bias = Tensor::<B, 1>::from_data(TensorData::new(bias.to_vec(), [outputs]), device);
            let mut linear = LinearConfig::new(inputs, outputs).init(device);
            linear.weight = Param::from_data(rows.transpose().into_data(), device);
            linear.bias = Some(Param::from_tensor(bias));
            linear
        };
        Self {
            hidden: linear(shape.features, shape.hidden, &weights.hidden_weight, &weights.hidden_bias),
            heads: linear(shape.hidden, outputs, &weights.heads_weight, &weights.heads_bias),
        }
    }

    /// The weights as they are now.
    pub fn weights(&self, shape: Shape) -> Weights {
        Weights {
            shape,
            hidden_weight: values(self.hidden.weight.val().transpose()),
            hidden_bias: self.hidden.bias.as_ref().map(|bias| values(bias.val())).unwrap_or_default(),
            heads_weight: values(self.heads.weight.val().transpose()),
            heads_bias: self.heads.bias.as_ref().map(|bias| values(bias.val())).unwrap_or_default(),
        }
    }

    /// Logits (B, heads * centroids) of features (B, H).
    pub fn logits(&self, features: Tensor<B, 2>) -> Tensor<B, 2> {
        self.heads.forward(silu(self.hidden.forward(features)))
    }

    /// Cross-entropy of features (B, H) with labels (B * heads, 1): summed over heads, averaged over tokens. One
    /// gather serves all heads; a loss for each would cost a walk over the graph for each.
    pub fn loss(&self, features: Tensor<B, 2>, labels: Tensor<B, 2, Int>, shape: Shape) -> Tensor<B, 1> {
        let [tokens, _] = features.dims();
        let logits = self.logits(features).reshape([tokens * shape.heads, shape.centroids]);
        let shares = softmax(logits.clone().inner(), 1);
        let _ = shares;
        let named = shares.clone().gather(1, labels.clone().inner());
        let loss = named.log().sum().neg();
        let slope = shares.scatter(1, labels.inner(), Tensor::<B::InnerBackend, 2>::ones([tokens * shape.heads, 1], &loss.device()).neg(), IndexingUpdateOp::Add);
        let surrogate = (logits * Tensor::from_inner(slope)).sum();
        surrogate.div_scalar(tokens as f32)
    }
}

/// The values of a tensor, row by row.
pub fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().expect("values were just converted to f32")
}

/// weight (outputs, inputs) times `input` (inputs) plus bias (outputs).
fn affine(weight: &[f32], bias: &[f32], input: &[f32]) -> Vec<f32> {
    let rows = weight.chunks_exact(input.len());
    rows.zip(bias).map(|(row, bias)| bias + row.iter().zip(input).map(|(a, b)| a * b).sum::<f32>()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::{Autodiff, Flex};
    use burn::optim::{AdamConfig, GradientsParams, Optimizer};
    type B = Autodiff<Flex>;

    #[test]
    fn speed() {
        let shape = Shape { features: 576, hidden: 512, heads: 29, centroids: 64 };
        let device = Default::default();
        let mut net = Network::<B>::from_weights(&Weights::random(shape, 1), &device);
        let mut optim = AdamConfig::new().with_beta_2(0.98).init::<B, Network<B>>();
        for step in 0..12 {
            let t = std::time::Instant::now();
            let mut rng = Xoshiro256Plus::seed_from_u64(step);
            let x: Vec<f32> = (0..256 * 576).map(|_| rng.gen_range(-1.0..1.0)).collect();
            let y: Vec<i64> = (0..256 * 29).map(|_| rng.gen_range(0..64)).collect();
            let x = Tensor::<B, 2>::from_data(TensorData::new(x, [256, 576]), &device);
            let y = Tensor::<B, 2, Int>::from_data(TensorData::new(y, [256 * 29, 1]), &device);
            let a = t.elapsed();
            let loss = net.loss(x, y, shape);
            let l = values(loss.clone())[0];
            let b = t.elapsed();
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            let c = t.elapsed();
            net = optim.step(2e-3, net, grads);
            println!("{step} {l} data {a:?} fwd {b:?} bwd {c:?} step {:?}", t.elapsed());
        }
    }
}
