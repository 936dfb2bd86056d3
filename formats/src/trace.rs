//! Traces: what collection saw and clustering and training read.
//!
//! One file per layer, so that one layer is in memory at a time:
//!
//! - `traces/features.safetensors`: `features` F32 (T, H), the residual stream after layer 0, RMS-normalised;
//!   `sequence_starts` U32 (S), the tokens at which a sequence begins.
//! - `traces/layer_LLL.safetensors`, for layers 1 and up: `importance` U8 (T, M), see [`importance_to_u8`]; packed
//!   masks `masks.joint`, `masks.gate`, `masks.up` U64 (T, words); `energy` F64 (M), the sum of squared importance;
//!   `count` U32 (1), the tokens in that sum. The first token of each sequence is in neither sum nor clusters.
//! - `traces/labels.safetensors`: `layers.L.joint`, `layers.L.gate`, `layers.L.up` U16 (T), the centroid of each token.

use crate::error::Result;
use crate::{Error, Fingerprint, MASK_WORD_BITS, TensorFile, TensorSpec};
use safetensors::Dtype as TensorDtype;
use std::path::{Path, PathBuf};

/// Folder of the traces in an artifact directory.
pub const TRACES_NAME: &str = "traces";
/// Key of the share of neurons in the traces' masks.
pub const K_FRACTION_KEY: &str = "np.k_fraction";

/// Key, in the headers of labels and vocabulary, of the hash of the traces and options that both came from: the two
/// belong together when they have the same.
pub const VOCABULARY_KEY: &str = "np.vocabulary";

/// Steps of the importance scale per octave.
const STEPS_PER_OCTAVE: f32 = 8.0;
/// The importance of step 1; below half a step under it, importance is stored as zero.
const SMALLEST_LOG2: f32 = -20.0;

/// Importance on a logarithmic scale: step s ≥ 1 stands for 2^((s − 1)/8 − 20), 0 for none. Steps are 9 % apart and
/// reach from 1e-6 to 3,700.
pub fn importance_to_u8(importance: f32) -> u8 {
    if importance <= 0.0 || importance.is_nan() {
        return 0;
    }
    let step = (importance.log2() - SMALLEST_LOG2) * STEPS_PER_OCTAVE + 1.0;
    step.round().clamp(0.0, 255.0) as u8
}

/// The importance that a step stands for.
pub fn importance_from_u8(step: u8) -> f32 {
    match step {
        0 => 0.0,
        _ => (f32::from(step - 1) / STEPS_PER_OCTAVE + SMALLEST_LOG2).exp2(),
    }
}

/// Path of the features' file in an artifact directory.
pub fn features_path(directory: &Path) -> PathBuf {
    directory.join(TRACES_NAME).join("features.safetensors")
}

/// Path of a layer's trace in an artifact directory.
pub fn layer_trace_path(directory: &Path, layer: usize) -> PathBuf {
    directory.join(TRACES_NAME).join(format!("layer_{layer:03}.safetensors"))
}

/// Path of the labels' file in an artifact directory.
pub fn labels_path(directory: &Path) -> PathBuf {
    directory.join(TRACES_NAME).join("labels.safetensors")
}

/// Tensors of a layer's trace over `tokens` tokens and `neurons` neurons, in file order.
pub fn layer_trace_specs(tokens: usize, neurons: usize) -> Vec<TensorSpec> {
    let words = neurons.div_ceil(MASK_WORD_BITS);
    vec![
        TensorSpec::new("importance", TensorDtype::U8, &[tokens, neurons]),
        TensorSpec::new("masks.joint", TensorDtype::U64, &[tokens, words]),
        TensorSpec::new("masks.gate", TensorDtype::U64, &[tokens, words]),
        TensorSpec::new("masks.up", TensorDtype::U64, &[tokens, words]),
        TensorSpec::new("energy", TensorDtype::F64, &[neurons]),
        TensorSpec::new("count", TensorDtype::U32, &[1]),
    ]
}

/// A layer's trace, in memory.
pub struct LayerTrace {
    /// Tokens.
    pub tokens: usize,
    /// Neurons of the layer.
    pub neurons: usize,
    /// (tokens, neurons), on the scale of [`importance_to_u8`].
    pub importance: Vec<u8>,
    /// (tokens, words): top K of importance.
    pub joint: Vec<u64>,
    /// (tokens, words): top √(K/M)·M of |silu(gate·x)|.
    pub gate: Vec<u64>,
    /// (tokens, words): top √(K/M)·M of |up·x|.
    pub up: Vec<u64>,
    /// (neurons): sum of squared importance over `count` tokens.
    pub energy: Vec<f64>,
    /// Tokens in the sums.
    pub count: u32,
    /// K / M of the masks.
    pub k_fraction: f64,
}

impl LayerTrace {
    /// Reads the trace of `layer`, which must belong to `parent`.
    pub fn read(directory: &Path, layer: usize, neurons: usize, parent: Fingerprint) -> Result<Self> {
        let path = layer_trace_path(directory, layer);
        let file = open_trace(&path, parent)?;
        let tokens = file.spec("importance").and_then(|spec| spec.shape.first().copied()).unwrap_or(0);
        let words = neurons.div_ceil(MASK_WORD_BITS);
        let masks = |name| file.read::<u64>(name, TensorDtype::U64, &[tokens, words]);
        let k_fraction = file.extra(K_FRACTION_KEY).and_then(|text| text.parse().ok());
        Ok(Self {
            tokens,
            neurons,
            importance: file.read("importance", TensorDtype::U8, &[tokens, neurons])?,
            joint: masks("masks.joint")?,
            gate: masks("masks.gate")?,
            up: masks("masks.up")?,
            energy: file.read("energy", TensorDtype::F64, &[neurons])?,
            count: file.read::<u32>("count", TensorDtype::U32, &[1])?[0],
            k_fraction: k_fraction.ok_or_else(|| Error::Header {
                path,
                problem: format!("{K_FRACTION_KEY} is missing; run `np-prep collect` again"),
            })?,
        })
    }

    /// Packed words of one mask.
    pub fn words(&self) -> usize {
        self.neurons.div_ceil(MASK_WORD_BITS)
    }
}

/// The features that the predictor sees, and where sequences begin.
pub struct Features {
    /// Width of the residual stream.
    pub hidden: usize,
    /// (tokens, hidden).
    pub values: Vec<f32>,
    /// Tokens at which a sequence begins, ascending, the first being 0.
    pub sequence_starts: Vec<u32>,
}

impl Features {
    /// Reads the features, which must belong to `parent`.
    pub fn read(directory: &Path, hidden: usize, parent: Fingerprint) -> Result<Self> {
        let file = open_trace(&features_path(directory), parent)?;
        let count = |name| file.spec(name).and_then(|spec| spec.shape.first().copied()).unwrap_or(0);
        let (tokens, sequences) = (count("features"), count("sequence_starts"));
        Ok(Self {
            hidden,
            values: file.read("features", TensorDtype::F32, &[tokens, hidden])?,
            sequence_starts: file.read("sequence_starts", TensorDtype::U32, &[sequences])?,
        })
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.values.len() / self.hidden
    }
}

fn open_trace(path: &Path, parent: Fingerprint) -> Result<TensorFile> {
    match TensorFile::open_made_from(path, parent) {
        Err(Error::Missing { path, .. }) => Err(Error::Missing { path, remedy: "run `np-prep collect` first" }),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn importance_survives_to_half_a_step() {
        assert_eq!(importance_to_u8(0.0), 0);
        assert_eq!(importance_to_u8(f32::NAN), 0);
        assert_eq!(importance_to_u8(1e-30), 0);
        assert_eq!(importance_to_u8(1e30), 255);
        assert_eq!(importance_to_u8(1.0), 161);
        for step in 0..=255 {
            assert_eq!(importance_to_u8(importance_from_u8(step)), step);
        }
        for importance in [3e-6f32, 0.01, 0.7, 5.0, 3_000.0] {
            let back = importance_from_u8(importance_to_u8(importance));
            assert!((back / importance).log2().abs() <= 0.5 / STEPS_PER_OCTAVE + 1e-4, "{importance} {back}");
        }
    }
}
