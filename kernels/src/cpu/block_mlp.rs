//! Several tokens through consecutive neurons, as matrix products.

use super::convert::widen_row;
use super::linear::{Product, ProductOut, Weights, multiply};
use super::pool::Parts;
use super::row_mlp::silu;
use super::{Cpu, grown};
use crate::{NEURON_BLOCK, Observed, Output, Rows};
use std::ops::Range;

/// Blocks whose activations are computed before their down rows are applied: work for many threads, and activations
/// that stay in cache. It changes no bit, for each block is added by itself.
const GROUP_BLOCKS: usize = 8;

/// y (tokens, hidden) += the contributions of `neurons` for x (tokens, hidden).
#[expect(clippy::too_many_arguments, reason = "the operands of `Backend::block_mlp`")]
pub(super) fn block_mlp(
    cpu: &mut Cpu,
    rows: &Rows,
    neurons: Range<u32>,
    slot_of: &[i32],
    x: &[f32],
    tokens: usize,
    y: &mut [f32],
    mut observed: Option<&mut Observed>,
) {
    assert_eq!(neurons.len(), slot_of.len(), "a slot per neuron of {neurons:?}");
    assert!(
        (neurons.start as usize).is_multiple_of(NEURON_BLOCK),
        "{neurons:?} must start at a multiple of {NEURON_BLOCK}"
    );
    if let Some(observed) = observed.as_deref_mut() {
        for values in [&mut observed.gate, &mut observed.up] {
            values.clear();
            values.resize(tokens * slot_of.len(), 0.0);
        }
    }
    let group_neurons = GROUP_BLOCKS * NEURON_BLOCK;
    for first in (0..slot_of.len()).step_by(group_neurons) {
        let group = Group { rows, slots: &slot_of[first..slot_of.len().min(first + group_neurons)], tokens };
        let view = observed.as_deref_mut().map(|observed| ObservedParts {
            gate: Parts::new(&mut observed.gate),
            up: Parts::new(&mut observed.up),
            neurons: slot_of.len(),
            first,
        });
        group.activate(cpu, x, view.as_ref());
        group.project(cpu, y);
    }
}

struct ObservedParts<'a> {
    gate: Parts<'a>,
    up: Parts<'a>,
    neurons: usize,
    first: usize,
}

/// Some consecutive blocks.
struct Group<'a> {
    rows: &'a Rows,
    slots: &'a [i32],
    tokens: usize,
}

impl Group<'_> {
    fn blocks(&self) -> usize {
        self.slots.len().div_ceil(NEURON_BLOCK)
    }

    fn block(&self, block: usize) -> &[i32] {
        &self.slots[block * NEURON_BLOCK..self.slots.len().min((block + 1) * NEURON_BLOCK)]
    }

    fn weights(&self, slot: i32) -> [&[u8]; 3] {
        let slot = usize::try_from(slot).unwrap_or_else(|_| panic!("a neuron of the range has no slot"));
        self.rows.weights(slot)
    }

    /// Where block `block`'s activations (tokens, neurons of the block) lie in the scratch.
    fn activations(&self, block: usize) -> Range<usize> {
        let start = block * NEURON_BLOCK * self.tokens;
        start..start + self.block(block).len() * self.tokens
    }

    /// Leaves silu(gate·x) (up·x) of every block in `cpu.scratch.blocks`. One task a block.
    fn activate(&self, cpu: &mut Cpu, x: &[f32], observed: Option<&ObservedParts>) {
        let hidden = self.rows.layout().hidden();
        let (path, dtype, tokens) = (cpu.path, self.rows.layout().dtype(), self.tokens);
        let activations = grown(&mut cpu.scratch.blocks, GROUP_BLOCKS * NEURON_BLOCK * tokens);
        let activations = Parts::new(activations);
        // Gate and up rows, and what they give.
        let worker_values = 2 * NEURON_BLOCK * (hidden + tokens);
        let scratch = grown(&mut cpu.scratch.widened, cpu.pool.threads() * worker_values);
        let scratch = Parts::new(scratch);
        cpu.pool.run(self.blocks(), &|task, worker| {
            let slots = self.block(task);
            let width = 2 * slots.len();
            // SAFETY: workers have ranges of their own.
            let scratch = unsafe { scratch.part(worker * worker_values..(worker + 1) * worker_values) };
            let (weights, products) = scratch.split_at_mut(2 * NEURON_BLOCK * hidden);
            let weights = &mut weights[..width * hidden];
            let products = &mut products[..width * tokens];
            for (index, &slot) in slots.iter().enumerate() {
                let [gate, up, _] = self.weights(slot);
                widen_row(path, dtype, gate, &mut weights[index * hidden..][..hidden]);
                widen_row(path, dtype, up, &mut weights[(slots.len() + index) * hidden..][..hidden]);
            }
            let out = ProductOut { start: products.as_mut_ptr(), stride: width, output: Output::Write };
            // SAFETY: `products` holds (tokens, width) values and is this worker's own.
            unsafe { multiply(Product { tokens, width, depth: hidden }, x, Weights::ByOutput(weights), &out) };
            // SAFETY: blocks have ranges of their own.
            let activations = unsafe { activations.part(self.activations(task)) };
            for (token, product) in products.chunks_exact(width).enumerate() {
                let (gate, up) = product.split_at(slots.len());
                let activations = &mut activations[token * slots.len()..][..slots.len()];
                for ((out, &gate), up) in activations.iter_mut().zip(gate).zip(up) {
                    *out = silu(gate) * up;
                }
                if let Some(observed) = observed {
                    let start = token * observed.neurons + observed.first + task * NEURON_BLOCK;
                    // SAFETY: tokens and blocks have ranges of their own.
                    unsafe { observed.gate.part(start..start + gate.len()) }.copy_from_slice(gate);
                    // SAFETY: as above.
                    unsafe { observed.up.part(start..start + up.len()) }.copy_from_slice(up);
                }
            }
        });
    }

    /// Adds activations times down rows to y, block by block. One task a strip of y's columns.
    fn project(&self, cpu: &mut Cpu, y: &mut [f32]) {
        let hidden = self.rows.layout().hidden();
        let (path, dtype, tokens) = (cpu.path, self.rows.layout().dtype(), self.tokens);
        let value_bytes = dtype.bytes();
        let activations = &cpu.scratch.blocks[..];
        let strip_width = strip_width(hidden);
        let worker_values = NEURON_BLOCK * strip_width;
        let scratch = grown(&mut cpu.scratch.widened, cpu.pool.threads() * worker_values);
        let scratch = Parts::new(scratch);
        let y = Parts::new(y);
        cpu.pool.run(hidden.div_ceil(strip_width), &|task, worker| {
            let strip = task * strip_width..hidden.min((task + 1) * strip_width);
            let out = ProductOut { start: y.at(strip.start), stride: hidden, output: Output::Add };
            // SAFETY: workers have ranges of their own.
            let weights = unsafe { scratch.part(worker * worker_values..(worker + 1) * worker_values) };
            for block in 0..self.blocks() {
                let slots = self.block(block);
                let weights = &mut weights[..slots.len() * strip.len()];
                for (&slot, out) in slots.iter().zip(weights.chunks_exact_mut(strip.len())) {
                    let [_, _, down] = self.weights(slot);
                    widen_row(path, dtype, &down[strip.start * value_bytes..strip.end * value_bytes], out);
                }
                let shape = Product { tokens, width: strip.len(), depth: slots.len() };
                let activations = &activations[self.activations(block)];
                // SAFETY: the strip's columns of y are this task's own, and all tokens' rows of them lie within y.
                unsafe { multiply(shape, activations, Weights::ByInput(weights), &out) };
            }
        });
    }
}

/// Columns of y in a task: about an eighth of them, whole vectors, and few enough to stay in cache.
fn strip_width(hidden: usize) -> usize {
    hidden.div_ceil(8).next_multiple_of(16).clamp(64, 256)
}
