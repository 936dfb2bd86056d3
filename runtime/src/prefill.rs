//! Prompts: many tokens at a time, layer by layer, every neuron computed.
//!
//! A layer that is not resident streams through two block buffers, one read while the other computes, so a prompt costs
//! one sequential pass over the file per chunk. During the last chunk the selector runs at the last position, and the
//! rows of its active sets are kept as they pass: that is the cold start of decoding, and nothing is read twice.

use crate::engine::Engine;
use crate::row_store::BLOCK_BUFFERS;
use crate::select::Point;
use crate::settings::LOGITS_TOKENS;
use crate::stats::PrefillStats;
use crate::{Error, Result};
use np_formats::Mask;
use np_kernels::Backend;
use std::ops::Range;
use std::time::Instant;

/// Hears the logits (vocabulary) at a position.
pub type LogitsSink<'a> = &'a mut dyn FnMut(usize, &[f32]);

/// Where streaming stands: blocks of the non-resident layers, in order.
struct BlockStream {
    /// (layer, its neurons) of every block.
    blocks: Vec<(usize, Range<u32>)>,
    /// The next block to compute.
    next: usize,
}

impl Engine {
    /// Computes `tokens` after those that are done, dense, and gives the logits (vocabulary) after the last one.
    pub fn prefill(&mut self, tokens: &[u32]) -> Result<&[f32]> {
        self.prefill_chunks(tokens, None)?;
        Ok(&self.logits[..self.geometry.vocab])
    }

    /// [`Engine::prefill`] that gives the logits after every token to `sink`.
    pub fn prefill_each(&mut self, tokens: &[u32], sink: LogitsSink<'_>) -> Result<()> {
        self.prefill_chunks(tokens, Some(sink))
    }

    fn prefill_chunks(&mut self, tokens: &[u32], mut sink: Option<LogitsSink<'_>>) -> Result<()> {
        if tokens.is_empty() {
            return Err(Error::Options("a prompt must have at least one token".into()));
        }
        self.check_tokens(tokens)?;
        let started = Instant::now();
        self.prefill = PrefillStats { tokens: tokens.len() as u64, ..PrefillStats::default() };
        let chunk_tokens = self.workspace.tokens_max;
        for chunk in tokens.chunks(chunk_tokens) {
            let last = std::ptr::eq(chunk.as_ptr_range().end, tokens.as_ptr_range().end);
            if let Err(error) = self.prefill_layers(chunk, last) {
                self.reset();
                return Err(error);
            }
            match &mut sink {
                Some(sink) => self.each_logits(chunk.len(), *sink)?,
                None if last => self.last_logits(chunk.len())?,
                None => {}
            }
            self.position += chunk.len();
        }
        self.prefill.elapsed_ns = started.elapsed().as_nanos() as u64;
        Ok(())
    }

    fn prefill_layers(&mut self, chunk: &[u32], last: bool) -> Result<()> {
        let tokens = chunk.len();
        self.sets.clear();
        // A cold start has no margin: nothing was active before.
        self.previous.iter_mut().for_each(Mask::clear);
        let mut stream = self.start_stream();
        self.ends.embed(&mut self.backend, chunk, &mut self.workspace.residual)?;
        for layer in 0..self.geometry.layers {
            self.show_last(Point::LayerInput(layer as u16), tokens, last);
            self.attend(layer, tokens)?;
            self.show_last(Point::MlpInput(layer as u16), tokens, last);
            if layer < self.settings.rows.dense_layers {
                self.resident_mlp(layer, tokens)?;
            } else {
                self.streamed_mlp(layer, tokens, last, &mut stream)?;
            }
            self.show_last(Point::LayerOutput(layer as u16), tokens, last);
        }
        if last {
            self.remember_sets();
        }
        Ok(())
    }

    fn show_last(&mut self, point: Point, tokens: usize, last: bool) {
        if last {
            self.show(point, tokens - 1, false);
        }
    }

    fn resident_mlp(&mut self, layer: usize, tokens: usize) -> Result<()> {
        let (rows, slot_of) = self.store.rows(layer);
        let all = 0..self.geometry.intermediate as u32;
        let (normed, residual) = (&self.workspace.normed, &mut self.workspace.residual);
        Ok(self.backend.block_mlp(rows, all, slot_of, normed, tokens, residual, None)?)
    }

    fn start_stream(&mut self) -> BlockStream {
        let rows = self.settings.rows;
        let neurons = self.geometry.intermediate as u32;
        let mut blocks = Vec::new();
        for layer in rows.dense_layers..self.geometry.layers {
            for first in (0..neurons).step_by(rows.block_neurons) {
                blocks.push((layer, first..neurons.min(first + rows.block_neurons as u32)));
            }
        }
        let stream = BlockStream { blocks, next: 0 };
        for index in 0..BLOCK_BUFFERS {
            self.read_ahead(&stream, index);
        }
        stream
    }

    fn read_ahead(&mut self, stream: &BlockStream, index: usize) {
        if let Some((layer, neurons)) = stream.blocks.get(index) {
            let buffer = index % BLOCK_BUFFERS;
            self.prefill.streamed_bytes += (neurons.len() * self.header.layout.stride_bytes()) as u64;
            self.store.read_block(buffer, *layer as u16, neurons.clone());
        }
    }

    /// The MLP of a layer that is not resident. In the last chunk the rows of its active set are kept.
    fn streamed_mlp(&mut self, layer: usize, tokens: usize, last: bool, stream: &mut BlockStream) -> Result<()> {
        let keep = last && !self.settings.rows.shared;
        if keep {
            self.show_watcher(layer, self.position + tokens - 1, tokens - 1, false);
            self.store.begin_keep(layer, self.sets.set(layer as u16));
        }
        while let Some((_, neurons)) = stream.blocks.get(stream.next).filter(|(of, _)| *of == layer) {
            let buffer = stream.next % BLOCK_BUFFERS;
            let arrived = self.store.wait_block(buffer);
            arrived.map_err(|fault| self.read_error(fault))?;
            let slots = &self.block_slots[..neurons.len()];
            let (normed, residual) = (&self.workspace.normed, &mut self.workspace.residual);
            let block = self.store.block(buffer);
            self.backend.block_mlp(block, neurons.clone(), slots, normed, tokens, residual, None)?;
            if keep {
                self.store.keep_from_block(layer, buffer, neurons.clone());
            }
            self.read_ahead(stream, stream.next + BLOCK_BUFFERS);
            stream.next += 1;
        }
        Ok(())
    }

    /// Logits after the last of a chunk's tokens.
    fn last_logits(&mut self, tokens: usize) -> Result<()> {
        self.some_logits(tokens - 1..tokens)
    }

    fn each_logits(&mut self, tokens: usize, sink: LogitsSink<'_>) -> Result<()> {
        let vocab = self.geometry.vocab;
        for start in (0..tokens).step_by(LOGITS_TOKENS) {
            let rows = start..tokens.min(start + LOGITS_TOKENS);
            self.some_logits(rows.clone())?;
            for (index, row) in rows.enumerate() {
                sink(self.position + row, &self.logits[index * vocab..][..vocab]);
            }
        }
        // Both ways of prefilling leave the last logits in front.
        let at = (tokens - 1) % LOGITS_TOKENS * vocab;
        self.logits.copy_within(at..at + vocab, 0);
        Ok(())
    }

    fn some_logits(&mut self, rows: Range<usize>) -> Result<()> {
        let hidden = self.geometry.hidden;
        let tokens = rows.len();
        let residual = &self.workspace.residual[rows.start * hidden..rows.end * hidden];
        self.last[..tokens * hidden].copy_from_slice(residual);
        self.ends.logits(&mut self.backend, &self.geometry, &mut self.last, tokens, &mut self.logits)
    }
}
