//! From options and a memory budget to what the engine does: mode, dense layers, slots, footprint.

use crate::budget::{Budget, Footprint, available_memory, format_size};
use crate::io::{DirectMode, ReaderChoice};
use crate::model::{Workspace, kv_bytes};
use crate::read_plan::RANGE_BYTES_MAX;
use crate::row_store::{BLOCK_BUFFERS, RowLayout, SHARED_OWNERS};
use crate::select::SelectorKind;
use crate::{Error, Result};
use np_formats::{Geometry, RecordLayout};
use np_kernels::{KvDtype, NEURON_BLOCK};
use serde::Serialize;
use std::fmt;

/// Bytes of one block buffer that non-resident layers stream through.
pub const BLOCK_BYTES_MAX: usize = 32 << 20;
/// Prompt tokens that go through a layer together.
pub const PREFILL_TOKENS: usize = 512;
/// Logits that are computed at a time when every position's are wanted.
pub const LOGITS_TOKENS: usize = 16;
/// The share of neurons that is active when nothing else is asked for.
pub const K_FRACTION_DEFAULT: f64 = 0.688;
/// Context when nothing else is asked for, or the model's own if that is shorter.
pub const CONTEXT_DEFAULT: usize = 4_096;
/// Kept free of the budget: code, stacks, tokenizer, allocator.
const MARGIN_BYTES: u64 = 64 << 20;
/// Bytes in flight when nothing else is asked for: enough for a few hundred records of a 7B model.
const STAGING_BYTES_DEFAULT: usize = 16 << 20;

/// How many neurons of a sparse layer are active.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum KChoice {
    /// So many.
    Count(usize),
    /// This share of the layer.
    Fraction(f64),
}

/// What an engine is asked for. `None` leaves a choice to the planner.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Active neurons per sparse layer.
    pub k: KChoice,
    /// Layers kept dense.
    pub dense_layers: Option<usize>,
    /// Slots per sparse layer.
    pub capacity: Option<usize>,
    /// Memory budget in bytes.
    pub memory_bytes: Option<u64>,
    /// The rule that names active sets.
    pub selector: SelectorKind,
    /// Hysteresis in nats.
    pub margin: Option<f32>,
    /// The reader.
    pub reader: ReaderChoice,
    /// Whether reads bypass the page cache.
    pub direct: DirectMode,
    /// Most bytes in flight.
    pub staging_bytes: usize,
    /// Gaps of at most this many records are read through.
    pub bridge_records: u32,
    /// Positions.
    pub context: Option<usize>,
    /// Type of cached keys and values.
    pub kv: KvDtype,
    /// Prompt tokens that go through a layer together.
    pub prefill_tokens: usize,
    /// Threads that compute.
    pub threads: Option<usize>,
    /// Check weights against their hashes.
    pub verify: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            k: KChoice::Fraction(K_FRACTION_DEFAULT),
            dense_layers: None,
            capacity: None,
            memory_bytes: None,
            selector: SelectorKind::Mixture,
            margin: None,
            reader: ReaderChoice::Auto,
            direct: DirectMode::Auto,
            staging_bytes: STAGING_BYTES_DEFAULT,
            bridge_records: 0,
            context: None,
            kv: KvDtype::F16,
            prefill_tokens: PREFILL_TOKENS,
            threads: None,
            verify: false,
        }
    }
}

/// How the sparse layers get their rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// There are none: every layer is dense.
    Resident,
    /// Rows stay in their slots and only the delta is read.
    Delta,
    /// No memory for slots of their own: layers take turns, and every row is read for each token.
    Streamed,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Resident => "resident",
            Self::Delta => "delta",
            Self::Streamed => "streamed",
        })
    }
}

/// What was decided.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How the sparse layers get their rows.
    pub mode: Mode,
    /// Memory for rows.
    pub rows: RowLayout,
    /// Positions.
    pub context: usize,
    /// Bytes, by purpose.
    pub footprint: Footprint,
    /// The bytes that may be used.
    pub budget_bytes: u64,
}

/// Decides for a model whose resident tensors take `resident_bytes` and whose selector takes `selector_bytes`.
pub fn decide(
    geometry: &Geometry,
    layout: RecordLayout,
    resident_bytes: u64,
    selector_bytes: u64,
    options: &EngineOptions,
) -> Result<Settings> {
    let k = active_count(geometry, options.k)?;
    let context = options.context.unwrap_or(CONTEXT_DEFAULT.min(geometry.context_max));
    if context == 0 || context > geometry.context_max {
        let max = geometry.context_max;
        return Err(Error::Options(format!("--context {context}: the model takes 1 to {max} positions")));
    }
    if options.prefill_tokens == 0 {
        return Err(Error::Options("--prefill-tokens must be at least 1".into()));
    }
    let capacity = options.capacity.unwrap_or(k);
    if capacity < k || capacity > geometry.intermediate {
        let neurons = geometry.intermediate;
        return Err(Error::Options(format!("--capacity {capacity}: must be from K = {k} to {neurons}")));
    }
    if let Some(dense) = options.dense_layers.filter(|dense| *dense < 1 || *dense > geometry.layers) {
        return Err(Error::Options(format!("--dense-layers {dense}: must be from 1 to {}", geometry.layers)));
    }
    let budget_bytes = match options.memory_bytes {
        Some(bytes) => bytes,
        None => available_memory().map(|Budget { bytes, .. }| bytes)?,
    };
    let footprint = |dense_layers: usize, shared: bool| {
        let rows = row_layout(geometry, layout, dense_layers, capacity, k, shared);
        (rows, footprint_of(geometry, layout, &rows, context, resident_bytes, selector_bytes, options))
    };
    let wanted = match options.dense_layers {
        Some(dense_layers) => dense_layers..=dense_layers,
        None => 1..=geometry.layers,
    };
    let largest_first = wanted.clone().rev().map(|dense| (dense, false));
    let shared = wanted.rev().filter(|dense| *dense < geometry.layers).map(|dense| (dense, true));
    let mut least = u64::MAX;
    for (dense_layers, shared) in largest_first.chain(shared) {
        let (rows, footprint) = footprint(dense_layers, shared);
        if footprint.total() <= budget_bytes {
            let mode = match (dense_layers == geometry.layers, shared) {
                (true, _) => Mode::Resident,
                (false, false) => Mode::Delta,
                (false, true) => Mode::Streamed,
            };
            return Ok(Settings { mode, rows, context, footprint, budget_bytes });
        }
        least = least.min(footprint.total());
    }
    Err(Error::Memory {
        needed: format_size(least),
        budget: format_size(budget_bytes),
        remedy: format!("free memory, or lower --context ({context}), --dense-layers or --k ({k})"),
    })
}

/// K for a geometry.
pub fn active_count(geometry: &Geometry, k: KChoice) -> Result<usize> {
    let neurons = geometry.intermediate;
    match k {
        KChoice::Count(count) if 0 < count && count <= neurons => Ok(count),
        KChoice::Count(count) => Err(Error::Options(format!("--k {count}: must be from 1 to {neurons}"))),
        KChoice::Fraction(share) if 0.0 < share && share <= 1.0 => {
            Ok(((share * neurons as f64).round() as usize).clamp(1, neurons))
        }
        KChoice::Fraction(share) => Err(Error::Options(format!("--k-fraction {share}: must be above 0 and at most 1"))),
    }
}

fn row_layout(
    geometry: &Geometry,
    layout: RecordLayout,
    dense_layers: usize,
    capacity: usize,
    k: usize,
    shared: bool,
) -> RowLayout {
    let blocks_max = (BLOCK_BYTES_MAX / layout.stride_bytes() / NEURON_BLOCK).max(1);
    let block_neurons = geometry.intermediate.min(blocks_max * NEURON_BLOCK);
    let block_neurons = if dense_layers < geometry.layers { block_neurons } else { 0 };
    let capacity = if shared { k } else { capacity };
    RowLayout { dense_layers, capacity, k, shared, block_neurons }
}

fn footprint_of(
    geometry: &Geometry,
    layout: RecordLayout,
    rows: &RowLayout,
    context: usize,
    resident_bytes: u64,
    selector_bytes: u64,
    options: &EngineOptions,
) -> Footprint {
    let stride_bytes = layout.stride_bytes() as u64;
    let sparse = geometry.layers - rows.dense_layers;
    let slot_sets = if rows.shared { SHARED_OWNERS.min(sparse) } else { sparse };
    let tokens = options.prefill_tokens.min(context);
    let mut footprint = Footprint::default();
    footprint.add("resident tensors", resident_bytes);
    footprint.add(
        format!("{} dense layers", rows.dense_layers),
        (rows.dense_layers * geometry.intermediate) as u64 * stride_bytes,
    );
    footprint.add(
        format!("slots of {sparse} sparse layers ({} each)", rows.capacity),
        (slot_sets * rows.capacity) as u64 * stride_bytes,
    );
    if sparse > 0 {
        footprint.add("streaming buffers", (BLOCK_BUFFERS * rows.block_neurons) as u64 * stride_bytes);
        footprint.add("selector", selector_bytes);
        // Ranges, slots and keys of a token's plan; slot maps and masks of every layer.
        footprint.add("plans and slot maps", (sparse * (rows.k * 32 + geometry.intermediate * 24)) as u64);
    }
    footprint.add("keys and values", geometry.layers as u64 * kv_bytes(geometry, context, options.kv));
    let scratch = (tokens * (NEURON_BLOCK * 8 + geometry.hidden)) as u64 * 4;
    let logits = (LOGITS_TOKENS * (geometry.vocab + geometry.hidden)) as u64 * 4;
    footprint.add("activations", Workspace::<np_kernels::Cpu>::bytes(geometry, tokens) + scratch + logits);
    footprint.add("staging", options.staging_bytes.min(RANGE_BYTES_MAX) as u64);
    footprint.add("margin", MARGIN_BYTES);
    footprint
}
