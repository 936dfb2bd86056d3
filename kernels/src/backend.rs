//! The closed list of operations that an engine needs.

use crate::{Result, RopeTable, Rows};
use np_formats::Dtype;
use std::io;
use std::ops::Range;

/// Neurons whose contributions are summed first, by id: block b holds ids `b * 64 .. (b + 1) * 64`.
///
/// Blocks are then added in ascending order. Adding zero is exact, so a sum over some neurons equals a sum over all of
/// them with the others masked, to the bit, wherever the rows lie and however many threads work.
pub const NEURON_BLOCK: usize = 64;

/// What becomes of a result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Output {
    /// It replaces what was there.
    Write,
    /// It is added to what was there, as a residual stream wants.
    Add,
}

/// Type of cached keys and values.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum KvDtype {
    /// Half the memory, the default.
    F16,
    /// Exact.
    F32,
}

impl KvDtype {
    /// Bytes of one value.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Sizes of one layer's attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Values in a head.
    pub head_dim: usize,
    /// How many positions a position sees, its own included; `None`: all before it.
    pub sliding_window: Option<usize>,
}

/// What the neurons did before the activation, for collection: `gate[t * neurons + i]` is neuron i's gate row times x.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Observed {
    /// Gate rows times the input, (tokens, neurons of the range).
    pub gate: Vec<f32>,
    /// Up rows times the input, (tokens, neurons of the range).
    pub up: Vec<f32>,
}

/// A processor with memory. Activations and sums are f32, row-major (tokens, width); a buffer may be longer than an
/// operation needs, which then uses its beginning. Wrong shapes are bugs and assert.
///
/// Results of one backend do not depend on its number of threads, to the bit. With `tokens` = 1 no operation allocates
/// after its first call with the same sizes.
pub trait Backend {
    /// A number of f32 values.
    type Buffer: Send;
    /// Weights, (rows, columns) row-major, of any [`Dtype`].
    type Matrix: Send + Sync;
    /// Keys and values of one layer.
    type KvCache: Send;

    /// `count` zeros.
    fn buffer(&self, count: usize) -> Result<Self::Buffer>;

    /// Copies `values` to the beginning of `buffer`.
    fn upload(&mut self, values: &[f32], buffer: &mut Self::Buffer) -> Result<()>;

    /// Copies the beginning of `buffer` to `values`.
    fn download(&mut self, buffer: &Self::Buffer, values: &mut [f32]) -> Result<()>;

    /// A matrix whose little-endian bytes `fill` writes.
    fn matrix(
        &mut self,
        rows: usize,
        columns: usize,
        dtype: Dtype,
        fill: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> Result<Self::Matrix>;

    /// Room for `context` positions of one layer.
    fn kv_cache(&self, kv_heads: usize, head_dim: usize, context: usize, dtype: KvDtype) -> Result<Self::KvCache>;

    /// Row `ids[t]` of `table` (vocabulary, width), widened, becomes row t of `out` (ids, width).
    fn embed(&mut self, table: &Self::Matrix, ids: &[u32], out: &mut Self::Buffer) -> Result<()>;

    /// Each of `rows` rows of x (rows, width) over its root mean square, times `weight` (width), into `out`. `weight`
    /// alone says the width, so a head is a row too.
    fn rms_norm(
        &mut self,
        weight: &Self::Buffer,
        eps: f32,
        x: &Self::Buffer,
        rows: usize,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// [`Backend::rms_norm`] of `x` into itself.
    fn rms_norm_in_place(&mut self, weight: &Self::Buffer, eps: f32, x: &mut Self::Buffer, rows: usize) -> Result<()>;

    /// out (tokens, rows of w) = or += x (tokens, columns of w) times w transposed, plus `bias` (rows of w).
    fn linear(
        &mut self,
        w: &Self::Matrix,
        bias: Option<&Self::Buffer>,
        x: &Self::Buffer,
        tokens: usize,
        out: &mut Self::Buffer,
        output: Output,
    ) -> Result<()>;

    /// Rotates each head of x (tokens, heads, head_dim) by its token's position, `first_position` onwards. Values i and
    /// i + head_dim / 2 turn together.
    fn rope(
        &mut self,
        table: &RopeTable,
        x: &mut Self::Buffer,
        first_position: usize,
        tokens: usize,
        heads: usize,
    ) -> Result<()>;

    /// Puts k and v (tokens, kv_heads, head_dim) into `cache` at `first_position` onwards, then attends causally:
    /// out (tokens, heads, head_dim) = softmax(q k^T / sqrt(head_dim)) v. Positions before `first_position` must have
    /// been put there before; writing a position again replaces it.
    #[expect(clippy::too_many_arguments, reason = "the operands of attention; a struct would only rename them")]
    fn attention(
        &mut self,
        shape: AttentionShape,
        q: &Self::Buffer,
        k: &Self::Buffer,
        v: &Self::Buffer,
        cache: &mut Self::KvCache,
        first_position: usize,
        tokens: usize,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// y (hidden) += the sum over `active` of silu(gate·x) (up·x) down, for one token. `active` holds ascending neuron
    /// ids, `slot_map` the slot of each of the layer's neurons, -1 where there is none. Sums as [`NEURON_BLOCK`] says.
    fn row_mlp(
        &mut self,
        rows: &Rows,
        active: &[u32],
        slot_map: &[i32],
        x: &Self::Buffer,
        y: &mut Self::Buffer,
    ) -> Result<()>;

    /// y (tokens, hidden) += what all neurons of the range contribute for x (tokens, hidden). `slot_of[i]` is the slot
    /// of neuron `neurons.start + i`; the range starts at a multiple of [`NEURON_BLOCK`]. Consecutive ranges, one call
    /// each, give the same bits as one call. `observed` is resized and filled.
    #[expect(clippy::too_many_arguments, reason = "the operands of an MLP; a struct would only rename them")]
    fn block_mlp(
        &mut self,
        rows: &Rows,
        neurons: Range<u32>,
        slot_of: &[i32],
        x: &Self::Buffer,
        tokens: usize,
        y: &mut Self::Buffer,
        observed: Option<&mut Observed>,
    ) -> Result<()>;

    /// y (count) += x (count).
    fn add(&mut self, y: &mut Self::Buffer, x: &Self::Buffer, count: usize) -> Result<()>;
}
