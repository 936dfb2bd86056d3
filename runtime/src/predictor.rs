//! The predictor's network, evaluated for one token.

use crate::{Error, Result};
use np_formats::{FEATURE_CLIP, Geometry, PredictorNetwork, PredictorWeights};

/// Features of the residual stream after layer 0 in, centroid logits of later layers out. See
/// [`np_formats::PredictorWeights`] for the formula.
pub struct Predictor {
    mean: Vec<f32>,
    scale: Vec<f32>,
    eps: f32,
    hidden_weight: Vec<f32>,
    hidden_bias: Vec<f32>,
    heads_weight: Vec<f32>,
    heads_bias: Vec<f32>,
    features: Vec<f32>,
    hidden: Vec<f32>,
    logits: Vec<f32>,
}

impl Predictor {
    /// A predictor whose first `skipped` logits are never needed, since their layers are dense. The network must have
    /// `outputs` logits in all.
    pub fn new(
        weights: &PredictorWeights,
        network: &PredictorNetwork,
        geometry: &Geometry,
        outputs: usize,
        skipped: usize,
    ) -> Result<Self> {
        if network.outputs != outputs {
            return Err(Error::Selector(format!(
                "predictor.safetensors names {} centroids, centroids.safetensors has {outputs}; run `np-train \
                 predictor` again",
                network.outputs
            )));
        }
        let wanted = outputs - skipped;
        Ok(Self {
            mean: weights.mean.clone(),
            scale: weights.std.iter().map(|std| 1.0 / std).collect(),
            eps: geometry.rms_norm_eps,
            hidden_weight: network.hidden_weight.clone(),
            hidden_bias: network.hidden_bias.clone(),
            heads_weight: network.heads_weight[skipped * network.width..].to_vec(),
            heads_bias: network.heads_bias[skipped..].to_vec(),
            features: vec![0.0; geometry.hidden],
            hidden: vec![0.0; network.width],
            logits: vec![0.0; wanted],
        })
    }

    /// Logits for the residual stream (hidden) after layer 0.
    pub fn logits(&mut self, residual: &[f32]) -> &[f32] {
        assert_eq!(residual.len(), self.features.len());
        let mean_square = dot(residual, residual) / residual.len() as f32;
        let norm = 1.0 / (mean_square + self.eps).sqrt();
        let statistics = self.mean.iter().zip(&self.scale);
        for ((feature, value), (mean, scale)) in self.features.iter_mut().zip(residual).zip(statistics) {
            *feature = ((value * norm - mean) * scale).clamp(-FEATURE_CLIP, FEATURE_CLIP);
        }
        affine(&self.hidden_weight, &self.hidden_bias, &self.features, &mut self.hidden);
        for value in &mut self.hidden {
            *value /= 1.0 + (-*value).exp();
        }
        affine(&self.heads_weight, &self.heads_bias, &self.hidden, &mut self.logits);
        &self.logits
    }
}

/// out = weight · x + bias.
fn affine(weight: &[f32], bias: &[f32], x: &[f32], out: &mut [f32]) {
    for ((out, row), bias) in out.iter_mut().zip(weight.chunks_exact(x.len())).zip(bias) {
        *out = dot(row, x) + bias;
    }
}

/// Sixteen sums side by side, so that the compiler may use vectors.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; 16];
    let (a_chunks, b_chunks) = (a.chunks_exact(16), b.chunks_exact(16));
    let rest: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + rest
}
