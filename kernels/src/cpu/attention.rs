//! Causal attention over cached keys and values.

use super::convert::{add_scaled, dots};
use super::pool::Parts;
use super::simd::{Element, Kernel, Lanes};
use super::{Cpu, grown};
use crate::{AttentionShape, KvDtype, Pages, Result};
use np_formats::Dtype;
use std::ops::Range;

/// Positions whose scores are made at once. Blocks lie at multiples of this, so a token's sums have the same order
/// whether it comes alone or with others.
const BLOCK: usize = 64;
/// Tokens in a task: they share the keys and values that are in cache.
const TASK_TOKENS: usize = 8;

/// Keys and values of one layer, each (kv_heads, context, head_dim), so that a head's are one range of memory.
#[derive(Debug)]
pub struct CpuKvCache {
    kv_heads: usize,
    head_dim: usize,
    context: usize,
    dtype: KvDtype,
    /// The keys, then the values.
    pages: Pages,
}

impl CpuKvCache {
    pub(super) fn new(kv_heads: usize, head_dim: usize, context: usize, dtype: KvDtype) -> Result<Self> {
        let values = kv_heads.saturating_mul(head_dim).saturating_mul(context).saturating_mul(2);
        let pages = Pages::new(values.saturating_mul(dtype.bytes()))?;
        Ok(Self { kv_heads, head_dim, context, dtype, pages })
    }

    /// Positions that fit.
    pub fn context(&self) -> usize {
        self.context
    }

    fn stored(&self) -> Dtype {
        match self.dtype {
            KvDtype::F16 => Dtype::F16,
            KvDtype::F32 => Dtype::F32,
        }
    }

    /// Bytes of `positions` of a head; `plane` 0 holds keys, 1 values.
    fn range(&self, plane: usize, head: usize, positions: Range<usize>) -> Range<usize> {
        let first = (plane * self.kv_heads + head) * self.context;
        let position_bytes = self.head_dim * self.dtype.bytes();
        (first + positions.start) * position_bytes..(first + positions.end) * position_bytes
    }

    /// Stores k and v (tokens, kv_heads, head_dim) at `first_position` onwards.
    pub(super) fn put(&mut self, shape: AttentionShape, k: &[f32], v: &[f32], first_position: usize) {
        assert_eq!((shape.kv_heads, shape.head_dim), (self.kv_heads, self.head_dim));
        let tokens = k.len() / (self.kv_heads * self.head_dim);
        assert!(
            first_position + tokens <= self.context,
            "positions up to {} of {}",
            first_position + tokens,
            self.context
        );
        for (plane, values) in [k, v].into_iter().enumerate() {
            for (index, head) in values.chunks_exact(self.head_dim).enumerate() {
                let position = first_position + index / self.kv_heads;
                let range = self.range(plane, index % self.kv_heads, position..position + 1);
                store(self.dtype, head, &mut self.pages[range]);
            }
        }
    }
}

fn store(dtype: KvDtype, values: &[f32], to: &mut [u8]) {
    match dtype {
        KvDtype::F16 => {
            for (to, &value) in to.chunks_exact_mut(2).zip(values) {
                to.copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
            }
        }
        KvDtype::F32 => {
            for (to, value) in to.chunks_exact_mut(4).zip(values) {
                to.copy_from_slice(&value.to_le_bytes());
            }
        }
    }
}

/// out (tokens, heads, head_dim) = softmax(q k^T / sqrt(head_dim)) v, for positions `first_position` onwards.
pub(super) fn attend(
    cpu: &mut Cpu,
    shape: AttentionShape,
    q: &[f32],
    cache: &CpuKvCache,
    first_position: usize,
    out: &mut [f32],
) {
    assert!(shape.heads.is_multiple_of(shape.kv_heads), "{} heads, {} kv heads", shape.heads, shape.kv_heads);
    assert!(shape.sliding_window != Some(0), "a position sees itself");
    let path = cpu.path;
    let group = shape.heads / shape.kv_heads;
    let tokens = q.len() / (shape.heads * shape.head_dim);
    let worker_values = TASK_TOKENS * group;
    let scratch = Parts::new(grown(&mut cpu.scratch.softmax, cpu.pool.threads() * 2 * worker_values));
    let out = Parts::new(out);
    let tiles = tokens.div_ceil(TASK_TOKENS);
    cpu.pool.run(tiles * shape.kv_heads, &|task, worker| {
        let (tile, kv_head) = (task / shape.kv_heads, task % shape.kv_heads);
        let tokens = tile * TASK_TOKENS..tokens.min((tile + 1) * TASK_TOKENS);
        // SAFETY: workers have ranges of their own.
        let state = unsafe { scratch.part(worker * 2 * worker_values..(worker + 1) * 2 * worker_values) };
        let (largest, total) = state.split_at_mut(worker_values);
        let tile = Tile { shape, q, cache, first_position, tokens, kv_head, out: &out, largest, total };
        path.run(cache.stored(), tile);
    });
}

/// Some tokens' heads that share one head of keys and values. Softmax is kept as it goes: the largest score so far,
/// the total of the exponentials relative to it, and in `out` the values weighted by them.
struct Tile<'a> {
    shape: AttentionShape,
    q: &'a [f32],
    cache: &'a CpuKvCache,
    first_position: usize,
    tokens: Range<usize>,
    kv_head: usize,
    out: &'a Parts<'a>,
    largest: &'a mut [f32],
    total: &'a mut [f32],
}

impl Kernel for Tile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes, E: Element>(self, lanes: L) {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let group = heads / kv_heads;
        let head_start = |token: usize, head: usize| (token * heads + self.kv_head * group + head) * head_dim;
        let last = self.visible(self.tokens.end - 1).end;
        for token in self.tokens.clone() {
            let start = head_start(token, 0);
            // SAFETY: tasks have tokens and groups of heads of their own.
            unsafe { self.out.part(start..start + group * head_dim) }.fill(0.0);
        }
        self.largest.fill(f32::NEG_INFINITY);
        self.total.fill(0.0);
        for block in self.visible(self.tokens.start).start / BLOCK..last.div_ceil(BLOCK) {
            for token in self.tokens.clone() {
                let visible = self.visible(token);
                let positions = visible.start.max(block * BLOCK)..visible.end.min((block + 1) * BLOCK);
                if positions.is_empty() {
                    continue;
                }
                let keys = &self.cache.pages[self.cache.range(0, self.kv_head, positions.clone())];
                let values = &self.cache.pages[self.cache.range(1, self.kv_head, positions)];
                for head in 0..group {
                    let start = head_start(token, head);
                    let state = (token - self.tokens.start) * group + head;
                    // SAFETY: as above.
                    let out = unsafe { self.out.part(start..start + head_dim) };
                    let q = &self.q[start..start + head_dim];
                    let (largest, total) = (&mut self.largest[state], &mut self.total[state]);
                    attend_block::<L, E>(lanes, q, keys, values, largest, total, out);
                }
            }
        }
        for token in self.tokens.clone() {
            for head in 0..group {
                let start = head_start(token, head);
                let scale = 1.0 / self.total[(token - self.tokens.start) * group + head];
                // SAFETY: as above.
                unsafe { self.out.part(start..start + head_dim) }.iter_mut().for_each(|value| *value *= scale);
            }
        }
    }
}

impl Tile<'_> {
    /// Positions that `token` sees.
    fn visible(&self, token: usize) -> Range<usize> {
        let end = self.first_position + token + 1;
        self.shape.sliding_window.map_or(0, |window| end.saturating_sub(window))..end
    }
}

/// One head against at most [`BLOCK`] positions.
#[inline(always)]
fn attend_block<L: Lanes, E: Element>(
    lanes: L,
    q: &[f32],
    keys: &[u8],
    values: &[u8],
    largest: &mut f32,
    total: &mut f32,
    out: &mut [f32],
) {
    const TOGETHER: usize = 4;
    let row_bytes = q.len() * E::BYTES;
    let count = keys.len() / row_bytes;
    let key = |index: usize| &keys[index * row_bytes..][..row_bytes];
    let mut scores = [0.0; BLOCK];
    let scores = &mut scores[..count];
    let whole = count / TOGETHER * TOGETHER;
    for first in (0..whole).step_by(TOGETHER) {
        let together = dots::<L, E, TOGETHER>(lanes, std::array::from_fn(|at| key(first + at)), q);
        scores[first..][..TOGETHER].copy_from_slice(&together);
    }
    for (index, score) in scores.iter_mut().enumerate().take(count).skip(whole) {
        [*score] = dots::<L, E, 1>(lanes, [key(index)], q);
    }
    let scale = 1.0 / (q.len() as f32).sqrt();
    scores.iter_mut().for_each(|score| *score *= scale);
    let new_largest = scores.iter().fold(*largest, |largest, &score| largest.max(score));
    // The first block finds minus infinity, whose exponential is 0.
    let shrink = (*largest - new_largest).exp();
    *largest = new_largest;
    *total *= shrink;
    out.iter_mut().for_each(|value| *value *= shrink);
    for score in scores.iter_mut() {
        *score = (*score - new_largest).exp();
        *total += *score;
    }
    let value = |index: usize| &values[index * row_bytes..][..row_bytes];
    for first in (0..whole).step_by(TOGETHER) {
        let weights: [f32; TOGETHER] = std::array::from_fn(|at| scores[first + at]);
        add_scaled::<L, E, TOGETHER>(lanes, weights, std::array::from_fn(|at| value(first + at)), out);
    }
    for (index, score) in scores.iter().enumerate().take(count).skip(whole) {
        add_scaled::<L, E, 1>(lanes, [*score], [value(index)], out);
    }
}
