//! Small made-up checkpoints for tests.

use crate::tensors::{ModelTensor, model_tensors};
use half::{bf16, f16};
use np_formats::{Dtype, Geometry, RopeScaling};
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256Plus;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Two layers, untied, hidden 64.
pub fn geometry() -> Geometry {
    Geometry {
        layers: 2,
        hidden: 64,
        intermediate: 96,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        vocab: 128,
        context_max: 256,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        sliding_window: None,
        tied_embedding: false,
        qkv_bias: false,
        qk_norm: false,
    }
}

/// The config of such a model.
pub fn config(geometry: &Geometry) -> Value {
    json!({
        "model_type": "llama", "hidden_act": "silu", "hidden_size": geometry.hidden,
        "intermediate_size": geometry.intermediate, "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads, "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim, "vocab_size": geometry.vocab,
        "max_position_embeddings": geometry.context_max, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": geometry.tied_embedding, "eos_token_id": 2,
    })
}

/// Values of a tensor: different for every tensor and seed, and small numbers that F16 and BF16 hold exactly.
pub fn values(tensor: &ModelTensor, seed: u64) -> Vec<f32> {
    let name_seed = tensor.name.bytes().fold(seed, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
    let mut random = Xoshiro256Plus::seed_from_u64(name_seed);
    let count = tensor.shape.iter().product();
    (0..count).map(|_| f32::from(random.gen_range(-127i8..=127)) / 64.0).collect()
}

/// `values` as bytes of `dtype`.
pub fn encode(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        Dtype::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

/// A tensor to be written: name, dtype as the header names it, shape, bytes.
pub type RawTensor = (String, String, Vec<usize>, Vec<u8>);

/// All tensors of a model, as they would be stored.
pub fn raw_tensors(geometry: &Geometry, dtype: Dtype, seed: u64) -> Vec<RawTensor> {
    let raw = |tensor: ModelTensor| {
        let bytes = encode(&values(&tensor, seed), dtype);
        (tensor.name, dtype.name().to_string(), tensor.shape, bytes)
    };
    model_tensors(geometry).into_iter().map(raw).collect()
}

/// Writes a safetensors file.
pub fn write_safetensors(path: &Path, tensors: &[RawTensor]) {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend_from_slice(bytes);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(&header);
    file.extend_from_slice(&data);
    fs::write(path, file).unwrap();
}

/// Writes a checkpoint with a config, a small stand-in for a tokenizer, and one file of tensors.
pub fn write_checkpoint(directory: &Path, geometry: &Geometry, dtype: Dtype, seed: u64) {
    fs::create_dir_all(directory).unwrap();
    fs::write(directory.join("config.json"), config(geometry).to_string()).unwrap();
    fs::write(directory.join("tokenizer.json"), "{\"version\": \"1.0\"}").unwrap();
    write_safetensors(&directory.join("model.safetensors"), &raw_tensors(geometry, dtype, seed));
}

/// Writes a checkpoint of one shard per layer and one for the rest, in the way of Hugging Face.
pub fn write_sharded_checkpoint(directory: &Path, geometry: &Geometry, seed: u64) {
    write_checkpoint(directory, geometry, Dtype::F16, seed);
    fs::remove_file(directory.join("model.safetensors")).unwrap();
    let total = geometry.layers + 1;
    let mut shards = vec![Vec::new(); total];
    for tensor in raw_tensors(geometry, Dtype::F16, seed) {
        let layer = tensor.0.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
        shards[layer.unwrap_or(geometry.layers)].push(tensor);
    }
    let mut weight_map = serde_json::Map::new();
    for (index, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{total:05}.safetensors", index + 1);
        write_safetensors(&directory.join(&name), shard);
        weight_map.extend(shard.iter().map(|tensor| (tensor.0.clone(), name.clone().into())));
    }
    let index = json!({"metadata": {"total_size": 0}, "weight_map": weight_map});
    fs::write(directory.join("model.safetensors.index.json"), index.to_string()).unwrap();
}
