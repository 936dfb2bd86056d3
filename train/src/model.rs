//! The predictor as burn sees it: features in, the logits of all heads out.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorData};
use np_formats::PredictorNetwork;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256Plus;

/// Keeps the logarithm of a probability finite.
const PROBABILITY_MIN: f32 = 1e-30;

/// Sizes of one network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Values of a token's features (H).
    pub features: usize,
    /// Units of the hidden layer.
    pub width: usize,
    /// Heads: one per layer for joint centroids, two per layer for separate ones.
    pub heads: usize,
    /// Centroids that each head tells apart (C).
    pub centroids: usize,
}

/// Linear, SiLU, and all heads side by side in one linear layer: one product instead of one per layer of the model.
#[derive(Module, Debug)]
pub struct Network<B: Backend> {
    hidden: Linear<B>,
    heads: Linear<B>,
}

impl Shape {
    /// Logits of all heads together.
    pub fn outputs(&self) -> usize {
        self.heads * self.centroids
    }

    /// Uniform random weights within 1 / sqrt(inputs), the same for the same seed on every backend. The backends' own
    /// generators are one per process, so that two trainings at once would not be repeatable.
    pub fn random(&self, seed: u64) -> PredictorNetwork {
        let mut rng = Xoshiro256Plus::seed_from_u64(seed);
        let mut uniform = |count: usize, inputs: usize| -> Vec<f32> {
            let bound = 1.0 / (inputs as f32).sqrt();
            (0..count).map(|_| rng.gen_range(-bound..bound)).collect()
        };
        PredictorNetwork {
            width: self.width,
            outputs: self.outputs(),
            hidden_weight: uniform(self.width * self.features, self.features),
            hidden_bias: uniform(self.width, self.features),
            heads_weight: uniform(self.outputs() * self.width, self.width),
            heads_bias: uniform(self.outputs(), self.width),
        }
    }
}

impl<B: Backend> Network<B> {
    /// A network with these weights.
    pub fn new(weights: &PredictorNetwork, device: &B::Device) -> Self {
        let linear = |outputs: usize, weight: &[f32], bias: &[f32]| {
            let inputs = weight.len() / outputs;
            let rows = Tensor::<B, 2>::from_data(TensorData::new(weight.to_vec(), [outputs, inputs]), device);
            let mut linear = LinearConfig::new(inputs, outputs).init(device);
            // The file has one row per output, burn one per input.
            linear.weight = Param::from_data(rows.transpose().into_data(), device);
            linear.bias = Some(Param::from_data(TensorData::new(bias.to_vec(), [outputs]), device));
            linear
        };
        Self {
            hidden: linear(weights.width, &weights.hidden_weight, &weights.hidden_bias),
            heads: linear(weights.outputs, &weights.heads_weight, &weights.heads_bias),
        }
    }

    /// The weights as they are now.
    pub fn weights(&self) -> PredictorNetwork {
        let bias = |linear: &Linear<B>| linear.bias.as_ref().map(|bias| values(bias.val())).unwrap_or_default();
        let [width, outputs] = self.heads.weight.dims();
        PredictorNetwork {
            width,
            outputs,
            hidden_weight: values(self.hidden.weight.val().transpose()),
            hidden_bias: bias(&self.hidden),
            heads_weight: values(self.heads.weight.val().transpose()),
            heads_bias: bias(&self.heads),
        }
    }

    /// Logits (B, heads * centroids) of standardised, clipped features (B, H).
    pub fn logits(&self, features: Tensor<B, 2>) -> Tensor<B, 2> {
        self.heads.forward(silu(self.hidden.forward(features)))
    }
}

impl<B: AutodiffBackend> Network<B> {
    /// The cross-entropy of features (B, H) with labels (B * heads, 1), summed over heads and averaged over tokens:
    /// first a value that has its gradient, then itself.
    ///
    /// The slope of cross-entropy is the probabilities less one at the label. Stating it spares the graph a logarithm
    /// and a gather of all logits, which take longer than the products.
    pub fn loss(
        &self,
        features: Tensor<B, 2>,
        labels: Tensor<B::InnerBackend, 2, Int>,
        centroids: usize,
    ) -> (Tensor<B, 1>, Tensor<B::InnerBackend, 1>) {
        let [tokens, _] = features.dims();
        let [rows, _] = labels.dims();
        let logits = self.logits(features).reshape([rows, centroids]);
        let probabilities = softmax(logits.clone().inner(), 1);
        let at_label = probabilities.clone().gather(1, labels.clone());
        let loss = at_label.clamp_min(PROBABILITY_MIN).log().sum().neg().div_scalar(tokens as f32);
        let minus_one = Tensor::full([rows, 1], -1.0, &loss.device());
        let slope = probabilities.scatter(1, labels, minus_one, IndexingUpdateOp::Add).div_scalar(tokens as f32);
        ((logits * Tensor::from_inner(slope)).sum(), loss)
    }
}

/// The values of a tensor, row by row.
pub fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().expect("values were just converted to f32")
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::{Autodiff, Flex};
    use burn::optim::GradientsParams;
    use burn::tensor::activation::log_softmax;

    type B = Autodiff<Flex>;

    const SHAPE: Shape = Shape { features: 5, width: 7, heads: 3, centroids: 4 };

    #[test]
    fn weights_survive_the_network() {
        let weights = SHAPE.random(1);
        assert_eq!(Network::<Flex>::new(&weights, &Default::default()).weights(), weights);
        assert_ne!(SHAPE.random(2), weights);
    }

    #[test]
    fn the_stated_slope_is_that_of_cross_entropy() {
        let device = Default::default();
        let network = Network::<B>::new(&SHAPE.random(3), &device);
        let features = (0..10).map(|value| (value as f32).sin()).collect::<Vec<_>>();
        let features = Tensor::<B, 2>::from_data(TensorData::new(features, [2, 5]), &device);
        let labels = TensorData::new(vec![0i64, 3, 1, 2, 2, 0], [6, 1]);
        let (sloped, loss) = network.loss(features.clone(), Tensor::from_data(labels.clone(), &device), 4);
        let logits = network.logits(features).reshape([6, 4]);
        let plain = log_softmax(logits, 1).gather(1, Tensor::from_data(labels, &device)).sum().neg().div_scalar(2.0);
        assert!((values(loss)[0] - values(plain.clone())[0]).abs() < 1e-5);
        let slope = |tensor: Tensor<B, 1>| {
            let mut slopes = GradientsParams::from_grads(tensor.backward(), &network);
            values(slopes.remove::<Flex, 2>(network.hidden.weight.id).expect("the hidden layer has a slope"))
        };
        for (stated, derived) in slope(sloped).into_iter().zip(slope(plain)) {
            assert!((stated - derived).abs() < 1e-6, "{stated} {derived}");
        }
    }
}
