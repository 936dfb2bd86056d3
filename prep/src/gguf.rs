//! GGUF files become checkpoint directories.

use crate::checkpoint::{CONFIG_NAME, Checkpoint};
use crate::checkpoint_writer::CheckpointWriter;
use crate::convert::{Origin, narrow};
use crate::error::{Error, Result, io_error};
use crate::gguf_metadata::Metadata;
use crate::gguf_tokenizer::tokenizer_files;
use crate::progress::Progress;
use crate::provenance::{Provenance, own_name, sha256_of, weights_sha256};
use crate::tensors::{ModelTensor, check_tensors, model_tensors};
use candle_core::quantized::gguf_file::{Content, TensorInfo};
use candle_core::{CpuStorage, Device, Shape, Storage};
use np_formats::{AtomicFile, Dtype, Geometry, Source, TensorDtype, TensorSpec};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufReader, Read};
use std::path::Path;

/// Values that are dequantised at once, if a block of rows is not larger.
const PIECE_VALUES: usize = 4 << 20;

/// Makes a checkpoint directory of the GGUF file at `path`: all tensors in the 16-bit `dtype`, the config, and the
/// tokenizer. Returns where it came from.
///
/// A directory that holds a whole import of the same file already is left as it is.
pub fn import_gguf(path: &Path, directory: &Path, dtype: Dtype, progress: Progress) -> Result<Source> {
    let bar = progress.bytes("checksum", fs::metadata(path).map_err(io_error(path, "open"))?.len());
    let source = Source { name: own_name(path), revision: None, sha256: Some(sha256_of(path, &bar)?) };
    bar.finish_and_clear();
    if is_imported(&source, directory, dtype, progress) {
        return Ok(source);
    }
    let gguf = Gguf::open(path)?;
    let config = config(&gguf.metadata, &gguf.shapes, dtype)?;
    let geometry = Geometry::from_config(path, &config.to_string())?;
    check_tensors(path, &geometry, &gguf.shapes)?;
    let tokenizer = tokenizer_files(&gguf.metadata)?;
    fs::create_dir_all(directory).map_err(io_error(directory, "create"))?;
    write_json(directory, CONFIG_NAME, &config)?;
    write_json(directory, "generation_config.json", &generation_config(&gguf.metadata)?)?;
    write_json(directory, "tokenizer.json", &tokenizer.tokenizer)?;
    write_json(directory, "tokenizer_config.json", &tokenizer.config)?;
    let weights_sha256 = gguf.write_tensors(directory, &geometry, dtype, progress)?;
    Provenance { source: source.clone(), weights_sha256 }.write(directory)?;
    Ok(source)
}

/// Whether `directory` holds a whole import of `source`, unchanged since.
fn is_imported(source: &Source, directory: &Path, dtype: Dtype, progress: Progress) -> bool {
    let noted = Provenance::read(directory).filter(|noted| noted.source == *source);
    let (Some(noted), Ok(checkpoint)) = (noted, Checkpoint::open(directory, None)) else { return false };
    checkpoint.dtype() == dtype
        && weights_sha256(&checkpoint, progress).is_ok_and(|sha256| sha256 == noted.weights_sha256)
}

/// An open file whose metadata and tensor table have been read.
struct Gguf<'a> {
    path: &'a Path,
    file: File,
    metadata: Metadata,
    data_at: u64,
    tensors: BTreeMap<String, TensorInfo>,
    shapes: BTreeMap<String, Vec<usize>>,
}

impl<'a> Gguf<'a> {
    fn open(path: &'a Path) -> Result<Self> {
        check_alignment(path)?;
        let file = File::open(path).map_err(io_error(path, "open"))?;
        let content = Content::read(&mut BufReader::new(&file)).map_err(|error| unreadable(path, &error))?;
        let metadata = Metadata::new(path, content.metadata)?;
        let mut tensors = BTreeMap::new();
        for (name, info) in content.tensor_infos {
            let model_name = model_name(&name).ok_or_else(|| tensor_error(path, &name, "is not supported"))?;
            tensors.insert(model_name, info);
        }
        let shapes = tensors.iter().map(|(name, info)| (name.clone(), info.shape.dims().to_vec())).collect();
        let gguf = Self { path, file, metadata, data_at: content.tensor_data_offset, tensors, shapes };
        gguf.check_bounds()?;
        Ok(gguf)
    }

    /// Every tensor must lie within the file, whose length is compared before anything is read.
    fn check_bounds(&self) -> Result<()> {
        let mut expected = self.data_at;
        for (name, info) in &self.tensors {
            let columns = info.shape.dims().last().copied().unwrap_or(0);
            if columns == 0 || columns % info.ggml_dtype.block_size() != 0 {
                return Err(tensor_error(self.path, name, "has rows that are not whole blocks"));
            }
            let rows =
                info.shape.dims().iter().rev().skip(1).try_fold(1u64, |rows, &size| rows.checked_mul(size as u64));
            let end = rows
                .and_then(|rows| rows.checked_mul(row_bytes(info, columns) as u64))
                .and_then(|bytes| self.data_at.checked_add(info.offset)?.checked_add(bytes))
                .ok_or_else(|| tensor_error(self.path, name, "has a size that can't be"))?;
            expected = expected.max(end);
        }
        let actual = self.file.metadata().map_err(io_error(self.path, "stat"))?.len();
        if actual < expected {
            let remedy = "fetch it again";
            return Err(np_formats::Error::Length { path: self.path.into(), actual, expected, remedy }.into());
        }
        Ok(())
    }

    fn write_tensors(&self, directory: &Path, geometry: &Geometry, dtype: Dtype, progress: Progress) -> Result<String> {
        let tensors = model_tensors(geometry);
        let stored = if dtype == Dtype::F16 { TensorDtype::F16 } else { TensorDtype::BF16 };
        let specs: Vec<_> = tensors.iter().map(|tensor| TensorSpec::new(&tensor.name, stored, &tensor.shape)).collect();
        let bar = progress.bytes("import", specs.iter().map(|spec| spec.bytes() as u64).sum());
        let mut writer = CheckpointWriter::create(directory, &specs)?;
        let mut bytes = Vec::new();
        for tensor in &tensors {
            let columns = tensor.shape[tensor.shape.len() - 1];
            let rows = tensor.shape.iter().product::<usize>() / columns;
            let head_rows = self.interleaved_head_rows(tensor, geometry);
            let unit = head_rows.unwrap_or(1);
            let step = (PIECE_VALUES / (unit * columns)).max(1) * unit;
            for first in (0..rows).step_by(step) {
                let count = step.min(rows - first);
                let mut values = self.dequantise(tensor, first, count, columns)?;
                if let Some(head_rows) = head_rows {
                    values = split_halves(&values, head_rows, columns);
                }
                bytes.resize(2 * values.len(), 0);
                let origin = Origin { path: self.path, tensor: &tensor.name, first: first * columns };
                narrow(origin, &values, dtype, &mut bytes)?;
                writer.write(&bytes)?;
                bar.inc(bytes.len() as u64);
            }
        }
        bar.finish_and_clear();
        writer.finish()
    }

    /// Rows `first..first + count` of a tensor in single precision.
    fn dequantise(&self, tensor: &ModelTensor, first: usize, count: usize, columns: usize) -> Result<Vec<f32>> {
        let info = &self.tensors[&tensor.name];
        let rows = TensorInfo {
            ggml_dtype: info.ggml_dtype,
            shape: Shape::from((count, columns)),
            offset: info.offset + (first * row_bytes(info, columns)) as u64,
        };
        let read = || {
            let quantised = rows.read(&mut &self.file, self.data_at, &Device::Cpu)?;
            let whole = quantised.dequantize(&Device::Cpu)?;
            let (storage, _) = whole.storage_and_layout();
            match &*storage {
                Storage::Cpu(CpuStorage::F32(values)) => Ok(values.clone()),
                _ => Err(candle_core::Error::Msg("did not become single precision".into())),
            }
        };
        read().map_err(|error: candle_core::Error| tensor_error(self.path, &tensor.name, &first_line(&error)))
    }

    /// Rows of one head, if the tensor's rows lie in the order of an interleaved rotation: llama.cpp stores the queries
    /// and keys of its architecture `llama` so.
    fn interleaved_head_rows(&self, tensor: &ModelTensor, geometry: &Geometry) -> Option<usize> {
        let rotated = [".q_proj.weight", ".k_proj.weight"].iter().any(|suffix| tensor.name.ends_with(suffix));
        (rotated && self.metadata.architecture() == "llama").then_some(geometry.head_dim)
    }
}

/// Puts the rows of each head from interleaved order (the pairs 2i, 2i + 1 rotate together) into the order of Hugging
/// Face (i and i + half rotate together).
fn split_halves(values: &[f32], head_rows: usize, columns: usize) -> Vec<f32> {
    let mut split = Vec::with_capacity(values.len());
    for head in values.chunks_exact(head_rows * columns) {
        for parity in 0..2 {
            for row in (parity..head_rows).step_by(2) {
                split.extend_from_slice(&head[row * columns..(row + 1) * columns]);
            }
        }
    }
    split
}

fn row_bytes(info: &TensorInfo, columns: usize) -> usize {
    columns / info.ggml_dtype.block_size() * info.ggml_dtype.type_size()
}

/// The name that Hugging Face gives a tensor of a GGUF file.
fn model_name(name: &str) -> Option<String> {
    let (base, kind) = name.rsplit_once('.')?;
    if let Some(rest) = base.strip_prefix("blk.") {
        let (layer, part) = rest.split_once('.')?;
        let layer: usize = layer.parse().ok()?;
        let part = match part {
            "attn_norm" => "input_layernorm",
            "attn_q" => "self_attn.q_proj",
            "attn_k" => "self_attn.k_proj",
            "attn_v" => "self_attn.v_proj",
            "attn_output" => "self_attn.o_proj",
            "ffn_norm" => "post_attention_layernorm",
            "ffn_gate" => "mlp.gate_proj",
            "ffn_up" => "mlp.up_proj",
            "ffn_down" => "mlp.down_proj",
            _ => return None,
        };
        return Some(format!("model.layers.{layer}.{part}.{kind}"));
    }
    match base {
        "token_embd" => Some(format!("model.embed_tokens.{kind}")),
        "output_norm" => Some(format!("model.norm.{kind}")),
        "output" => Some(format!("lm_head.{kind}")),
        _ => None,
    }
}

/// The config that the metadata amounts to, with sorted keys.
fn config(metadata: &Metadata, shapes: &BTreeMap<String, Vec<usize>>, dtype: Dtype) -> Result<Value> {
    let architecture = metadata.architecture();
    let (class, own) = match architecture {
        "llama" => ("LlamaForCausalLM", json!({"attention_bias": false, "mlp_bias": false})),
        "qwen2" => ("Qwen2ForCausalLM", json!({"use_sliding_window": false})),
        other => {
            let problem = format!("{other:?} is not supported; supported are llama and qwen2");
            return Err(metadata.wrong("general.architecture", &problem));
        }
    };
    if let Some(kind) = metadata.text(".rope.scaling.type")?.filter(|kind| *kind != "none") {
        return Err(metadata.wrong(".rope.scaling.type", &format!("{kind:?} is not supported in GGUF files")));
    }
    if metadata.number(".expert_count")?.is_some_and(|experts| experts > 0) {
        return Err(metadata.wrong(".expert_count", "mixture-of-experts models are not supported"));
    }
    let number = |key| metadata.need(key, Metadata::number);
    let (hidden, heads) = (number(".embedding_length")?, number(".attention.head_count")?);
    let head_dim = match metadata.number(".rope.dimension_count")? {
        Some(head_dim) => head_dim,
        None => hidden.checked_div(heads).unwrap_or(0),
    };
    let embedding = shapes.get("model.embed_tokens.weight").and_then(|shape| shape.first());
    let rope_theta = metadata.fraction(".rope.freq_base")?.unwrap_or(10_000.0);
    let mut config = json!({
        "architectures": [class],
        "attention_dropout": 0.0,
        "bos_token_id": metadata.number("tokenizer.ggml.bos_token_id")?,
        "eos_token_id": metadata.number("tokenizer.ggml.eos_token_id")?,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": number(".feed_forward_length")?,
        "max_position_embeddings": number(".context_length")?,
        "model_type": architecture,
        "num_attention_heads": heads,
        "num_hidden_layers": number(".block_count")?,
        "num_key_value_heads": metadata.number(".attention.head_count_kv")?.unwrap_or(heads),
        "pad_token_id": metadata.number("tokenizer.ggml.padding_token_id")?,
        "rms_norm_eps": metadata.need(".attention.layer_norm_rms_epsilon", Metadata::fraction)?,
        "rope_scaling": null,
        "rope_theta": rope_theta,
        "tie_word_embeddings": !shapes.contains_key("lm_head.weight"),
        "torch_dtype": if dtype == Dtype::F16 { "float16" } else { "bfloat16" },
        "use_cache": true,
        "vocab_size": embedding,
    });
    let fields = config.as_object_mut().expect("an object, see above");
    fields.extend(own.as_object().cloned().unwrap_or_default());
    fields.sort_keys();
    Ok(config)
}

fn generation_config(metadata: &Metadata) -> Result<Value> {
    Ok(json!({
        "bos_token_id": metadata.number("tokenizer.ggml.bos_token_id")?,
        "eos_token_id": metadata.number("tokenizer.ggml.eos_token_id")?,
        "pad_token_id": metadata.number("tokenizer.ggml.padding_token_id")?,
    }))
}

fn write_json(directory: &Path, name: &str, value: &Value) -> Result<()> {
    let mut text = serde_json::to_vec_pretty(value).expect("a value becomes JSON");
    text.push(b'\n');
    Ok(AtomicFile::write(&directory.join(name), &text)?)
}

/// The library divides by the alignment that a file states, so a zero must not reach it.
fn check_alignment(path: &Path) -> Result<()> {
    const ZERO_ALIGNMENT: &[u8] = b"general.alignment\x04\0\0\0\0\0\0\0";
    let mut start = Vec::new();
    let file = File::open(path).map_err(io_error(path, "open"))?;
    file.take(1 << 20).read_to_end(&mut start).map_err(io_error(path, "read"))?;
    if start.windows(ZERO_ALIGNMENT.len()).any(|window| window == ZERO_ALIGNMENT) {
        let problem = "metadata general.alignment: is 0; the file is damaged: fetch it again".into();
        return Err(Error::Source { path: path.into(), problem });
    }
    Ok(())
}

fn unreadable(path: &Path, error: &candle_core::Error) -> Error {
    let problem = format!("not a GGUF file that can be read ({}); fetch it again or take another", first_line(error));
    Error::Source { path: path.into(), problem }
}

fn tensor_error(path: &Path, tensor: &str, problem: &str) -> Error {
    np_formats::Error::Tensor { path: path.into(), tensor: tensor.into(), problem: problem.into() }.into()
}

/// The library appends a backtrace to its messages.
fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_string()
}

#[cfg(test)]
#[path = "gguf_tests.rs"]
mod tests;
