//! One suite for every backend: each operation beside its plain f64 loop, in small and odd sizes.
//!
//! [`suite`] returns all results, so that a backend can be compared with itself under other numbers of threads.

use crate::{AttentionShape, Backend, Cpu, Error, KvDtype, NEURON_BLOCK, Observed, Output, RopeTable, Rows};
use half::{bf16, f16};
use np_formats::{Dtype, RecordLayout, RopeScaling};
use std::io;

const HIDDEN: usize = 72;
/// Two whole blocks of neurons and a part.
const NEURONS: usize = 2 * NEURON_BLOCK + 22;
const SHAPE: AttentionShape = AttentionShape { heads: 6, kv_heads: 2, head_dim: 12, sliding_window: None };
/// f32 rounding over sums of at most a few hundred terms of order 1.
const TOLERANCE: f64 = 2e-5;
/// Keys and values in 16 bits are off by 2^-11 of themselves; weights of the softmax average that.
const KV_F16_TOLERANCE: f64 = 2e-3;

#[test]
fn cpu_passes_whatever_its_instructions_and_threads() {
    for threads in [1, 2, 5] {
        for mut cpu in Cpu::of_every_path(threads) {
            suite(&mut cpu);
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let [one, two, five] = [1, 2, 5].map(|threads| suite(&mut Cpu::new(threads).unwrap()));
    assert_eq!(bits(&one), bits(&two));
    assert_eq!(bits(&one), bits(&five));
}

#[test]
fn a_matrix_that_cannot_be_filled_says_so() {
    let mut fill = |_: &mut [u8]| Err(io::Error::other("the disk is gone"));
    let error = Cpu::new(1).unwrap().matrix(3, 4, Dtype::F16, &mut fill).unwrap_err();
    assert!(matches!(error, Error::Fill { rows: 3, columns: 4, .. }));
    assert!(error.to_string().contains("the disk is gone"));
}

/// Runs and checks every operation; returns what they gave.
pub(crate) fn suite<B: Backend>(backend: &mut B) -> Vec<f32> {
    let mut all = Vec::new();
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
        all.extend(check_embed(backend, dtype));
        for tokens in [1, 2, 9] {
            for (rows, columns) in [(1, 1), (50, HIDDEN), (150, 33)] {
                all.extend(check_linear(backend, dtype, rows, columns, tokens));
            }
        }
    }
    all.extend(check_rms_norm(backend));
    all.extend(check_rope(backend));
    all.extend(check_attention(backend, SHAPE, KvDtype::F32, TOLERANCE));
    all.extend(check_attention(backend, SHAPE, KvDtype::F16, KV_F16_TOLERANCE));
    for window in [1, 5, 64, 100] {
        let shape = AttentionShape { sliding_window: Some(window), ..SHAPE };
        all.extend(check_attention(backend, shape, KvDtype::F32, TOLERANCE));
    }
    for dtype in [Dtype::F16, Dtype::Bf16] {
        all.extend(check_row_mlp(backend, dtype));
        all.extend(check_block_mlp(backend, dtype));
    }
    all.extend(check_add(backend));
    all
}

fn check_embed<B: Backend>(backend: &mut B, dtype: Dtype) -> Vec<f32> {
    let (table, wide) = matrix(backend, 11, HIDDEN, dtype, 1);
    let ids = [10, 0, 3, 3];
    let mut out = backend.buffer(ids.len() * HIDDEN).unwrap();
    backend.embed(&table, &ids, &mut out).unwrap();
    let expected: Vec<f64> = ids.iter().flat_map(|&id| wide[id as usize * HIDDEN..][..HIDDEN].to_vec()).collect();
    let found = downloaded(backend, &out, expected.len());
    check("embed", &found, &expected, 0.0);
    found
}

fn check_linear<B: Backend>(backend: &mut B, dtype: Dtype, rows: usize, columns: usize, tokens: usize) -> Vec<f32> {
    let (w, wide) = matrix(backend, rows, columns, dtype, 2);
    let (x, bias, before) = (values(tokens * columns, 3), values(rows, 4), values(tokens * rows, 5));
    let (x_buffer, bias_buffer) = (uploaded(backend, &x), uploaded(backend, &bias));
    let mut all = Vec::new();
    for output in [Output::Write, Output::Add] {
        for with_bias in [false, true] {
            let mut out = uploaded(backend, &before);
            let bias_buffer = with_bias.then_some(&bias_buffer);
            backend.linear(&w, bias_buffer, &x_buffer, tokens, &mut out, output).unwrap();
            let expected: Vec<f64> = (0..tokens * rows)
                .map(|index| {
                    let (token, row) = (index / rows, index % rows);
                    let dot = dot(&wide[row * columns..][..columns], &x[token * columns..][..columns]);
                    let bias = if with_bias { f64::from(bias[row]) } else { 0.0 };
                    let before = if output == Output::Add { f64::from(before[index]) } else { 0.0 };
                    before + dot + bias
                })
                .collect();
            let found = downloaded(backend, &out, expected.len());
            check(&format!("linear {dtype:?} {rows} {columns} {tokens} {output:?}"), &found, &expected, TOLERANCE);
            all.extend(found);
        }
    }
    all
}

fn check_rms_norm<B: Backend>(backend: &mut B) -> Vec<f32> {
    let mut all = Vec::new();
    for (width, rows) in [(HIDDEN, 1), (HIDDEN, 5), (12, 37)] {
        let (weight, x) = (values(width, 1), values(rows * width, 2));
        let eps = 1e-5_f32;
        let expected: Vec<f64> = x
            .chunks_exact(width)
            .flat_map(|row| {
                let square = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
                let scale = 1.0 / (square + f64::from(eps)).sqrt();
                row.iter().zip(&weight).map(move |(&x, &weight)| f64::from(x) * scale * f64::from(weight))
            })
            .collect();
        let weight = uploaded(backend, &weight);
        let mut x = uploaded(backend, &x);
        let mut out = backend.buffer(rows * width).unwrap();
        backend.rms_norm(&weight, eps, &x, rows, &mut out).unwrap();
        let found = downloaded(backend, &out, expected.len());
        check("rms_norm", &found, &expected, TOLERANCE);
        backend.rms_norm_in_place(&weight, eps, &mut x, rows).unwrap();
        assert_eq!(bits(&found), bits(&downloaded(backend, &x, expected.len())), "rms_norm in place");
        all.extend(found);
    }
    all
}

fn check_rope<B: Backend>(backend: &mut B) -> Vec<f32> {
    let (first, tokens, heads, head_dim, theta) = (90, 3, 2, 12, 10_000.0_f64);
    let table = RopeTable::new(head_dim, theta, RopeScaling::None, first + tokens);
    let before = values(tokens * heads * head_dim, 1);
    let mut x = uploaded(backend, &before);
    backend.rope(&table, &mut x, first, tokens, heads).unwrap();
    let half = head_dim / 2;
    let expected: Vec<f64> = (0..before.len())
        .map(|index| {
            let (token, at) = (index / (heads * head_dim), index % head_dim);
            let angle = (first + token) as f64 * theta.powf(-2.0 * (at % half) as f64 / head_dim as f64);
            let value = f64::from(before[index]);
            if at < half {
                value * angle.cos() - f64::from(before[index + half]) * angle.sin()
            } else {
                value * angle.cos() + f64::from(before[index - half]) * angle.sin()
            }
        })
        .collect();
    let found = downloaded(backend, &x, expected.len());
    check("rope", &found, &expected, TOLERANCE);
    found
}

/// All positions in one call, then in chunks, then one by one: each beside the plain loop and beside the first.
fn check_attention<B: Backend>(backend: &mut B, shape: AttentionShape, dtype: KvDtype, tolerance: f64) -> Vec<f32> {
    let positions = 150;
    let (width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let q = values(positions * width, 1);
    let (k, v) = (values(positions * kv_width, 2), values(positions * kv_width, 3));
    let expected = plain_attention(shape, &q, &k, &v);
    let mut passes = Vec::new();
    for chunk in [positions, 67, 1] {
        let mut cache = backend.kv_cache(shape.kv_heads, shape.head_dim, positions, dtype).unwrap();
        let mut found = Vec::new();
        for first in (0..positions).step_by(chunk) {
            let tokens = chunk.min(positions - first);
            let of = |values: &[f32], width: usize| values[first * width..][..tokens * width].to_vec();
            let (q, k, v) = (of(&q, width), of(&k, kv_width), of(&v, kv_width));
            let (q, k, v) = (uploaded(backend, &q), uploaded(backend, &k), uploaded(backend, &v));
            let mut out = backend.buffer(tokens * width).unwrap();
            backend.attention(shape, &q, &k, &v, &mut cache, first, tokens, &mut out).unwrap();
            found.extend(downloaded(backend, &out, tokens * width));
        }
        check(&format!("attention {shape:?} {dtype:?} by {chunk}"), &found, &expected, tolerance);
        passes.push(found);
    }
    let whole = passes[0].iter().map(|&value| f64::from(value)).collect::<Vec<_>>();
    // Another order of additions, at most; the cached values are the same ones.
    passes[1..].iter().for_each(|pass| check("attention in chunks", pass, &whole, 1e-4));
    passes.concat()
}

fn plain_attention(shape: AttentionShape, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f64> {
    let AttentionShape { heads, kv_heads, head_dim, sliding_window } = shape;
    let mut out = Vec::new();
    for (index, q) in q.chunks_exact(head_dim).enumerate() {
        let (position, kv_head) = (index / heads, index % heads / (heads / kv_heads));
        let first = sliding_window.map_or(0, |window| (position + 1).saturating_sub(window));
        let at = |values: &[f32], position: usize| {
            let head = &values[(position * kv_heads + kv_head) * head_dim..][..head_dim];
            head.iter().map(|&value| f64::from(value)).collect::<Vec<f64>>()
        };
        let weights: Vec<f64> =
            (first..=position).map(|other| (dot(&at(k, other), q) / (head_dim as f64).sqrt()).exp()).collect();
        let total: f64 = weights.iter().sum();
        out.extend((0..head_dim).map(|value| {
            (first..=position).zip(&weights).map(|(other, weight)| weight * at(v, other)[value]).sum::<f64>() / total
        }));
    }
    out
}

fn check_row_mlp<B: Backend>(backend: &mut B, dtype: Dtype) -> Vec<f32> {
    let (x, before) = (values(HIDDEN, 1), values(HIDDEN, 2));
    let all: Vec<u32> = (0..NEURONS as u32).collect();
    let some: Vec<u32> = all.iter().copied().filter(|id| !(64..128).contains(id) && id % 3 != 1).collect();
    let mut results = Vec::new();
    for active in [&all, &some, &vec![], &vec![130]] {
        let dense = Layer::new(dtype, &identity(), &all);
        let expected = dense.expected(active, &x, &before);
        let mut run = |layer: &Layer, active: &[u32]| {
            let (x, mut y) = (uploaded(backend, &x), uploaded(backend, &before));
            backend.row_mlp(&layer.rows, active, &layer.slot_map, &x, &mut y).unwrap();
            downloaded(backend, &y, HIDDEN)
        };
        let found = run(&dense, active);
        check(&format!("row_mlp {dtype:?}"), &found, &expected, TOLERANCE);
        let elsewhere = Layer::new(dtype, &shuffled(), active);
        assert_eq!(bits(&found), bits(&run(&elsewhere, active)), "slots change no bit");
        let masked = Layer::masked(dtype, active);
        assert_eq!(bits(&found), bits(&run(&masked, &all)), "a masked dense MLP has the same bits");
        results.extend(found);
    }
    results
}

fn check_block_mlp<B: Backend>(backend: &mut B, dtype: Dtype) -> Vec<f32> {
    let all: Vec<u32> = (0..NEURONS as u32).collect();
    let layer = Layer::new(dtype, &shuffled(), &all);
    let end = NEURONS as u32;
    let mut results = Vec::new();
    for tokens in [1, 2, 7, 33] {
        let (x, before) = (values(tokens * HIDDEN, 1), values(tokens * HIDDEN, 2));
        let x_buffer = uploaded(backend, &x);
        let mut run = |ranges: &[std::ops::Range<u32>], observed: Option<&mut Observed>| {
            let mut y = uploaded(backend, &before);
            let mut observed = observed;
            for range in ranges {
                let slots = &layer.slot_map[range.start as usize..range.end as usize];
                let observed = observed.as_deref_mut();
                backend.block_mlp(&layer.rows, range.clone(), slots, &x_buffer, tokens, &mut y, observed).unwrap();
            }
            downloaded(backend, &y, tokens * HIDDEN)
        };
        let mut observed = Observed::default();
        let whole = 0..end;
        let found = run(std::slice::from_ref(&whole), Some(&mut observed));
        let token_of = |values: &[f32], token: usize| values[token * HIDDEN..][..HIDDEN].to_vec();
        let expected: Vec<f64> = (0..tokens)
            .flat_map(|token| layer.expected(&all, &token_of(&x, token), &token_of(&before, token)))
            .collect();
        check(&format!("block_mlp {dtype:?} {tokens}"), &found, &expected, TOLERANCE);
        check_observed(&layer, &observed, &x, tokens);
        for ranges in [vec![0..64, 64..128, 128..end], vec![0..128, 128..end], vec![0..64, 64..end]] {
            assert_eq!(bits(&found), bits(&run(&ranges, None)), "{ranges:?} of {tokens} tokens");
        }
        results.extend(found);
    }
    results
}

#[track_caller]
fn check_observed(layer: &Layer, observed: &Observed, x: &[f32], tokens: usize) {
    for (row, found) in [(0, &observed.gate), (1, &observed.up)] {
        let expected: Vec<f64> = (0..tokens * NEURONS)
            .map(|index| dot(&layer.wide[index % NEURONS][row], &x[index / NEURONS * HIDDEN..][..HIDDEN]))
            .collect();
        check("observed", found, &expected, TOLERANCE);
    }
}

fn check_add<B: Backend>(backend: &mut B) -> Vec<f32> {
    let (x, y) = (values(33, 1), values(33, 2));
    let (x_buffer, mut y_buffer) = (uploaded(backend, &x), uploaded(backend, &y));
    backend.add(&mut y_buffer, &x_buffer, 32).unwrap();
    let expected: Vec<f64> =
        (0..33).map(|index| f64::from(if index < 32 { x[index] } else { 0.0 } + y[index])).collect();
    let found = downloaded(backend, &y_buffer, 33);
    check("add", &found, &expected, 0.0);
    found
}

/// The rows of one layer's neurons, some of them in slots.
struct Layer {
    rows: Rows,
    slot_map: Vec<i32>,
    /// Gate, up and down of each neuron, as stored.
    wide: Vec<[Vec<f64>; 3]>,
}

impl Layer {
    /// `resident` neurons' rows lie in the slots that `slots` names; other slots hold rows that must not be used.
    fn new(dtype: Dtype, slots: &[usize], resident: &[u32]) -> Self {
        Self::with(dtype, slots, resident, |_, value| value)
    }

    /// All neurons in order; the down rows of those that are not `active` are zero.
    fn masked(dtype: Dtype, active: &[u32]) -> Self {
        let all: Vec<u32> = (0..NEURONS as u32).collect();
        Self::with(dtype, &identity(), &all, |neuron, down| if active.contains(&neuron) { down } else { 0.0 })
    }

    fn with(dtype: Dtype, slots: &[usize], resident: &[u32], down: impl Fn(u32, f32) -> f32) -> Self {
        let layout = RecordLayout::new(HIDDEN, dtype);
        let mut rows = Rows::new(layout, NEURONS).unwrap();
        rows.bytes_mut().fill(0x55);
        let mut slot_map = vec![-1; NEURONS];
        let mut wide = Vec::new();
        for neuron in 0..NEURONS as u32 {
            let seed = 100 + 3 * neuron;
            let down: Vec<f32> = values(HIDDEN, seed + 2).iter().map(|&value| down(neuron, value * 0.1)).collect();
            let parts = [values(HIDDEN, seed), values(HIDDEN, seed + 1), down].map(|row| stored(dtype, &row));
            if resident.contains(&neuron) {
                let slot = slots[neuron as usize];
                let record = rows.record_mut(slot);
                for (to, (bytes, _)) in record.chunks_exact_mut(layout.row_bytes()).zip(&parts) {
                    to.copy_from_slice(bytes);
                }
                slot_map[neuron as usize] = slot as i32;
            }
            wide.push(parts.map(|(_, wide)| wide));
        }
        Self { rows, slot_map, wide }
    }

    fn expected(&self, active: &[u32], x: &[f32], before: &[f32]) -> Vec<f64> {
        let mut y: Vec<f64> = before.iter().map(|&y| f64::from(y)).collect();
        for &neuron in active {
            let [gate, up, down] = &self.wide[neuron as usize];
            let (gate, up) = (dot(gate, x), dot(up, x));
            let factor = gate / (1.0 + (-gate).exp()) * up;
            y.iter_mut().zip(down).for_each(|(y, down)| *y += factor * down);
        }
        y
    }
}

fn identity() -> Vec<usize> {
    (0..NEURONS).collect()
}

fn shuffled() -> Vec<usize> {
    // 7 and the number of neurons have no common factor.
    const _: () = assert!(!NEURONS.is_multiple_of(7));
    (0..NEURONS).map(|neuron| (neuron * 7 + 5) % NEURONS).collect()
}

/// Repeatable values in -1..1.
pub(crate) fn values(count: usize, seed: u32) -> Vec<f32> {
    let mix = |index: u32| (index ^ seed.wrapping_mul(0x85eb_ca6b)).wrapping_mul(0x9e37_79b1) >> 8;
    (0..count as u32).map(|index| mix(index) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// The stored bytes of `values`, and what they stand for.
pub(crate) fn stored(dtype: Dtype, values: &[f32]) -> (Vec<u8>, Vec<f64>) {
    let one = |&value: &f32| match dtype {
        Dtype::F16 => (f16::from_f32(value).to_le_bytes().to_vec(), f16::from_f32(value).to_f64()),
        Dtype::Bf16 => (bf16::from_f32(value).to_le_bytes().to_vec(), bf16::from_f32(value).to_f64()),
        Dtype::F32 => (value.to_le_bytes().to_vec(), f64::from(value)),
    };
    let (bytes, wide): (Vec<_>, Vec<_>) = values.iter().map(one).unzip();
    (bytes.concat(), wide)
}

fn matrix<B: Backend>(backend: &mut B, rows: usize, columns: usize, dtype: Dtype, seed: u32) -> (B::Matrix, Vec<f64>) {
    let (bytes, wide) = stored(dtype, &values(rows * columns, seed));
    let mut fill = |to: &mut [u8]| {
        to.copy_from_slice(&bytes);
        Ok(())
    };
    (backend.matrix(rows, columns, dtype, &mut fill).unwrap(), wide)
}

fn uploaded<B: Backend>(backend: &mut B, values: &[f32]) -> B::Buffer {
    let mut buffer = backend.buffer(values.len()).unwrap();
    backend.upload(values, &mut buffer).unwrap();
    buffer
}

fn downloaded<B: Backend>(backend: &mut B, buffer: &B::Buffer, count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    backend.download(buffer, &mut values).unwrap();
    values
}

fn dot(row: &[f64], x: &[f32]) -> f64 {
    row.iter().zip(x).map(|(a, &b)| a * f64::from(b)).sum()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[track_caller]
fn check(name: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{name}");
    for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let far = (f64::from(found) - expected).abs();
        assert!(far <= tolerance * expected.abs().max(1.0), "{name} at {index}: {found}, expected {expected}");
    }
}
