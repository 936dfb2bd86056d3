//! What a setting costs in quality, and what it reads.
//!
//! Every token is scored twice on the same text: dense, through the prompt path, and sparse, through the same decode
//! path that generates. Windows start with an empty context and their first token is not scored.

use crate::importance::{down_norm, importance};
use crate::select::TopK;
use crate::stats::TokenStats;
use crate::{Engine, Mode, Result};
use np_formats::{Mask, NeuronFile};
use np_kernels::{Backend, Cpu, CpuBuffer, Observed, Rows};
use serde::Serialize;
use std::sync::{Arc, Mutex};

/// What to score.
#[derive(Clone, Copy, Debug)]
pub struct EvalOptions {
    /// Tokens of a window.
    pub window: usize,
    /// Recall is measured at one token of so many; 0 leaves it out.
    pub recall_every: usize,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct EvalReport {
    /// Tokens scored.
    pub scored: usize,
    /// exp of the mean negative log likelihood with every neuron computed.
    pub dense_perplexity: f64,
    /// The same for this setting.
    pub perplexity: f64,
    /// Mean added negative log likelihood per token over dense, in nats.
    pub dnll: f64,
    /// Its standard error, from the paired differences.
    pub dnll_stderr: f64,
    /// Active neurons per sparse layer.
    pub k: usize,
    /// Sparse layers.
    pub sparse_layers: usize,
    /// Rows read per token over all sparse layers.
    pub rows_per_token: f64,
    /// The same as a share of the rows that are active.
    pub delta_ratio: f64,
    /// Share of the true top K that was active; `None` when it was not measured.
    pub recall: Option<f64>,
    /// Share of the energy (squared importance) that was dropped; `None` when it was not measured.
    pub dropped_energy: Option<f64>,
    /// Bytes that the engine keeps in memory.
    pub resident_bytes: u64,
    /// Time per decoded token.
    pub decode_ms: f64,
    /// What the decoded tokens cost together.
    pub total: TokenStats,
}

/// Scores `tokens`. `progress` hears how many are done.
pub fn evaluate(
    engine: &mut Engine,
    neurons: &NeuronFile,
    tokens: &[u32],
    options: EvalOptions,
    progress: &mut dyn FnMut(usize),
) -> Result<EvalReport> {
    let sparse = engine.settings().mode != Mode::Resident;
    let tally = Arc::new(Mutex::new(Tally::default()));
    if sparse && options.recall_every > 0 {
        let mut judge = Judge::new(engine, neurons)?;
        let (tally, every) = (Arc::clone(&tally), options.recall_every);
        engine.watch(Some(Box::new(move |view| {
            if view.computed && view.position % every == 0 {
                judge.judge(view.layer, view.input, view.active, &mut tally.lock().expect("no panic while locked"));
            }
        })));
    }
    let mut differences = Vec::with_capacity(tokens.len());
    let (mut dense_sum, mut sparse_sum) = (0.0, 0.0);
    let mut total = TokenStats::default();
    let mut decoded = 0usize;
    let mut done = 0;
    for window in tokens.chunks(options.window).filter(|window| window.len() > 1) {
        let mut dense = vec![0.0; window.len() - 1];
        engine.restart();
        engine.prefill_each(window, &mut |position, logits| {
            if position + 1 < window.len() {
                dense[position] = negative_log_likelihood(logits, window[position + 1]);
            }
        })?;
        engine.restart();
        for (position, dense) in dense.iter().enumerate() {
            let logits = engine.decode(window[position])?;
            let nll = negative_log_likelihood(logits, window[position + 1]);
            if position > 0 {
                total += *engine.token_stats();
                decoded += 1;
            }
            dense_sum += dense;
            sparse_sum += nll;
            differences.push(nll - dense);
            progress(done + position + 1);
        }
        done += window.len();
    }
    engine.watch(None);
    let scored = differences.len().max(1) as f64;
    let mean = differences.iter().sum::<f64>() / scored;
    let variance = differences.iter().map(|difference| (difference - mean).powi(2)).sum::<f64>() / scored;
    let tally = tally.lock().expect("no panic while locked");
    let per_token = decoded.max(1) as f64;
    Ok(EvalReport {
        scored: differences.len(),
        dense_perplexity: (dense_sum / scored).exp(),
        perplexity: (sparse_sum / scored).exp(),
        dnll: mean,
        dnll_stderr: (variance / scored).sqrt(),
        k: engine.settings().rows.k,
        sparse_layers: engine.geometry().layers - engine.settings().rows.dense_layers,
        rows_per_token: total.incoming_rows as f64 / per_token,
        delta_ratio: total.incoming_rows as f64 / total.active_rows.max(1) as f64,
        recall: (tally.wanted > 0).then(|| tally.found as f64 / tally.wanted as f64),
        dropped_energy: (tally.energy > 0.0).then(|| 1.0 - tally.kept_energy / tally.energy),
        resident_bytes: engine.settings().footprint.total(),
        decode_ms: total.elapsed_ns() as f64 / 1e6 / per_token,
        total,
    })
}

/// −log of the probability of `token`, in nats.
pub fn negative_log_likelihood(logits: &[f32], token: u32) -> f64 {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - highest).exp()).sum();
    sum.ln() - f64::from(logits[token as usize] - highest)
}

/// Sums over judged layers and tokens.
#[derive(Default)]
struct Tally {
    wanted: usize,
    found: usize,
    energy: f64,
    kept_energy: f64,
}

/// Knows every neuron's rows, and so the true top K.
struct Judge {
    backend: Cpu,
    rows: Vec<Rows>,
    down_norms: Vec<Vec<f32>>,
    dense_layers: usize,
    input: CpuBuffer,
    output: CpuBuffer,
    observed: Observed,
    importance: Vec<f32>,
    slots: Vec<i32>,
    top_k: TopK,
    truth: Mask,
}

impl Judge {
    fn new(engine: &Engine, neurons: &NeuronFile) -> Result<Self> {
        let header = neurons.header();
        let count = header.neurons as usize;
        let dense_layers = engine.settings().rows.dense_layers;
        let backend = Cpu::new(1)?;
        let mut all_rows = Vec::new();
        let mut down_norms = Vec::new();
        for layer in dense_layers..usize::from(header.layers) {
            let mut rows = Rows::new(header.layout, count)?;
            neurons.read_records(layer as u16, 0, &mut rows.bytes_mut()[..header.records_bytes() as usize])?;
            down_norms.push((0..count).map(|slot| down_norm(header.layout, rows.record(slot))).collect());
            all_rows.push(rows);
        }
        Ok(Self {
            input: backend.buffer(header.layout.hidden())?,
            output: backend.buffer(header.layout.hidden())?,
            backend,
            rows: all_rows,
            down_norms,
            dense_layers,
            observed: Observed::default(),
            importance: vec![0.0; count],
            slots: (0..count as i32).collect(),
            top_k: TopK::new(count),
            truth: Mask::new(count),
        })
    }

    fn judge(&mut self, layer: usize, input: &[f32], active: &Mask, tally: &mut Tally) {
        let index = layer - self.dense_layers;
        self.input[..input.len()].copy_from_slice(input);
        let all = 0..self.slots.len() as u32;
        let (rows, observed) = (&self.rows[index], Some(&mut self.observed));
        self.backend
            .block_mlp(rows, all, &self.slots, &self.input, 1, &mut self.output, observed)
            .expect("computing on the CPU does not fail");
        let products = self.observed.gate.iter().zip(&self.observed.up).zip(&self.down_norms[index]);
        for (importance_out, ((gate, up), norm)) in self.importance.iter_mut().zip(products) {
            *importance_out = importance(*gate, *up, *norm);
        }
        let importance = &self.importance;
        self.top_k.pick(active.count(), |neuron| importance[neuron], &mut self.truth);
        tally.wanted += active.count();
        tally.found += active.count_and(&self.truth);
        tally.energy += importance.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
        tally.kept_energy += active.ones().map(|neuron| f64::from(importance[neuron as usize]).powi(2)).sum::<f64>();
    }
}
