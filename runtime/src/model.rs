//! A model's resident weights, and the part of a layer that is always resident: its attention.

use crate::Result;
use np_formats::{Dtype, Error as FormatError, Geometry, RESIDENT_NAME, TensorDtype, TensorFile};
use np_kernels::{AttentionShape, Backend, KvDtype, Output, RopeTable};
use std::io;
use std::path::Path;

/// Everything resident of one layer: norms and attention, but no neuron rows.
pub struct LayerWeights<B: Backend> {
    input_norm: B::Buffer,
    query: Projection<B>,
    key: Projection<B>,
    value: Projection<B>,
    query_norm: Option<B::Buffer>,
    key_norm: Option<B::Buffer>,
    output: B::Matrix,
    mlp_norm: B::Buffer,
}

/// A linear map with or without a bias.
struct Projection<B: Backend> {
    weight: B::Matrix,
    bias: Option<B::Buffer>,
}

/// What is neither a layer's nor a neuron's: embedding, last norm and head.
pub struct Ends<B: Backend> {
    embedding: B::Matrix,
    norm: B::Buffer,
    head: Option<B::Matrix>,
}

/// `resident.safetensors`, open.
pub struct ResidentFile {
    file: TensorFile,
}

impl ResidentFile {
    /// Opens the resident tensors of `directory`, which must belong to `parent`.
    pub fn open(directory: &Path, parent: np_formats::Fingerprint) -> Result<Self> {
        let path = directory.join(RESIDENT_NAME);
        let file = match TensorFile::open_made_from(&path, parent) {
            Err(FormatError::Missing { path, .. }) => {
                return Err(FormatError::Missing { path, remedy: "run `np-prep repack` again" }.into());
            }
            other => other?,
        };
        Ok(Self { file })
    }

    /// Checks every byte against the file's checksum.
    pub fn verify(&self) -> Result<()> {
        Ok(self.file.verify()?)
    }

    /// Reads the embedding, the last norm and the head.
    pub fn ends<B: Backend>(&self, backend: &mut B, geometry: &Geometry) -> Result<Ends<B>> {
        let (vocab, hidden) = (geometry.vocab, geometry.hidden);
        let head =
            if geometry.tied_embedding { None } else { Some(self.matrix(backend, "lm_head.weight", vocab, hidden)?) };
        Ok(Ends {
            embedding: self.matrix(backend, "model.embed_tokens.weight", vocab, hidden)?,
            norm: self.vector(backend, "model.norm.weight", hidden)?,
            head,
        })
    }

    /// Reads one layer's norms and attention.
    pub fn layer<B: Backend>(&self, backend: &mut B, geometry: &Geometry, layer: usize) -> Result<LayerWeights<B>> {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let (hidden, queries, kv) = (geometry.hidden, geometry.query_width(), geometry.kv_width());
        let mut projection = |part: &str, width: usize| -> Result<Projection<B>> {
            let weight = self.matrix(backend, &name(&format!("self_attn.{part}.weight")), width, hidden)?;
            let bias = match geometry.qkv_bias {
                true => Some(self.vector(backend, &name(&format!("self_attn.{part}.bias")), width)?),
                false => None,
            };
            Ok(Projection { weight, bias })
        };
        let (query, key, value) =
            (projection("q_proj", queries)?, projection("k_proj", kv)?, projection("v_proj", kv)?);
        let head_norm = |backend: &mut B, part: &str| -> Result<Option<B::Buffer>> {
            let tensor = name(&format!("self_attn.{part}.weight"));
            geometry.qk_norm.then(|| self.vector(backend, &tensor, geometry.head_dim)).transpose()
        };
        Ok(LayerWeights {
            query,
            key,
            value,
            query_norm: head_norm(backend, "q_norm")?,
            key_norm: head_norm(backend, "k_norm")?,
            input_norm: self.vector(backend, &name("input_layernorm.weight"), hidden)?,
            output: self.matrix(backend, &name("self_attn.o_proj.weight"), hidden, queries)?,
            mlp_norm: self.vector(backend, &name("post_attention_layernorm.weight"), hidden)?,
        })
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        let specs = self.file.names().into_iter().filter_map(|name| self.file.spec(&name));
        specs.map(|spec| spec.bytes() as u64).sum()
    }

    fn dtype(&self, name: &str, shape: &[usize]) -> Result<Dtype> {
        let spec = self.file.spec(name);
        let stored = spec.as_ref().map_or(TensorDtype::F16, |spec| spec.dtype);
        self.file.expect(name, stored, shape)?;
        let known = match stored {
            TensorDtype::F16 => Some(Dtype::F16),
            TensorDtype::BF16 => Some(Dtype::Bf16),
            TensorDtype::F32 => Some(Dtype::F32),
            _ => None,
        };
        Ok(known.ok_or_else(|| FormatError::Tensor {
            path: self.file.path().into(),
            tensor: name.into(),
            problem: format!("has dtype {stored:?}; F16, BF16 and F32 are supported"),
        })?)
    }

    fn matrix<B: Backend>(&self, backend: &mut B, name: &str, rows: usize, columns: usize) -> Result<B::Matrix> {
        let dtype = self.dtype(name, &[rows, columns])?;
        let mut failure = None;
        let mut fill = |bytes: &mut [u8]| {
            self.file.read_at(name, 0, bytes).map_err(|error| {
                let said = io::Error::other(error.to_string());
                failure = Some(error);
                said
            })
        };
        let filled = backend.matrix(rows, columns, dtype, &mut fill);
        match failure {
            Some(failure) => Err(failure.into()),
            None => Ok(filled?),
        }
    }

    fn vector<B: Backend>(&self, backend: &mut B, name: &str, count: usize) -> Result<B::Buffer> {
        let dtype = self.dtype(name, &[count])?;
        let mut bytes = vec![0; count * dtype.bytes()];
        self.file.read_at(name, 0, &mut bytes)?;
        let values: Vec<f32> = match dtype {
            Dtype::F32 => bytemuck::pod_collect_to_vec(&bytes),
            Dtype::F16 => bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            Dtype::Bf16 => bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        };
        let mut buffer = backend.buffer(count)?;
        backend.upload(&values, &mut buffer)?;
        Ok(buffer)
    }
}

/// Activations of up to `tokens_max` tokens in flight through a layer.
pub struct Workspace<B: Backend> {
    /// The residual stream, (tokens, hidden).
    pub residual: B::Buffer,
    /// The input of whatever comes next, normalised, (tokens, hidden).
    pub normed: B::Buffer,
    query: B::Buffer,
    key: B::Buffer,
    value: B::Buffer,
    attended: B::Buffer,
    /// Most tokens at a time.
    pub tokens_max: usize,
}

impl<B: Backend> Workspace<B> {
    /// Room for `tokens_max` tokens.
    pub fn new(backend: &B, geometry: &Geometry, tokens_max: usize) -> Result<Self> {
        let buffer = |width: usize| backend.buffer(tokens_max * width);
        Ok(Self {
            residual: buffer(geometry.hidden)?,
            normed: buffer(geometry.hidden)?,
            query: buffer(geometry.query_width())?,
            key: buffer(geometry.kv_width())?,
            value: buffer(geometry.kv_width())?,
            attended: buffer(geometry.query_width())?,
            tokens_max,
        })
    }

    /// Bytes of a workspace for `tokens_max` tokens.
    pub fn bytes(geometry: &Geometry, tokens_max: usize) -> u64 {
        let width = 2 * geometry.hidden + 2 * geometry.query_width() + 2 * geometry.kv_width();
        4 * (tokens_max * width) as u64
    }
}

/// The attention shape of a geometry.
pub fn attention_shape(geometry: &Geometry) -> AttentionShape {
    AttentionShape {
        heads: geometry.heads,
        kv_heads: geometry.kv_heads,
        head_dim: geometry.head_dim,
        sliding_window: geometry.sliding_window,
    }
}

/// The rotary table of a geometry for `context` positions.
pub fn rope_table(geometry: &Geometry, context: usize) -> RopeTable {
    RopeTable::new(geometry.head_dim, f64::from(geometry.rope_theta), geometry.rope_scaling, context)
}

/// Bytes of the keys and values of one layer.
pub fn kv_bytes(geometry: &Geometry, context: usize, dtype: KvDtype) -> u64 {
    2 * (geometry.kv_width() * context * dtype.bytes()) as u64
}

/// Runs a layer's attention on the residual stream of `tokens` tokens from `position` on, and leaves its MLP's input in
/// `workspace.normed`.
#[expect(clippy::too_many_arguments, reason = "what a layer's attention reads and writes")]
pub fn attention<B: Backend>(
    backend: &mut B,
    weights: &LayerWeights<B>,
    geometry: &Geometry,
    rope: &RopeTable,
    cache: &mut B::KvCache,
    workspace: &mut Workspace<B>,
    position: usize,
    tokens: usize,
) -> Result<()> {
    let (eps, shape) = (geometry.rms_norm_eps, attention_shape(geometry));
    let Workspace { residual, normed, query, key, value, attended, .. } = workspace;
    backend.rms_norm(&weights.input_norm, eps, residual, tokens, normed)?;
    for (projection, out) in [(&weights.query, &mut *query), (&weights.key, &mut *key), (&weights.value, &mut *value)] {
        backend.linear(&projection.weight, projection.bias.as_ref(), normed, tokens, out, Output::Write)?;
    }
    if let Some(norm) = &weights.query_norm {
        backend.rms_norm_in_place(norm, eps, query, tokens * shape.heads)?;
    }
    if let Some(norm) = &weights.key_norm {
        backend.rms_norm_in_place(norm, eps, key, tokens * shape.kv_heads)?;
    }
    backend.rope(rope, query, position, tokens, shape.heads)?;
    backend.rope(rope, key, position, tokens, shape.kv_heads)?;
    backend.attention(shape, query, key, value, cache, position, tokens, attended)?;
    backend.linear(&weights.output, None, attended, tokens, residual, Output::Add)?;
    backend.rms_norm(&weights.mlp_norm, eps, residual, tokens, normed)?;
    Ok(())
}

impl<B: Backend> Ends<B> {
    /// Puts the embeddings of `ids` into `residual`.
    pub fn embed(&self, backend: &mut B, ids: &[u32], residual: &mut B::Buffer) -> Result<()> {
        Ok(backend.embed(&self.embedding, ids, residual)?)
    }

    /// Logits (tokens, vocabulary) of `tokens` rows of the last layer's output; `residual` is left normalised.
    pub fn logits(
        &self,
        backend: &mut B,
        geometry: &Geometry,
        residual: &mut B::Buffer,
        tokens: usize,
        logits: &mut B::Buffer,
    ) -> Result<()> {
        backend.rms_norm_in_place(&self.norm, geometry.rms_norm_eps, residual, tokens)?;
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        Ok(backend.linear(head, None, residual, tokens, logits, Output::Write)?)
    }
}
