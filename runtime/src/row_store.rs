//! Where neuron rows are: in their layer's slots, or lent to the prefetcher.

use crate::prefetch::{Filled, Job, Prefetcher};
use crate::read_plan::{ReadPlan, ReadPolicy};
use crate::select::ActiveSets;
use crate::slot_map::SlotMap;
use crate::stats::TokenStats;
use crate::transfer::{ReadFault, Transfer};
use crate::{Error, Result};
use np_formats::{Mask, NeuronFileHeader};
use np_kernels::Rows;
use std::collections::VecDeque;
use std::ops::Range;

/// Buffers that non-resident layers stream through: one is read while the other computes.
pub const BLOCK_BUFFERS: usize = 2;
/// Slots that all sparse layers share when there is no memory for slots of their own.
pub const SHARED_OWNERS: usize = 2;

/// How rows are laid out in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowLayout {
    /// Layers before this one have a slot for every neuron.
    pub dense_layers: usize,
    /// Slots of each sparse layer.
    pub capacity: usize,
    /// Most active neurons of a sparse layer.
    pub k: usize,
    /// Sparse layers share [`SHARED_OWNERS`] sets of slots and are read anew for each token.
    pub shared: bool,
    /// Neurons in a block buffer, 0 when nothing is streamed.
    pub block_neurons: usize,
}

/// Slots, and who is in them.
struct Owner {
    rows: Option<Rows>,
    slots: SlotMap,
    /// The layer whose rows these are, where several layers take turns.
    tenant: Option<u16>,
}

/// What was lent with one layer of a job.
#[derive(Clone, Copy)]
enum Lent {
    Owner(usize),
    Block(usize),
}

/// All rows of an engine, and the prefetcher that fills them.
pub struct RowStore {
    header: NeuronFileHeader,
    policy: ReadPolicy,
    layout: RowLayout,
    owners: Vec<Owner>,
    blocks: Vec<Option<Rows>>,
    prefetcher: Prefetcher,
    token_jobs: Vec<Job>,
    block_jobs: Vec<Job>,
    /// Lent slots, in the order in which they come back.
    lent: VecDeque<Lent>,
    /// Whether each job in flight reads blocks.
    in_flight: VecDeque<bool>,
    /// Layers whose sets are named and whose reads have not started.
    queue: VecDeque<u16>,
    incoming: Mask,
    fault: Option<ReadFault>,
}

impl RowStore {
    /// Empty slots for every layer of the file. Dense layers are loaded by [`RowStore::load_dense`].
    pub fn new(header: NeuronFileHeader, layout: RowLayout, policy: ReadPolicy, transfer: Transfer) -> Result<Self> {
        let (layers, neurons) = (usize::from(header.layers), header.neurons as usize);
        let own = if layout.shared { layout.dense_layers } else { layers };
        let mut owners = Vec::new();
        for index in 0..own + if layout.shared { SHARED_OWNERS } else { 0 } {
            let capacity = if index < layout.dense_layers { neurons } else { layout.capacity };
            let rows = Some(Rows::new(header.layout, capacity)?);
            owners.push(Owner { rows, slots: SlotMap::new(neurons, capacity), tenant: None });
        }
        let streams = if layout.block_neurons > 0 { BLOCK_BUFFERS } else { 0 };
        let blocks = (0..streams).map(|_| Ok(Some(Rows::new(header.layout, layout.block_neurons)?)));
        let sparse = layers - layout.dense_layers;
        let (job_count, job_layers) = if layout.shared { (SHARED_OWNERS, 1) } else { (1, sparse) };
        let job = |layers: usize, records: usize| Job {
            plan: ReadPlan::with_capacity(layers, records),
            rows: Vec::with_capacity(layers),
        };
        Ok(Self {
            header,
            policy,
            layout,
            owners,
            blocks: blocks.collect::<Result<_>>()?,
            prefetcher: Prefetcher::start(transfer, layers + 2 * SHARED_OWNERS).map_err(Error::Thread)?,
            token_jobs: (0..job_count).map(|_| job(job_layers, job_layers * layout.k)).collect(),
            block_jobs: (0..BLOCK_BUFFERS).map(|_| job(1, layout.block_neurons)).collect(),
            lent: VecDeque::with_capacity(layers + BLOCK_BUFFERS),
            in_flight: VecDeque::with_capacity(8),
            queue: VecDeque::with_capacity(layers),
            incoming: Mask::new(neurons),
            fault: None,
        })
    }

    /// Reads all rows of the dense layers. `done` hears of each finished layer.
    pub fn load_dense(&mut self, mut done: impl FnMut(usize)) -> std::result::Result<(), ReadFault> {
        let all = Mask::full(self.header.neurons as usize);
        for layer in 0..self.layout.dense_layers {
            let mut job = self.block_job();
            self.owners[layer].slots.advance(&all, &mut self.incoming);
            let slots = self.owners[layer].slots.slot_of();
            job.plan.add_layer(layer as u16, &self.incoming, slots, &self.header, self.policy);
            job.rows.push(self.owners[layer].rows.take());
            self.send(job, true, Lent::Owner(layer));
            self.receive_all()?;
            done(layer);
        }
        Ok(())
    }

    /// A layer's rows and the slot of each of its neurons. The layer's reads were waited for.
    pub fn rows(&self, layer: usize) -> (&Rows, &[i32]) {
        let owner = &self.owners[self.owner_of(layer)];
        (owner.rows.as_ref().expect("rows are not computed on while they are lent"), owner.slots.slot_of())
    }

    /// Rows in the slots of all sparse layers.
    pub fn resident_rows(&self) -> u64 {
        self.owners[self.layout.dense_layers..].iter().map(|owner| owner.slots.resident().count() as u64).sum()
    }

    /// Starts reading what the layer's active set lacks, as soon as there are slots for it.
    pub fn request(&mut self, layer: u16) {
        self.queue.push_back(layer);
    }

    /// Starts queued reads: all of them as one job, or one per set of shared slots that is free.
    pub fn start_reads(&mut self, sets: &ActiveSets, stats: &mut TokenStats) {
        while let Some(&next) = self.queue.front() {
            let owner = self.owner_of(usize::from(next));
            if self.token_jobs.is_empty() || self.owners[owner].tenant.is_some() {
                return;
            }
            let mut job = self.token_jobs.pop().expect("just looked");
            while let Some(layer) = self.queue.pop_front() {
                self.add_to_job(&mut job, layer, sets, stats);
                if self.layout.shared {
                    break;
                }
            }
            stats.ranges += job.plan.ranges().len() as u64;
            stats.read_bytes += (job.plan.records() * self.header.layout.stride_bytes()) as u64;
            if job.plan.layers().is_empty() {
                self.token_jobs.push(job);
            } else {
                self.in_flight.push_back(false);
                self.prefetcher.send(job);
            }
        }
    }

    fn add_to_job(&mut self, job: &mut Job, layer: u16, sets: &ActiveSets, stats: &mut TokenStats) {
        let owner = self.owner_of(usize::from(layer));
        let Owner { rows, slots, tenant } = &mut self.owners[owner];
        if self.layout.shared {
            slots.clear();
            *tenant = Some(layer);
        }
        let active = sets.set(layer);
        slots.advance(active, &mut self.incoming);
        let incoming_rows = self.incoming.count() as u64;
        stats.active_rows += active.count() as u64;
        stats.incoming_rows += incoming_rows;
        if incoming_rows > 0 {
            job.plan.add_layer(layer, &self.incoming, slots.slot_of(), &self.header, self.policy);
            job.rows.push(rows.take());
            self.lent.push_back(Lent::Owner(owner));
        }
    }

    /// Waits until the rows of the layer's active set are in place.
    pub fn wait(
        &mut self,
        layer: usize,
        sets: &ActiveSets,
        stats: &mut TokenStats,
    ) -> std::result::Result<(), ReadFault> {
        let owner = self.owner_of(layer);
        while self.queue.contains(&(layer as u16)) {
            self.start_reads(sets, stats);
            if self.queue.contains(&(layer as u16)) {
                self.receive();
            }
        }
        while self.owners[owner].rows.is_none() {
            self.receive();
        }
        self.check_fault()
    }

    /// Tells that the layer has computed: shared slots may be used by another.
    pub fn release(&mut self, layer: usize, sets: &ActiveSets, stats: &mut TokenStats) {
        if self.layout.shared && layer >= self.layout.dense_layers {
            let owner = self.owner_of(layer);
            self.owners[owner].tenant = None;
            self.start_reads(sets, stats);
        }
    }

    /// Waits for the emptied jobs of reads that were waited for.
    pub fn finish_token(&mut self) -> std::result::Result<(), ReadFault> {
        self.receive_all()
    }

    /// Forgets all rows of sparse layers, waiting for those in flight.
    pub fn reset(&mut self) {
        self.queue.clear();
        // What went wrong with reads that are being forgotten no longer matters.
        let _ = self.receive_all();
        for owner in &mut self.owners[self.layout.dense_layers..] {
            owner.slots.clear();
            owner.tenant = None;
        }
    }

    /// Starts reading neurons of a layer into a block buffer, from its first slot on.
    pub fn read_block(&mut self, buffer: usize, layer: u16, neurons: Range<u32>) {
        let mut job = self.block_job();
        job.plan.add_block(layer, neurons, &self.header, self.policy);
        job.rows.push(self.blocks[buffer].take());
        self.send(job, true, Lent::Block(buffer));
    }

    /// Waits for a block buffer.
    pub fn wait_block(&mut self, buffer: usize) -> std::result::Result<(), ReadFault> {
        while self.blocks[buffer].is_none() {
            self.receive();
        }
        self.check_fault()
    }

    /// The content of a block buffer: neuron `first + i` in slot i.
    pub fn block(&self, buffer: usize) -> &Rows {
        self.blocks[buffer].as_ref().expect("blocks are not computed on while they are lent")
    }

    /// Gives `active` slots in a sparse layer, to be filled by [`RowStore::keep_from_block`]. Nothing is kept in shared
    /// slots.
    pub fn begin_keep(&mut self, layer: usize, active: &Mask) {
        let owner = &mut self.owners[layer];
        owner.slots.advance(active, &mut self.incoming);
    }

    /// Copies the rows that the layer lacks from a block that holds `neurons`.
    pub fn keep_from_block(&mut self, layer: usize, buffer: usize, neurons: Range<u32>) {
        let Owner { rows, slots, .. } = &mut self.owners[layer];
        let rows = rows.as_mut().expect("no read is in flight during prefill");
        let block = self.blocks[buffer].as_ref().expect("the block was waited for");
        for neuron in neurons.clone().filter(|&neuron| self.incoming.contains(neuron)) {
            let slot = slots.slot_of()[neuron as usize] as usize;
            rows.record_mut(slot).copy_from_slice(block.record((neuron - neurons.start) as usize));
        }
    }

    fn owner_of(&self, layer: usize) -> usize {
        let dense = self.layout.dense_layers;
        if self.layout.shared && layer >= dense { dense + (layer - dense) % SHARED_OWNERS } else { layer }
    }

    fn block_job(&mut self) -> Job {
        while self.block_jobs.is_empty() {
            self.receive();
        }
        self.block_jobs.pop().expect("just looked")
    }

    fn send(&mut self, job: Job, of_block: bool, lent: Lent) {
        self.lent.push_back(lent);
        self.in_flight.push_back(of_block);
        self.prefetcher.send(job);
    }

    fn receive(&mut self) {
        match self.prefetcher.receive() {
            Filled::Layer { rows, outcome } => {
                match self.lent.pop_front().expect("only what was lent comes back") {
                    Lent::Owner(owner) => self.owners[owner].rows = Some(rows),
                    Lent::Block(buffer) => self.blocks[buffer] = Some(rows),
                }
                self.fault = self.fault.or(outcome.err());
            }
            Filled::Job(mut job) => {
                job.plan.clear();
                let of_block = self.in_flight.pop_front().expect("only jobs that were sent come back");
                if of_block { self.block_jobs.push(job) } else { self.token_jobs.push(job) }
            }
        }
    }

    fn receive_all(&mut self) -> std::result::Result<(), ReadFault> {
        while !self.in_flight.is_empty() {
            self.receive();
        }
        self.check_fault()
    }

    /// Gives a fault once, when everything lent has come back.
    fn check_fault(&mut self) -> std::result::Result<(), ReadFault> {
        if self.fault.is_none() {
            return Ok(());
        }
        while !self.in_flight.is_empty() {
            self.receive();
        }
        Err(self.fault.take().expect("just looked"))
    }
}
