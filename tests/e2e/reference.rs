//! A naive transformer in f64: every position from the beginning, every neuron, masks applied. Written apart from the
//! engine, to be compared with.

use half::f16;
use np_formats::Mask;
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Rows of a matrix.
type Matrix = Vec<Vec<f64>>;

/// A checkpoint with tied embeddings and neither biases nor head norms, as the tiny model has it.
pub struct Reference {
    config: Value,
    tensors: BTreeMap<String, Matrix>,
}

impl Reference {
    /// Reads a checkpoint folder.
    pub fn read(folder: &Path) -> Self {
        let config = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
        let bytes = fs::read(folder.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, view)| {
            let values: Vec<f64> =
                view.data().chunks_exact(2).map(|two| f16::from_le_bytes([two[0], two[1]]).to_f64()).collect();
            let columns = *view.shape().last().unwrap();
            (name.to_string(), values.chunks_exact(columns).map(<[f64]>::to_vec).collect())
        });
        Self { config, tensors: tensors.collect() }
    }

    /// Logits after each of `tokens`. `masks` holds the neurons that are computed at a (position, layer), all of them
    /// where it has none.
    pub fn logits(&self, tokens: &[u32], masks: &BTreeMap<(usize, usize), Mask>) -> Vec<Vec<f64>> {
        let embedding = &self.tensors["model.embed_tokens.weight"];
        let mut residual: Matrix = tokens.iter().map(|&token| embedding[token as usize].clone()).collect();
        for layer in 0..self.size("num_hidden_layers") {
            let attended = self.attention(layer, &residual);
            residual.iter_mut().zip(attended).for_each(|(row, more)| add(row, &more));
            for (position, row) in residual.iter_mut().enumerate() {
                let x = self.norm(&format!("model.layers.{layer}.post_attention_layernorm.weight"), row);
                add(row, &self.mlp(layer, &x, masks.get(&(position, layer))));
            }
        }
        residual.iter().map(|row| product(embedding, &self.norm("model.norm.weight", row))).collect()
    }

    fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    fn weight(&self, layer: usize, name: &str) -> &Matrix {
        &self.tensors[&format!("model.layers.{layer}.{name}.weight")]
    }

    fn norm(&self, name: &str, row: &[f64]) -> Vec<f64> {
        let mean_square = row.iter().map(|value| value * value).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (mean_square + self.config["rms_norm_eps"].as_f64().unwrap()).sqrt();
        row.iter().zip(&self.tensors[name][0]).map(|(value, weight)| value * scale * weight).collect()
    }

    fn attention(&self, layer: usize, residual: &Matrix) -> Matrix {
        let (heads, kv_heads) = (self.size("num_attention_heads"), self.size("num_key_value_heads"));
        let dim = residual[0].len() / heads;
        let mut keys: Vec<Vec<f64>> = Vec::new();
        let mut values: Vec<Vec<f64>> = Vec::new();
        let mut out = Vec::new();
        for (position, row) in residual.iter().enumerate() {
            let x = self.norm(&format!("model.layers.{layer}.input_layernorm.weight"), row);
            let query = self.rotated(product(self.weight(layer, "self_attn.q_proj"), &x), dim, position);
            keys.push(self.rotated(product(self.weight(layer, "self_attn.k_proj"), &x), dim, position));
            values.push(product(self.weight(layer, "self_attn.v_proj"), &x));
            let mut attended = Vec::new();
            for head in 0..heads {
                let of_kv = head * kv_heads / heads * dim;
                let query = &query[head * dim..][..dim];
                let scores: Vec<f64> =
                    keys.iter().map(|key| dot(query, &key[of_kv..][..dim]) / (dim as f64).sqrt()).collect();
                let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
                let sum: f64 = weights.iter().sum();
                attended.extend((0..dim).map(|at| {
                    let mixed = weights.iter().zip(&values).map(|(weight, value)| weight * value[of_kv + at]);
                    mixed.sum::<f64>() / sum
                }));
            }
            out.push(product(self.weight(layer, "self_attn.o_proj"), &attended));
        }
        out
    }

    fn rotated(&self, mut heads: Vec<f64>, dim: usize, position: usize) -> Vec<f64> {
        let theta = self.config["rope_theta"].as_f64().unwrap();
        for head in heads.chunks_exact_mut(dim) {
            for at in 0..dim / 2 {
                let angle = position as f64 * theta.powf(-2.0 * at as f64 / dim as f64);
                let (sin, cos) = angle.sin_cos();
                let (a, b) = (head[at], head[at + dim / 2]);
                head[at] = a * cos - b * sin;
                head[at + dim / 2] = b * cos + a * sin;
            }
        }
        heads
    }

    fn mlp(&self, layer: usize, x: &[f64], mask: Option<&Mask>) -> Vec<f64> {
        let gate = product(self.weight(layer, "mlp.gate_proj"), x);
        let up = product(self.weight(layer, "mlp.up_proj"), x);
        let computed = |neuron: usize| mask.is_none_or(|mask| mask.contains(neuron as u32));
        let activations: Vec<f64> = (0..gate.len())
            .map(
                |neuron| if computed(neuron) { gate[neuron] / (1.0 + (-gate[neuron]).exp()) * up[neuron] } else { 0.0 },
            )
            .collect();
        product(self.weight(layer, "mlp.down_proj"), &activations)
    }
}

fn product(matrix: &Matrix, x: &[f64]) -> Vec<f64> {
    matrix.iter().map(|row| dot(row, x)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(row: &mut [f64], more: &[f64]) {
    row.iter_mut().zip(more).for_each(|(value, more)| *value += more);
}
