//! The CPU backend: always there, the reference, and fast.
//!
//! One file per operation. Work is cut into tasks by shape alone, each task's arithmetic is fixed, and tasks write
//! apart from each other, so the number of threads changes no bit.

mod attention;
mod block_mlp;
mod convert;
mod linear;
mod norm;
mod pool;
mod rope;
mod row_mlp;
mod simd;

use crate::{AttentionShape, Backend, Error, KvDtype, Observed, Output, Pages, Result, Rows};
use np_formats::Dtype;
use pool::Pool;
use simd::Path;
use std::io;
use std::ops::{Deref, DerefMut, Range};

pub use attention::CpuKvCache;
pub use rope::RopeTable;

/// The CPU with a fixed pool of threads.
pub struct Cpu {
    pool: Pool,
    path: Path,
    scratch: Scratch,
}

/// Memory between the steps of an operation. It grows to what the largest shapes need and stays.
#[derive(Default)]
struct Scratch {
    /// Weights widened to f32, one part per worker.
    widened: Vec<f32>,
    /// Sums per block of neurons (`row_mlp`), or activations (`block_mlp`).
    blocks: Vec<f32>,
    /// The active neurons of each block that has some, as ranges of the list of active ids.
    active: Vec<Range<usize>>,
    /// Softmax state, one part per worker.
    softmax: Vec<f32>,
}

/// Values in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct CpuBuffer(Vec<f32>);

/// Weights in memory, on huge pages.
#[derive(Debug)]
pub struct CpuMatrix {
    rows: usize,
    columns: usize,
    dtype: Dtype,
    pages: Pages,
}

impl Cpu {
    /// A backend that computes on `threads` threads, the caller's included. Fails when a thread can't be started.
    pub fn new(threads: usize) -> Result<Self> {
        Ok(Self { pool: Pool::new(threads)?, path: Path::best(), scratch: Scratch::default() })
    }

    /// A backend for each set of instructions that this machine has.
    #[cfg(test)]
    pub(crate) fn of_every_path(threads: usize) -> Vec<Self> {
        let of_path = |path| Self { path, ..Self::new(threads).expect("threads start") };
        Path::all().into_iter().map(of_path).collect()
    }

    /// Threads that compute, the caller's included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }
}

impl CpuMatrix {
    fn row_bytes(&self) -> usize {
        self.columns * self.dtype.bytes()
    }

    fn rows_bytes(&self, rows: Range<usize>) -> &[u8] {
        &self.pages[rows.start * self.row_bytes()..rows.end * self.row_bytes()]
    }

    /// Bytes that the weights take.
    pub fn bytes(&self) -> usize {
        self.pages.len()
    }
}

impl Deref for CpuBuffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.0
    }
}

impl DerefMut for CpuBuffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

/// At least `count` values.
fn grown(scratch: &mut Vec<f32>, count: usize) -> &mut [f32] {
    if scratch.len() < count {
        scratch.resize(count, 0.0);
    }
    &mut scratch[..count]
}

impl Backend for Cpu {
    type Buffer = CpuBuffer;
    type Matrix = CpuMatrix;
    type KvCache = CpuKvCache;

    fn buffer(&self, count: usize) -> Result<CpuBuffer> {
        let mut values = Vec::new();
        values.try_reserve_exact(count).map_err(|_| Error::OutOfMemory { bytes: count.saturating_mul(4) })?;
        values.resize(count, 0.0);
        Ok(CpuBuffer(values))
    }

    fn upload(&mut self, values: &[f32], buffer: &mut CpuBuffer) -> Result<()> {
        buffer[..values.len()].copy_from_slice(values);
        Ok(())
    }

    fn download(&mut self, buffer: &CpuBuffer, values: &mut [f32]) -> Result<()> {
        values.copy_from_slice(&buffer[..values.len()]);
        Ok(())
    }

    fn matrix(
        &mut self,
        rows: usize,
        columns: usize,
        dtype: Dtype,
        fill: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> Result<CpuMatrix> {
        let mut pages = Pages::new(rows.saturating_mul(columns).saturating_mul(dtype.bytes()))?;
        fill(&mut pages).map_err(|source| Error::Fill { rows, columns, source })?;
        Ok(CpuMatrix { rows, columns, dtype, pages })
    }

    fn kv_cache(&self, kv_heads: usize, head_dim: usize, context: usize, dtype: KvDtype) -> Result<CpuKvCache> {
        CpuKvCache::new(kv_heads, head_dim, context, dtype)
    }

    fn embed(&mut self, table: &CpuMatrix, ids: &[u32], out: &mut CpuBuffer) -> Result<()> {
        for (&id, out) in ids.iter().zip(out[..ids.len() * table.columns].chunks_exact_mut(table.columns)) {
            let id = id as usize;
            assert!(id < table.rows, "id {id} of {}", table.rows);
            convert::widen_row(self.path, table.dtype, table.rows_bytes(id..id + 1), out);
        }
        Ok(())
    }

    fn rms_norm(
        &mut self,
        weight: &CpuBuffer,
        eps: f32,
        x: &CpuBuffer,
        rows: usize,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let count = rows * weight.len();
        out[..count].copy_from_slice(&x[..count]);
        norm::rms_norm(self, weight, eps, &mut out[..count]);
        Ok(())
    }

    fn rms_norm_in_place(&mut self, weight: &CpuBuffer, eps: f32, x: &mut CpuBuffer, rows: usize) -> Result<()> {
        norm::rms_norm(self, weight, eps, &mut x[..rows * weight.len()]);
        Ok(())
    }

    fn linear(
        &mut self,
        w: &CpuMatrix,
        bias: Option<&CpuBuffer>,
        x: &CpuBuffer,
        tokens: usize,
        out: &mut CpuBuffer,
        output: Output,
    ) -> Result<()> {
        let (x, out) = (&x[..tokens * w.columns], &mut out[..tokens * w.rows]);
        let bias = bias.map(|bias| &bias[..w.rows]);
        linear::linear(self, w, bias, x, tokens, out, output);
        Ok(())
    }

    fn rope(
        &mut self,
        table: &RopeTable,
        x: &mut CpuBuffer,
        first_position: usize,
        tokens: usize,
        heads: usize,
    ) -> Result<()> {
        rope::rope(self, table, &mut x[..tokens * heads * table.head_dim()], first_position, heads);
        Ok(())
    }

    fn attention(
        &mut self,
        shape: AttentionShape,
        q: &CpuBuffer,
        k: &CpuBuffer,
        v: &CpuBuffer,
        cache: &mut CpuKvCache,
        first_position: usize,
        tokens: usize,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let (width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        cache.put(shape, &k[..tokens * kv_width], &v[..tokens * kv_width], first_position);
        attention::attend(self, shape, &q[..tokens * width], cache, first_position, &mut out[..tokens * width]);
        Ok(())
    }

    fn row_mlp(
        &mut self,
        rows: &Rows,
        active: &[u32],
        slot_map: &[i32],
        x: &CpuBuffer,
        y: &mut CpuBuffer,
    ) -> Result<()> {
        let hidden = rows.layout().hidden();
        row_mlp::row_mlp(self, rows, active, slot_map, &x[..hidden], &mut y[..hidden]);
        Ok(())
    }

    fn block_mlp(
        &mut self,
        rows: &Rows,
        neurons: Range<u32>,
        slot_of: &[i32],
        x: &CpuBuffer,
        tokens: usize,
        y: &mut CpuBuffer,
        observed: Option<&mut Observed>,
    ) -> Result<()> {
        let count = tokens * rows.layout().hidden();
        block_mlp::block_mlp(self, rows, neurons, slot_of, &x[..count], tokens, &mut y[..count], observed);
        Ok(())
    }

    fn add(&mut self, y: &mut CpuBuffer, x: &CpuBuffer, count: usize) -> Result<()> {
        y[..count].iter_mut().zip(&x[..count]).for_each(|(y, x)| *y += x);
        Ok(())
    }
}
