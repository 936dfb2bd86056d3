//! Activations of a text: what clustering and training learn from.
//!
//! The runtime's own layers run over batches of sequences, one layer at a time, so that one layer's weights and one
//! batch are in memory whatever the model's size. Between layers the residual stream of all tokens lies on disk; it is
//! also what a run that was killed goes on from.

use crate::error::{Error, Result, io_error};
use crate::progress::Progress;
use crate::residual_file::ResidualFile;
use crate::threshold::{gate_magnitude, importance, joint_count, separate_count, top_mask};
use indicatif::ProgressBar;
use np_formats::{
    Fingerprint, K_FRACTION_KEY, LayerTrace, Manifest, NeuronFile, TRACES_NAME, TensorDtype, TensorFile,
    TensorFileWriter, TensorSpec, features_path, importance_to_u8, layer_trace_path, layer_trace_specs,
};
use np_kernels::{Backend, Cpu, CpuBuffer, KvDtype, NEURON_BLOCK, Observed, RopeTable, Rows};
use np_runtime::importance::down_norm;
use np_runtime::model::{LayerWeights, ResidentFile, Workspace, attention, rope_table};
use np_runtime::open_neurons;
use np_runtime::text::Text;
use rayon::prelude::*;
use serde::Serialize;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Tokens of a batch, at most: more would not make the matrix products faster.
const BATCH_TOKENS_MAX: usize = 4_096;
/// Key of the recipe in its file's header.
const RECIPE_KEY: &str = "np.recipe";
/// Memory when nothing is asked for.
const MEMORY_BYTES_DEFAULT: u64 = 4 << 30;

/// What to collect.
#[derive(Clone, Debug)]
pub struct CollectOptions {
    /// The text.
    pub text: PathBuf,
    /// Most tokens of it.
    pub tokens: Option<usize>,
    /// Tokens of a sequence, each with an empty context.
    pub sequence: usize,
    /// Share of neurons in the masks.
    pub k_fraction: f64,
    /// Memory for rows and activations, in bytes.
    pub memory_bytes: Option<u64>,
}

/// What the traces in a directory were made of: traces of anything else are made anew.
#[derive(Serialize)]
struct Recipe {
    fingerprint: Fingerprint,
    tokens: Fingerprint,
    count: usize,
    sequence: usize,
    k_fraction: f64,
}

/// Collects traces into an artifact directory. Returns whether anything had to be done.
pub fn collect(directory: &Path, options: &CollectOptions, progress: Progress) -> Result<bool> {
    let manifest = Manifest::open(directory)?;
    let tokens = read_tokens(directory, options)?;
    let recipe = Recipe {
        fingerprint: manifest.fingerprint,
        tokens: Fingerprint::of(bytemuck::cast_slice(&tokens)),
        count: tokens.len(),
        sequence: options.sequence,
        k_fraction: options.k_fraction,
    };
    start_or_resume(directory, &recipe)?;
    let mut collection = Collection::open(directory, manifest, tokens, options)?;
    collection.run(progress)
}

fn read_tokens(directory: &Path, options: &CollectOptions) -> Result<Vec<u32>> {
    let refuse = |problem: &str| Error::Source { path: options.text.clone(), problem: problem.into() };
    if options.sequence < 2 {
        return Err(refuse("--sequence must be at least 2: the first token of a sequence is left out"));
    }
    if !(options.k_fraction > 0.0 && options.k_fraction <= 1.0) {
        return Err(refuse("--k-fraction must be above 0 and at most 1"));
    }
    let text = fs::read_to_string(&options.text).map_err(io_error(&options.text, "read"))?;
    let mut tokens = Text::load(directory)?.encode(&text, false)?;
    tokens.truncate(options.tokens.unwrap_or(usize::MAX));
    // A last sequence that is cut short would have other statistics; a short text is one short sequence.
    let whole = tokens.len() / options.sequence * options.sequence;
    tokens.truncate(if whole == 0 { tokens.len() } else { whole });
    if tokens.len() < 2 { Err(refuse("holds fewer than two tokens")) } else { Ok(tokens) }
}

/// Keeps traces that were made by the same recipe, removes all others.
fn start_or_resume(directory: &Path, recipe: &Recipe) -> Result<()> {
    let traces = directory.join(TRACES_NAME);
    let path = traces.join("recipe.safetensors");
    let text = serde_json::to_string(recipe).expect("numbers and hashes become JSON");
    let earlier = TensorFile::open_made_from(&path, recipe.fingerprint);
    if earlier.is_ok_and(|file| file.verify().is_ok() && file.extra(RECIPE_KEY) == Some(&text)) {
        return Ok(());
    }
    if traces.exists() {
        fs::remove_dir_all(&traces).map_err(io_error(&traces, "remove"))?;
    }
    fs::create_dir(&traces).map_err(io_error(&traces, "create"))?;
    // A file without tensors: what it says stands in its header, under the checksum that all our files have.
    TensorFileWriter::create(&path, recipe.fingerprint, &[(RECIPE_KEY, text)], Vec::new())?.finish()?;
    Ok(())
}

/// Everything that stays the same from layer to layer.
struct Collection {
    directory: PathBuf,
    manifest: Manifest,
    neurons: NeuronFile,
    resident: ResidentFile,
    tokens: Vec<u32>,
    sequence: usize,
    k_fraction: f64,
    backend: Cpu,
    rope: RopeTable,
    workspace: Workspace<Cpu>,
    batch_tokens: usize,
    /// As many of a layer's records as memory holds.
    rows: Rows,
    batch: Batch,
}

/// Activations of one batch.
struct Batch {
    residual: CpuBuffer,
    normed: CpuBuffer,
    observed: Observed,
    /// (tokens, neurons): gate rows times the MLP's input.
    gate: Vec<f32>,
    /// (tokens, neurons): up rows times the MLP's input.
    up: Vec<f32>,
}

impl Collection {
    fn open(directory: &Path, manifest: Manifest, tokens: Vec<u32>, options: &CollectOptions) -> Result<Self> {
        let geometry = &manifest.geometry;
        let neurons = open_neurons(directory, &manifest)?;
        let resident = ResidentFile::open(directory, manifest.fingerprint)?;
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let backend = Cpu::new(threads).map_err(np_runtime::Error::from)?;
        let sequence = options.sequence.min(tokens.len());
        let memory_bytes = options.memory_bytes.unwrap_or(MEMORY_BYTES_DEFAULT) as usize;
        let token_bytes = 4 * (2 * geometry.hidden + 4 * geometry.intermediate);
        let batch_tokens = (memory_bytes / 3 / token_bytes).min(BATCH_TOKENS_MAX).min(tokens.len());
        let batch_tokens = (batch_tokens / sequence).max(1) * sequence;
        let layout = neurons.header().layout;
        let block = (memory_bytes / 3 / layout.stride_bytes() / NEURON_BLOCK).max(1) * NEURON_BLOCK;
        let rows = Rows::new(layout, block.min(geometry.intermediate)).map_err(np_runtime::Error::from)?;
        let buffer = |count| backend.buffer(count).map_err(np_runtime::Error::from);
        let batch = Batch {
            residual: buffer(batch_tokens * geometry.hidden)?,
            normed: buffer(batch_tokens * geometry.hidden)?,
            observed: Observed::default(),
            gate: vec![0.0; batch_tokens * geometry.intermediate],
            up: vec![0.0; batch_tokens * geometry.intermediate],
        };
        Ok(Self {
            workspace: Workspace::new(&backend, geometry, sequence)?,
            rope: rope_table(geometry, sequence),
            directory: directory.into(),
            k_fraction: options.k_fraction,
            neurons,
            resident,
            tokens,
            sequence,
            backend,
            batch_tokens,
            rows,
            batch,
            manifest,
        })
    }

    fn run(&mut self, progress: Progress) -> Result<bool> {
        let layers = self.manifest.geometry.layers;
        let batches = self.tokens.len().div_ceil(self.batch_tokens);
        let bar = progress.count("collecting", (layers * batches) as u64);
        let start = self.first_layer()?;
        bar.set_position((start * batches) as u64);
        for layer in start..layers {
            self.layer(layer, &bar)?;
        }
        bar.finish_and_clear();
        Ok(start < layers)
    }

    /// The layer to go on with: the last one whose input lies on disk. All layers before it are whole.
    fn first_layer(&mut self) -> Result<usize> {
        let layers = self.manifest.geometry.layers;
        let whole = features_path(&self.directory).exists()
            && (1..layers).all(|layer| layer_trace_path(&self.directory, layer).exists());
        let found = (0..layers).rev().find(|layer| self.residual_path(*layer).exists());
        let start = if whole { layers } else { found.unwrap_or(0) };
        // A kill may come between a layer's output and the removal of its input.
        (0..layers).filter(|layer| *layer != start).try_for_each(|layer| self.remove_residual(layer))?;
        if !whole && found.is_none() {
            self.embed()?;
        }
        Ok(start)
    }

    fn remove_residual(&self, layer: usize) -> Result<()> {
        let path = self.residual_path(layer);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(io_error(&path, "remove")(error)),
            _ => Ok(()),
        }
    }

    fn residual_path(&self, layer: usize) -> PathBuf {
        self.directory.join(TRACES_NAME).join(format!("residual_{layer:03}.bin"))
    }

    /// Writes the input of layer 0.
    fn embed(&mut self) -> Result<()> {
        let geometry = &self.manifest.geometry;
        let ends = self.resident.ends(&mut self.backend, geometry)?;
        let mut file = ResidualFile::create(&self.residual_path(0), geometry.hidden)?;
        for ids in self.tokens.chunks(self.batch_tokens) {
            ends.embed(&mut self.backend, ids, &mut self.batch.residual)?;
            file.append(&self.batch.residual[..ids.len() * geometry.hidden])?;
        }
        file.finish()
    }

    /// Runs one layer over all tokens: its trace, then the next layer's input.
    fn layer(&mut self, layer: usize, bar: &ProgressBar) -> Result<()> {
        let geometry = self.manifest.geometry.clone();
        let weights = self.resident.layer(&mut self.backend, &geometry, layer)?;
        let down_norms = self.down_norms(layer)?;
        let mut input = ResidualFile::open(&self.residual_path(layer), geometry.hidden, self.tokens.len())?;
        let last = layer + 1 == geometry.layers;
        let mut output = match last {
            true => None,
            false => Some(ResidualFile::create(&self.residual_path(layer + 1), geometry.hidden)?),
        };
        let mut trace = match layer {
            0 => None,
            _ => Some(TraceWriter::create(&self.directory, layer, self, down_norms)?),
        };
        for first in (0..self.tokens.len()).step_by(self.batch_tokens) {
            let tokens = self.batch_tokens.min(self.tokens.len() - first);
            input.read(&mut self.batch.residual[..tokens * geometry.hidden])?;
            self.attend(&weights, tokens)?;
            self.mlp(layer, tokens)?;
            if let Some(trace) = &mut trace {
                trace.add(&self.batch, first..first + tokens, self.sequence)?;
            }
            if let Some(output) = &mut output {
                output.append(&self.batch.residual[..tokens * geometry.hidden])?;
            }
            bar.inc(1);
        }
        trace.map_or(Ok(()), TraceWriter::finish)?;
        if let Some(output) = output {
            if layer == 0 {
                self.write_features(output)?;
            } else {
                output.finish()?;
            }
        }
        self.remove_residual(layer)
    }

    fn down_norms(&mut self, layer: usize) -> Result<Vec<f32>> {
        let neurons = self.manifest.geometry.intermediate as u32;
        let layout = self.neurons.header().layout;
        let mut norms = Vec::with_capacity(neurons as usize);
        for first in (0..neurons).step_by(self.rows.slots()) {
            let count = self.read_rows(layer, first)?;
            norms.extend((0..count).map(|slot| down_norm(layout, self.rows.record(slot))));
        }
        Ok(norms)
    }

    /// Reads records from neuron `first` on into the rows' slots, as many as there are, and checks their tags.
    fn read_rows(&mut self, layer: usize, first: u32) -> Result<usize> {
        let header = *self.neurons.header();
        let count = self.rows.slots().min((header.neurons - first) as usize);
        let bytes = &mut self.rows.bytes_mut()[..count * header.layout.stride_bytes()];
        self.neurons.read_records(layer as u16, first, bytes)?;
        for slot in 0..count {
            let neuron = first + slot as u32;
            let checked = header.layout.check_tag(layer as u16, neuron, self.rows.record(slot));
            checked.map_err(|fault| self.neurons.record_error(layer as u16, neuron, fault))?;
        }
        Ok(count)
    }

    /// Attention of each sequence of the batch.
    fn attend(&mut self, weights: &LayerWeights<Cpu>, tokens: usize) -> Result<()> {
        let geometry = &self.manifest.geometry;
        let (heads, dim, hidden) = (geometry.kv_heads, geometry.head_dim, geometry.hidden);
        let cache = self.backend.kv_cache(heads, dim, self.sequence, KvDtype::F32);
        let mut cache = cache.map_err(np_runtime::Error::from)?;
        for first in (0..tokens).step_by(self.sequence) {
            let count = self.sequence.min(tokens - first);
            let at = first * hidden..(first + count) * hidden;
            let (backend, workspace) = (&mut self.backend, &mut self.workspace);
            workspace.residual[..count * hidden].copy_from_slice(&self.batch.residual[at.clone()]);
            attention(backend, weights, geometry, &self.rope, &mut cache, workspace, 0, count)?;
            self.batch.residual[at.clone()].copy_from_slice(&workspace.residual[..count * hidden]);
            self.batch.normed[at].copy_from_slice(&workspace.normed[..count * hidden]);
        }
        Ok(())
    }

    /// The MLP of the whole batch, every neuron's products kept.
    fn mlp(&mut self, layer: usize, tokens: usize) -> Result<()> {
        let neurons = self.manifest.geometry.intermediate;
        let whole_layer = self.rows.slots() == neurons;
        for first in (0..neurons as u32).step_by(self.rows.slots()) {
            // A layer that fits is still there from when its norms were taken.
            let count = if whole_layer { neurons } else { self.read_rows(layer, first)? };
            let slots: Vec<i32> = (0..count as i32).collect();
            let range = first..first + count as u32;
            let Batch { residual, normed, observed, gate, up } = &mut self.batch;
            self.backend
                .block_mlp(&self.rows, range, &slots, normed, tokens, residual, Some(&mut *observed))
                .map_err(np_runtime::Error::from)?;
            for (of_block, of_all) in [(&observed.gate, gate), (&observed.up, up)] {
                let rows = of_all.chunks_exact_mut(neurons).zip(of_block.chunks_exact(count));
                rows.for_each(|(all, block)| all[first as usize..][..count].copy_from_slice(block));
            }
        }
        Ok(())
    }

    /// Writes the predictor's features from layer 0's output, and then finishes that output's file.
    fn write_features(&mut self, output: ResidualFile) -> Result<()> {
        let (hidden, tokens) = (self.manifest.geometry.hidden, self.tokens.len());
        let starts: Vec<u32> = (0..tokens as u32).step_by(self.sequence).collect();
        let specs = vec![
            TensorSpec::new("features", TensorDtype::F32, &[tokens, hidden]),
            TensorSpec::new("sequence_starts", TensorDtype::U32, &[starts.len()]),
        ];
        let path = features_path(&self.directory);
        let mut file = TensorFileWriter::create(&path, self.manifest.fingerprint, &[], specs)?;
        let mut input = output.reread()?;
        let eps = self.manifest.geometry.rms_norm_eps;
        for first in (0..tokens).step_by(self.batch_tokens) {
            let count = self.batch_tokens.min(tokens - first);
            let values = &mut self.batch.normed[..count * hidden];
            input.read(values)?;
            for row in values.chunks_exact_mut(hidden) {
                let mean_square = row.iter().map(|value| value * value).sum::<f32>() / hidden as f32;
                let scale = 1.0 / (mean_square + eps).sqrt();
                row.iter_mut().for_each(|value| *value *= scale);
            }
            file.write_values("features", values)?;
        }
        file.write_values("sequence_starts", &starts)?;
        file.finish()?;
        output.finish()
    }
}

/// A layer's trace, being written: importance at once, masks and sums at the end.
struct TraceWriter {
    file: TensorFileWriter,
    down_norms: Vec<f32>,
    joint_count: usize,
    separate_count: usize,
    masks: LayerTrace,
}

impl TraceWriter {
    fn create(directory: &Path, layer: usize, of: &Collection, down_norms: Vec<f32>) -> Result<Self> {
        let (tokens, neurons) = (of.tokens.len(), of.manifest.geometry.intermediate);
        let joint_count = joint_count(of.k_fraction, neurons);
        let extra = [(K_FRACTION_KEY, of.k_fraction.to_string())];
        let specs = layer_trace_specs(tokens, neurons);
        let path = layer_trace_path(directory, layer);
        Ok(Self {
            file: TensorFileWriter::create(&path, of.manifest.fingerprint, &extra, specs)?,
            joint_count,
            separate_count: separate_count(joint_count, neurons),
            down_norms,
            masks: LayerTrace {
                tokens: 0,
                neurons,
                importance: Vec::new(),
                joint: Vec::new(),
                gate: Vec::new(),
                up: Vec::new(),
                energy: vec![0.0; neurons],
                count: 0,
                k_fraction: of.k_fraction,
            },
        })
    }

    /// Adds a batch that holds the text's tokens `at`.
    fn add(&mut self, batch: &Batch, at: Range<usize>, sequence: usize) -> Result<()> {
        let (neurons, words, tokens) = (self.masks.neurons, self.masks.words(), at.len());
        let mut importances = vec![0.0; tokens * neurons];
        let mut steps = vec![0u8; tokens * neurons];
        let first = self.masks.tokens * words;
        let masks = &mut self.masks;
        for packed in [&mut masks.joint, &mut masks.gate, &mut masks.up] {
            packed.resize(first + tokens * words, 0);
        }
        let (down_norms, joint_count, separate_count) = (&self.down_norms, self.joint_count, self.separate_count);
        (batch.gate.par_chunks_exact(neurons), batch.up.par_chunks_exact(neurons))
            .into_par_iter()
            .zip((importances.par_chunks_exact_mut(neurons), steps.par_chunks_exact_mut(neurons)))
            .zip(masks.joint[first..].par_chunks_exact_mut(words))
            .zip((masks.gate[first..].par_chunks_exact_mut(words), masks.up[first..].par_chunks_exact_mut(words)))
            .for_each_init(
                || (vec![0.0; neurons], Vec::new()),
                |(magnitude, scratch), ((((gate, up), (importances, steps)), joint), (gate_mask, up_mask))| {
                    importance(gate, up, down_norms, importances);
                    top_mask(importances, joint_count, scratch, joint);
                    gate_magnitude(gate, magnitude);
                    top_mask(magnitude, separate_count, scratch, gate_mask);
                    top_mask(up, separate_count, scratch, up_mask);
                    let values = steps.iter_mut().zip(importances.iter());
                    values.for_each(|(step, importance)| *step = importance_to_u8(*importance));
                },
            );
        // The first token of a sequence is computed dense, and its large activations would drown all others.
        for (_, row) in at.zip(importances.chunks_exact(neurons)).filter(|(token, _)| token % sequence != 0) {
            let sums = masks.energy.iter_mut().zip(row);
            sums.for_each(|(energy, importance)| *energy += f64::from(*importance).powi(2));
            masks.count += 1;
        }
        masks.tokens += tokens;
        Ok(self.file.write("importance", &steps)?)
    }

    fn finish(mut self) -> Result<()> {
        self.file.write_values("masks.joint", &self.masks.joint)?;
        self.file.write_values("masks.gate", &self.masks.gate)?;
        self.file.write_values("masks.up", &self.masks.up)?;
        self.file.write_values("energy", &self.masks.energy)?;
        self.file.write_values("count", &[self.masks.count])?;
        self.file.finish()?;
        Ok(())
    }
}
