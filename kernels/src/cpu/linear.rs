//! Weights times activations.

use super::convert::{dots, widen_row};
use super::pool::Parts;
use super::simd::{Element, Kernel, Lanes};
use super::{Cpu, CpuMatrix, grown};
use crate::Output;
use gemm::Parallelism;

/// Rows in a task for one token: enough to outweigh the hand-over, few enough to spread.
const TASK_ROWS: usize = 32;
/// Rows that are widened at once for several tokens: they stay in the second-level cache.
const WIDENED_ROWS: usize = 64;

/// out (tokens, rows) = or += x (tokens, columns) w^T + bias
pub(super) fn linear(
    cpu: &mut Cpu,
    w: &CpuMatrix,
    bias: Option<&[f32]>,
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
    output: Output,
) {
    if tokens == 1 {
        one_token(cpu, w, bias, x, out, output);
    } else {
        many_tokens(cpu, w, bias, x, tokens, out, output);
    }
}

fn one_token(cpu: &mut Cpu, w: &CpuMatrix, bias: Option<&[f32]>, x: &[f32], out: &mut [f32], output: Output) {
    let path = cpu.path;
    let parts = Parts::new(out);
    cpu.pool.run(w.rows.div_ceil(TASK_ROWS), &|task, _| {
        let rows = task * TASK_ROWS..w.rows.min((task + 1) * TASK_ROWS);
        // SAFETY: tasks have ranges of their own.
        let out = unsafe { parts.part(rows.clone()) };
        let bias = bias.map(|bias| &bias[rows.clone()]);
        path.run(w.dtype, RowDots { rows: w.rows_bytes(rows), x, bias, out, output });
    });
}

/// Dot products of consecutive rows with one token.
struct RowDots<'a> {
    rows: &'a [u8],
    x: &'a [f32],
    bias: Option<&'a [f32]>,
    out: &'a mut [f32],
    output: Output,
}

impl Kernel for RowDots<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes, E: Element>(self, lanes: L) {
        const TOGETHER: usize = 4;
        let row_bytes = self.x.len() * E::BYTES;
        let row = |index: usize| &self.rows[index * row_bytes..][..row_bytes];
        let count = self.out.len();
        let whole = count / TOGETHER * TOGETHER;
        let mut put = |index: usize, dot: f32| {
            let dot = dot + self.bias.map_or(0.0, |bias| bias[index]);
            match self.output {
                Output::Write => self.out[index] = dot,
                Output::Add => self.out[index] += dot,
            }
        };
        for first in (0..whole).step_by(TOGETHER) {
            let together = dots::<L, E, TOGETHER>(lanes, std::array::from_fn(|row_at| row(first + row_at)), self.x);
            (0..TOGETHER).for_each(|at| put(first + at, together[at]));
        }
        for index in whole..count {
            put(index, dots::<L, E, 1>(lanes, [row(index)], self.x)[0]);
        }
    }
}

fn many_tokens(
    cpu: &mut Cpu,
    w: &CpuMatrix,
    bias: Option<&[f32]>,
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
    output: Output,
) {
    let path = cpu.path;
    let worker_values = WIDENED_ROWS * w.columns;
    let widened = Parts::new(grown(&mut cpu.scratch.widened, cpu.pool.threads() * worker_values));
    let out = Parts::new(out);
    cpu.pool.run(w.rows.div_ceil(WIDENED_ROWS), &|task, worker| {
        let rows = task * WIDENED_ROWS..w.rows.min((task + 1) * WIDENED_ROWS);
        // SAFETY: workers have ranges of their own.
        let widened = unsafe { widened.part(worker * worker_values..worker * worker_values + rows.len() * w.columns) };
        widen_row(path, w.dtype, w.rows_bytes(rows.clone()), widened);
        let shape = Product { tokens, width: rows.len(), depth: w.columns };
        let product_out = ProductOut { start: out.at(rows.start), stride: w.rows, output };
        // SAFETY: the task's columns of `out` are its own, and all tokens' rows of them lie within `out`.
        unsafe { multiply(shape, x, Weights::ByOutput(widened), &product_out) };
        let Some(bias) = bias else { return };
        for token in 0..tokens {
            // SAFETY: as above; the product is done.
            let out = unsafe { out.part(token * w.rows + rows.start..token * w.rows + rows.end) };
            out.iter_mut().zip(&bias[rows.clone()]).for_each(|(out, bias)| *out += bias);
        }
    });
}

/// Sizes of a product: (tokens, depth) times (depth, width).
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub(super) tokens: usize,
    pub(super) width: usize,
    pub(super) depth: usize,
}

/// The second operand, by its layout.
pub(super) enum Weights<'a> {
    /// (width, depth) row-major
    ByOutput(&'a [f32]),
    /// (depth, width) row-major
    ByInput(&'a [f32]),
}

/// Where a product goes: token t to the `width` values from `start + t * stride` on.
pub(super) struct ProductOut {
    pub(super) start: *mut f32,
    pub(super) stride: usize,
    pub(super) output: Output,
}

/// out = or += x times weights, on the calling thread. The bits depend on the shape alone.
///
/// # Safety
/// `out` is valid for writes of all tokens and nobody else uses those values.
pub(super) unsafe fn multiply(shape: Product, x: &[f32], weights: Weights, out: &ProductOut) {
    let Product { tokens, width, depth } = shape;
    let (weights, column_stride, row_stride) = match weights {
        Weights::ByOutput(weights) => (weights, depth, 1),
        Weights::ByInput(weights) => (weights, 1, width),
    };
    assert_eq!((x.len(), weights.len()), (tokens * depth, width * depth));
    assert!(width <= out.stride, "{width} values, {} apart", out.stride);
    // SAFETY: the operands have the sizes just asserted, and the caller vouches for `out`.
    unsafe {
        gemm::gemm(
            tokens,
            width,
            depth,
            out.start,
            1,
            out.stride as isize,
            out.output == Output::Add,
            x.as_ptr(),
            1,
            depth as isize,
            weights.as_ptr(),
            column_stride as isize,
            row_stride as isize,
            1.0_f32,
            1.0_f32,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
