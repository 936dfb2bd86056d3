//! Small made-up GGUF files for tests.

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

/// Metadata of a model of hidden size 64 with one layer, two heads of 32 and one key head, and a vocabulary of eight.
pub fn metadata(architecture: &str) -> HashMap<String, Value> {
    let text = |text: &str| Value::String(text.into());
    let texts = |texts: &[&str]| Value::Array(texts.iter().map(|item| text(item)).collect());
    let own = |key: &str, value: u32| (format!("{architecture}.{key}"), Value::U32(value));
    let mut metadata = HashMap::from([
        own("block_count", 1),
        own("embedding_length", 64),
        own("feed_forward_length", 96),
        own("attention.head_count", 2),
        own("attention.head_count_kv", 1),
        own("context_length", 128),
        (format!("{architecture}.attention.layer_norm_rms_epsilon"), Value::F32(1e-5)),
        (format!("{architecture}.rope.freq_base"), Value::F32(100_000.0)),
    ]);
    let types = [1, 1, 1, 1, 3, 1, 4, 5].map(Value::I32).to_vec();
    let plain = [
        ("general.architecture", text(architecture)),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("smollm")),
        ("tokenizer.ggml.tokens", texts(&["a", "b", "ab", "Ġ", "<end>", "7", "<user>", "<pad>"])),
        ("tokenizer.ggml.token_type", Value::Array(types)),
        ("tokenizer.ggml.merges", texts(&["a b"])),
        ("tokenizer.ggml.bos_token_id", Value::U32(4)),
        ("tokenizer.ggml.eos_token_id", Value::U32(4)),
        ("tokenizer.ggml.padding_token_id", Value::U32(7)),
        ("tokenizer.chat_template", text("{{ messages }}")),
    ];
    metadata.extend(plain.map(|(key, value)| (key.to_string(), value)));
    metadata
}

/// `metadata` with some keys set or removed.
pub fn with(mut metadata: HashMap<String, Value>, changes: &[(&str, Option<Value>)]) -> HashMap<String, Value> {
    for (key, value) in changes {
        match value {
            Some(value) => metadata.insert((*key).into(), value.clone()),
            None => metadata.remove(*key),
        };
    }
    metadata
}

/// Names and shapes of that model's tensors.
pub fn tensor_shapes() -> Vec<(&'static str, Vec<usize>)> {
    vec![
        ("token_embd.weight", vec![8, 64]),
        ("blk.0.attn_norm.weight", vec![64]),
        ("blk.0.attn_q.weight", vec![64, 64]),
        ("blk.0.attn_k.weight", vec![32, 64]),
        ("blk.0.attn_v.weight", vec![32, 64]),
        ("blk.0.attn_output.weight", vec![64, 64]),
        ("blk.0.ffn_norm.weight", vec![64]),
        ("blk.0.ffn_gate.weight", vec![96, 64]),
        ("blk.0.ffn_up.weight", vec![96, 64]),
        ("blk.0.ffn_down.weight", vec![64, 96]),
        ("output_norm.weight", vec![64]),
    ]
}

/// The value of a tensor's element: its row and column can be told from it in F16.
pub fn value(row: usize, column: usize) -> f32 {
    row as f32 + column as f32 / 128.0
}

/// Writes a file of these tensors. Matrices named in `quantised` are stored as Q8_0, all else as F32.
pub fn write(path: &Path, metadata: &HashMap<String, Value>, shapes: &[(&str, Vec<usize>)], quantised: &[&str]) {
    let tensors: Vec<(&str, QTensor)> = shapes
        .iter()
        .map(|(name, shape)| {
            let columns = *shape.last().unwrap();
            let count: usize = shape.iter().product();
            let values: Vec<f32> = (0..count).map(|at| value(at / columns, at % columns)).collect();
            let tensor = Tensor::from_vec(values, shape.as_slice(), &Device::Cpu).unwrap();
            let dtype = if quantised.contains(name) { GgmlDType::Q8_0 } else { GgmlDType::F32 };
            (*name, QTensor::quantize(&tensor, dtype).unwrap())
        })
        .collect();
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    gguf_file::write(&mut File::create(path).unwrap(), &metadata, &tensors).unwrap();
}
