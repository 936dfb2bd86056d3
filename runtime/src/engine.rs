//! The engine: tokens in, logits out, and the reads behind it.

use crate::io::{Opened, ReaderKind, open_reader};
use crate::model::{Ends, LayerWeights, ResidentFile, Workspace, attention, rope_table};
use crate::read_plan::ReadPolicy;
use crate::row_store::RowStore;
use crate::select::{ActiveSets, Certainty, Point, Selector, SelectorOptions, open_selector, selector_bytes};
use crate::settings::{EngineOptions, LOGITS_TOKENS, Mode, Settings, decide};
use crate::stats::{PrefillStats, TokenStats};
use crate::transfer::{Transfer, TransferOptions};
use crate::{Error, Result};
use np_formats::{Geometry, Manifest, Mask, NEURONS_NAME, NeuronFile, NeuronFileHeader};
use np_kernels::{Backend, Cpu, CpuBuffer, CpuKvCache, RopeTable};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// An MLP of a sparse layer that is about to run, for those that watch.
pub struct MlpView<'a> {
    /// Position of the token.
    pub position: usize,
    /// The layer.
    pub layer: usize,
    /// The MLP's input, (hidden).
    pub input: &'a [f32],
    /// Its active set.
    pub active: &'a Mask,
    /// Whether the active set is what is computed. At the last position of a prompt every neuron is, and the set is what
    /// stays in the slots.
    pub computed: bool,
}

/// Sees every sparse MLP of decoded tokens and of the last position of a prompt.
pub type Watcher = Box<dyn FnMut(MlpView<'_>) + Send>;

/// A model that runs: resident weights, slots, keys and values, and where the sequence stands.
pub struct Engine {
    pub(crate) backend: Cpu,
    pub(crate) geometry: Geometry,
    pub(crate) settings: Settings,
    pub(crate) ends: Ends<Cpu>,
    pub(crate) layers: Vec<LayerWeights<Cpu>>,
    pub(crate) rope: RopeTable,
    pub(crate) caches: Vec<CpuKvCache>,
    pub(crate) workspace: Workspace<Cpu>,
    /// Rows whose logits are wanted.
    pub(crate) last: CpuBuffer,
    pub(crate) logits: CpuBuffer,
    pub(crate) store: RowStore,
    pub(crate) header: NeuronFileHeader,
    pub(crate) selector: Option<Box<dyn Selector>>,
    pub(crate) sets: ActiveSets,
    pub(crate) previous: Vec<Mask>,
    pub(crate) position: usize,
    pub(crate) token: TokenStats,
    pub(crate) prefill: PrefillStats,
    /// Slots of a block buffer's neurons: 0, 1, and so on.
    pub(crate) block_slots: Vec<i32>,
    all_ids: Vec<u32>,
    active_ids: Vec<u32>,
    neurons_path: PathBuf,
    reader: ReaderKind,
    notes: Vec<String>,
    watcher: Option<Watcher>,
}

impl Engine {
    /// Opens an artifact directory, checks that its files belong together, decides what fits, and loads the dense
    /// layers. `loaded` hears of each loaded layer.
    pub fn open(directory: &Path, options: &EngineOptions, loaded: &mut dyn FnMut(usize, usize)) -> Result<Self> {
        let path = directory.join(NEURONS_NAME);
        let opened = |trial_bytes| Ok(open_reader(&path, options.reader, options.direct, trial_bytes)?);
        Self::open_with(directory, options, opened, loaded)
    }

    /// [`Engine::open`] with a reader of the caller's: `reader` is given the bytes of one record.
    pub fn open_with(
        directory: &Path,
        options: &EngineOptions,
        reader: impl FnOnce(usize) -> Result<Opened>,
        loaded: &mut dyn FnMut(usize, usize),
    ) -> Result<Self> {
        let manifest = Manifest::open(directory)?;
        let neurons = open_neurons(directory, &manifest)?;
        let (geometry, header) = (manifest.geometry.clone(), *neurons.header());
        let resident = ResidentFile::open(directory, manifest.fingerprint)?;
        // The pinned files are small beside the neuron file, and a wrong tokenizer or norm is hard to notice later.
        manifest.check_files(directory)?;
        if options.verify {
            resident.verify()?;
        }
        let selector_bytes = selector_bytes(directory, options.selector);
        let settings = decide(&geometry, header.layout, resident.bytes(), selector_bytes, options)?;
        let opened = reader(header.layout.stride_bytes())?;
        let policy = ReadPolicy::new(options.staging_bytes, options.bridge_records);
        let transfer = TransferOptions {
            staging_bytes: options.staging_bytes,
            range_bytes_max: policy.range_bytes_max,
            verify: options.verify,
        };
        let (kind, notes) = (opened.kind, opened.notes);
        let align_bytes = opened.align.offset_bytes.max(opened.align.memory_bytes);
        let transfer = Transfer::new(opened.reader, align_bytes, header, transfer)?;
        let mut store = RowStore::new(header, settings.rows, policy, transfer)?;
        let dense_layers = settings.rows.dense_layers;
        store
            .load_dense(|layer| loaded(layer + 1, dense_layers))
            .map_err(|fault| Error::Read { path: neurons.path().into(), fault })?;
        let selector = match settings.mode {
            Mode::Resident => None,
            Mode::Delta | Mode::Streamed => Some(open_selector(
                directory,
                &geometry,
                manifest.fingerprint,
                SelectorOptions {
                    kind: options.selector,
                    k: settings.rows.k,
                    dense_layers,
                    margin: options.margin.unwrap_or(options.selector.default_margin()),
                },
            )?),
        };
        let threads = options.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        let backend = Cpu::new(threads)?;
        let tokens_max = options.prefill_tokens.min(settings.context);
        let parts = Parts { geometry, settings, header, resident, store, selector, kind, notes };
        Self::assemble(backend, parts, options, tokens_max, neurons.path().into())
    }

    fn assemble(
        mut backend: Cpu,
        parts: Parts,
        options: &EngineOptions,
        tokens_max: usize,
        neurons_path: PathBuf,
    ) -> Result<Self> {
        let Parts { geometry, settings, header, resident, store, selector, kind, notes } = parts;
        let context = settings.context;
        let layers = (0..geometry.layers).map(|layer| resident.layer(&mut backend, &geometry, layer));
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let cache = || Ok(backend.kv_cache(geometry.kv_heads, geometry.head_dim, context, options.kv)?);
        let caches = (0..geometry.layers).map(|_| cache()).collect::<Result<Vec<_>>>()?;
        let neurons = geometry.intermediate;
        Ok(Self {
            workspace: Workspace::new(&backend, &geometry, tokens_max)?,
            last: backend.buffer(LOGITS_TOKENS * geometry.hidden)?,
            logits: backend.buffer(LOGITS_TOKENS * geometry.vocab)?,
            rope: rope_table(&geometry, context),
            ends: resident.ends(&mut backend, &geometry)?,
            sets: ActiveSets::new(geometry.layers, neurons),
            previous: vec![Mask::new(neurons); geometry.layers],
            block_slots: (0..settings.rows.block_neurons as i32).collect(),
            all_ids: (0..neurons as u32).collect(),
            active_ids: Vec::with_capacity(neurons),
            position: 0,
            token: TokenStats::default(),
            prefill: PrefillStats::default(),
            watcher: None,
            reader: kind,
            backend,
            geometry,
            settings,
            layers,
            caches,
            store,
            header,
            selector,
            neurons_path,
            notes,
        })
    }

    /// What was decided at the start.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Sizes of the model.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Which reader is in use.
    pub fn reader(&self) -> ReaderKind {
        self.reader
    }

    /// What is not as it could be, and what to do about it.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Positions that are done.
    pub fn position(&self) -> usize {
        self.position
    }

    /// What the last decoded token cost.
    pub fn token_stats(&self) -> &TokenStats {
        &self.token
    }

    /// What the last prompt cost.
    pub fn prefill_stats(&self) -> &PrefillStats {
        &self.prefill
    }

    /// Lets `watcher` see sparse MLPs.
    pub fn watch(&mut self, watcher: Option<Watcher>) {
        self.watcher = watcher;
    }

    /// Starts a new sequence. Rows stay where they are.
    pub fn restart(&mut self) {
        self.position = 0;
        self.previous.iter_mut().for_each(Mask::clear);
    }

    /// Computes one more token and gives the logits (vocabulary) for what follows it. The first position of a sequence
    /// is computed dense, as a prompt of one token.
    pub fn decode(&mut self, token: u32) -> Result<&[f32]> {
        if self.position == 0 {
            return self.prefill(&[token]);
        }
        self.check_tokens(&[token])?;
        self.token = TokenStats { resident_rows: self.store.resident_rows(), ..TokenStats::default() };
        let started = Instant::now();
        if let Err(error) = self.decode_layers(token) {
            self.reset();
            return Err(error);
        }
        self.last[..self.geometry.hidden].copy_from_slice(&self.workspace.residual[..self.geometry.hidden]);
        self.ends.logits(&mut self.backend, &self.geometry, &mut self.last, 1, &mut self.logits)?;
        self.position += 1;
        let token = &mut self.token;
        token.compute_ns = started.elapsed().as_nanos() as u64 - token.elapsed_ns();
        Ok(&self.logits[..self.geometry.vocab])
    }

    fn decode_layers(&mut self, token: u32) -> Result<()> {
        self.sets.clear();
        self.ends.embed(&mut self.backend, &[token], &mut self.workspace.residual)?;
        for layer in 0..self.geometry.layers {
            self.observe(Point::LayerInput(layer as u16));
            self.attend(layer, 1)?;
            self.observe(Point::MlpInput(layer as u16));
            self.mlp(layer)?;
            self.observe(Point::LayerOutput(layer as u16));
        }
        let finished = self.store.finish_token();
        finished.map_err(|fault| self.read_error(fault))?;
        self.remember_sets();
        Ok(())
    }

    /// One token's MLP of one layer, over its active set.
    fn mlp(&mut self, layer: usize) -> Result<()> {
        let sparse = layer >= self.settings.rows.dense_layers;
        if sparse {
            let waited = Instant::now();
            let arrived = self.store.wait(layer, &self.sets, &mut self.token);
            self.token.io_wait_ns += waited.elapsed().as_nanos() as u64;
            arrived.map_err(|fault| self.read_error(fault))?;
            let active = self.sets.set(layer as u16);
            self.active_ids.clear();
            self.active_ids.extend(active.ones());
            self.show_watcher(layer, self.position, 0, true);
        }
        let active = if sparse { &self.active_ids } else { &self.all_ids };
        let (rows, slot_of) = self.store.rows(layer);
        let Workspace { normed, residual, .. } = &mut self.workspace;
        self.backend.row_mlp(rows, active, slot_of, normed, residual)?;
        self.store.release(layer, &self.sets, &mut self.token);
        Ok(())
    }

    /// Shows the watcher a sparse layer's input in row `row` of the workspace.
    pub(crate) fn show_watcher(&mut self, layer: usize, position: usize, row: usize, computed: bool) {
        if let Some(watcher) = &mut self.watcher {
            let hidden = self.geometry.hidden;
            let input = &self.workspace.normed[row * hidden..(row + 1) * hidden];
            watcher(MlpView { position, layer, input, active: self.sets.set(layer as u16), computed });
        }
    }

    pub(crate) fn attend(&mut self, layer: usize, tokens: usize) -> Result<()> {
        let (weights, cache) = (&self.layers[layer], &mut self.caches[layer]);
        let (backend, workspace) = (&mut self.backend, &mut self.workspace);
        attention(backend, weights, &self.geometry, &self.rope, cache, workspace, self.position, tokens)
    }

    /// Shows a decoded token's state to the selector, and starts the reads of the sets that it names.
    fn observe(&mut self, point: Point) {
        let Some(started) = self.show(point, 0, true) else { return };
        let named = Instant::now();
        self.token.predictor_ns += (named - started).as_nanos() as u64;
        self.store.start_reads(&self.sets, &mut self.token);
        self.token.other_ns += named.elapsed().as_nanos() as u64;
    }

    /// Shows one row's state to the selector, if it watches; with `reads`, queues the reads of the sets that it names.
    /// Gives the time before.
    pub(crate) fn show(&mut self, point: Point, row: usize, reads: bool) -> Option<Instant> {
        let selector = self.selector.as_mut().filter(|selector| selector.watches(point))?;
        let started = Instant::now();
        let hidden = self.geometry.hidden;
        let at = row * hidden..(row + 1) * hidden;
        let normed = matches!(point, Point::MlpInput(_)).then(|| &self.workspace.normed[at.clone()]);
        let before = self.sets.named().len();
        selector.observe(point, &self.workspace.residual[at], normed, &self.previous, &mut self.sets);
        for &(layer, certainty) in &self.sets.named()[before..] {
            let active = self.sets.set(layer).count();
            assert_eq!(active, self.settings.rows.k, "layer {layer}: the selector names exactly K neurons");
            // A guess is advice; what it would read is read when the set is firm.
            if certainty == Certainty::Firm && reads {
                self.store.request(layer);
            }
        }
        Some(started)
    }

    /// What was active becomes what was active before.
    pub(crate) fn remember_sets(&mut self) {
        for layer in self.settings.rows.dense_layers..self.geometry.layers {
            self.previous[layer].copy_from(self.sets.set(layer as u16));
        }
    }

    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let (positions, context) = (self.position + tokens.len(), self.settings.context);
        if positions > context {
            return Err(Error::Context { positions, context });
        }
        let vocab = self.geometry.vocab;
        match tokens.iter().find(|token| **token as usize >= vocab) {
            Some(&token) => Err(Error::Token { token, vocab }),
            None => Ok(()),
        }
    }

    pub(crate) fn read_error(&self, fault: crate::transfer::ReadFault) -> Error {
        Error::Read { path: self.neurons_path.clone(), fault }
    }

    /// After a failure: the sequence is over, and no row of a sparse layer is trusted.
    pub(crate) fn reset(&mut self) {
        self.store.reset();
        self.restart();
    }
}

/// What [`Engine::open_with`] found, on its way into an engine.
struct Parts {
    geometry: Geometry,
    settings: Settings,
    header: NeuronFileHeader,
    resident: ResidentFile,
    store: RowStore,
    selector: Option<Box<dyn Selector>>,
    kind: ReaderKind,
    notes: Vec<String>,
}

/// Opens the neuron file of `directory` and checks that it is the manifest's.
pub fn open_neurons(directory: &Path, manifest: &Manifest) -> Result<NeuronFile> {
    let neurons = NeuronFile::open(&directory.join(NEURONS_NAME))?;
    let header = neurons.header();
    let geometry = &manifest.geometry;
    if header.fingerprint != manifest.fingerprint {
        return Err(np_formats::Error::Foreign {
            path: neurons.path().into(),
            found: header.fingerprint.to_string(),
            expected: manifest.fingerprint.to_string(),
            remedy: "run `np-prep repack` again",
        }
        .into());
    }
    let fits = usize::from(header.layers) == geometry.layers
        && header.neurons as usize == geometry.intermediate
        && header.layout.hidden() == geometry.hidden;
    match fits {
        true => Ok(neurons),
        false => Err(np_formats::Error::Header {
            path: neurons.path().into(),
            problem: "has other sizes than the manifest; run `np-prep repack` again".into(),
        }
        .into()),
    }
}
