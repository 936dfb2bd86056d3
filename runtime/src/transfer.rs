//! Carries out a read plan: records leave the file and arrive in their slots, as many in flight as staging allows.
//!
//! Every completion has one of four outcomes: whole, short (the rest is asked for again), end of file, or an error. A
//! record counts as arrived when its tag says that it is the wanted one. After a failure nothing new is submitted and
//! everything in flight is waited for, so a late completion can never write into a slot that was given back.

use crate::io::{Completion, Part, Read, RecordReader};
use crate::read_plan::{RANGE_RECORDS_MAX, ReadPlan, ReadRange, UNWANTED};
use np_formats::{NeuronFileHeader, RECORD_ALIGN_BYTES, RecordFault};
use np_kernels::{Pages, Rows};
use std::fmt;
use std::io;

/// Why a record did not arrive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadFault {
    /// Layer of the first record that did not arrive.
    pub layer: u16,
    /// Its neuron.
    pub neuron: u32,
    /// Where it lies in the file.
    pub offset: u64,
    /// What happened.
    pub cause: ReadFaultCause,
}

/// What can happen to a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadFaultCause {
    /// The system's errno.
    System(i32),
    /// The file ends before the record.
    EndOfFile,
    /// Bytes arrived, but not the wanted record.
    Record(RecordFault),
}

impl fmt::Display for ReadFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {}, neuron {}, byte {}: ", self.layer, self.neuron, self.offset)?;
        match self.cause {
            ReadFaultCause::System(errno) => write!(f, "{}", io::Error::from_raw_os_error(errno)),
            ReadFaultCause::EndOfFile => write!(f, "the file ends there; run `np-prep repack` again"),
            ReadFaultCause::Record(fault) => write!(f, "{fault}; run `np-prep repack` again"),
        }
    }
}

/// Bounds of a transfer.
#[derive(Clone, Copy, Debug)]
pub struct TransferOptions {
    /// Most bytes in flight; one range always may be.
    pub staging_bytes: usize,
    /// Longest range of any plan.
    pub range_bytes_max: usize,
    /// Hash every record that arrives.
    pub verify: bool,
}

/// A read in flight.
#[derive(Clone, Copy, Default)]
struct Entry {
    range: usize,
    /// Bytes that have arrived.
    done_bytes: usize,
    /// Distinguishes this use of the entry from earlier ones.
    generation: u32,
}

/// Owns the reader and everything that reads in flight refer to, besides the slots.
pub struct Transfer {
    reader: Option<Box<dyn RecordReader>>,
    header: NeuronFileHeader,
    options: TransferOptions,
    align_bytes: usize,
    entries: Vec<Entry>,
    parts: Vec<[Part; RANGE_RECORDS_MAX]>,
    free: Vec<u16>,
    completions: Vec<Completion>,
    /// Where records go that lie between wanted ones.
    unwanted: Pages,
    /// One cell per entry, on drives whose blocks are larger than a record's alignment.
    staging: Option<Pages>,
    cell_bytes: usize,
    in_flight_bytes: usize,
    remaining: Vec<usize>,
}

impl Transfer {
    /// A transfer of records of the file that `reader` reads. `align_bytes` is what offsets, lengths and addresses must
    /// be multiples of; beyond a record's own alignment, reads go through staging and are copied.
    pub fn new(
        reader: Box<dyn RecordReader>,
        align_bytes: usize,
        header: NeuronFileHeader,
        options: TransferOptions,
    ) -> np_kernels::Result<Self> {
        let stride_bytes = header.layout.stride_bytes();
        let widened = align_bytes > RECORD_ALIGN_BYTES;
        let cell_bytes = (options.range_bytes_max.max(stride_bytes) + 2 * align_bytes)
            .next_multiple_of(align_bytes.max(RECORD_ALIGN_BYTES));
        let mut depth = reader.depth();
        if widened {
            depth = depth.min((options.staging_bytes / cell_bytes).max(1));
        }
        let staging = if widened { Some(Pages::new(depth * cell_bytes)?) } else { None };
        Ok(Self {
            header,
            options,
            align_bytes,
            entries: vec![Entry::default(); depth],
            parts: vec![[Part::new(std::ptr::null_mut(), 0); RANGE_RECORDS_MAX]; depth],
            free: (0..depth as u16).rev().collect(),
            completions: Vec::with_capacity(depth),
            unwanted: Pages::new(stride_bytes)?,
            staging,
            cell_bytes,
            in_flight_bytes: 0,
            remaining: Vec::with_capacity(usize::from(header.layers)),
            reader: Some(reader),
        })
    }

    /// Reads everything in `plan`. `rows[i]` are the slots of the plan's i-th layer; each is taken out and handed to
    /// `filled`, in order, as soon as its last record is in place, or with the fault if one came first.
    pub fn run(
        &mut self,
        plan: &ReadPlan,
        rows: &mut [Option<Rows>],
        mut filled: impl FnMut(Rows, Result<(), ReadFault>),
    ) {
        assert_eq!(plan.layers().len(), rows.len());
        self.remaining.clear();
        self.remaining.extend(plan.layers().iter().map(|layer| layer.ranges.len()));
        let mut next_range = 0;
        let mut next_layer = 0;
        let mut fault = None;
        loop {
            while fault.is_none() && next_layer < rows.len() && self.remaining[next_layer] == 0 {
                filled(rows[next_layer].take().expect("rows are handed out once"), Ok(()));
                next_layer += 1;
            }
            while fault.is_none() && self.has_room(plan, next_range) {
                fault = self.submit(plan, next_range, rows).err();
                next_range += 1;
            }
            if self.free.len() == self.entries.len() {
                break;
            }
            fault = self.collect(plan, rows).err().or(fault);
        }
        while let Some(fault) = fault.filter(|_| next_layer < rows.len()) {
            filled(rows[next_layer].take().expect("rows are handed out once"), Err(fault));
            next_layer += 1;
        }
    }

    fn has_room(&self, plan: &ReadPlan, next_range: usize) -> bool {
        let Some(range) = plan.ranges().get(next_range) else { return false };
        let bytes = self.range_bytes(range);
        let nothing_in_flight = self.free.len() == self.entries.len();
        !self.free.is_empty() && (nothing_in_flight || self.in_flight_bytes + bytes <= self.options.staging_bytes)
    }

    fn range_bytes(&self, range: &ReadRange) -> usize {
        range.count as usize * self.header.layout.stride_bytes()
    }

    fn submit(&mut self, plan: &ReadPlan, range: usize, rows: &mut [Option<Rows>]) -> Result<(), ReadFault> {
        let entry = self.free.pop().expect("has_room found a free entry");
        let generation = self.entries[usize::from(entry)].generation.wrapping_add(1);
        self.entries[usize::from(entry)] = Entry { range, done_bytes: 0, generation };
        self.in_flight_bytes += self.range_bytes(&plan.ranges()[range]);
        self.start(plan, entry, rows)
    }

    /// Asks for what has not arrived of an entry's range.
    fn start(&mut self, plan: &ReadPlan, entry: u16, rows: &mut [Option<Rows>]) -> Result<(), ReadFault> {
        let Entry { range, done_bytes, generation } = self.entries[usize::from(entry)];
        let range = plan.ranges()[range];
        let (offset, part_count) = match self.staging {
            Some(_) => self.staged_part(&range, entry, done_bytes),
            None => {
                let offset = self.header.offset(range.layer, range.first) + done_bytes as u64;
                (offset, self.slot_parts(plan, &range, entry, done_bytes, rows))
            }
        };
        let parts: *const [Part] = &raw const self.parts[usize::from(entry)][..part_count];
        let read = Read { id: u64::from(generation) << 32 | u64::from(entry), offset, parts };
        let reader = self.reader.as_mut().ok_or(libc::EIO);
        // SAFETY: the parts lie in `self.parts`, `self.staging`, `self.unwanted` or the slots in `rows`. None of these
        // is touched or given back before the entry completes: `run` ends only when no entry is in flight.
        let submitted = reader.and_then(|reader| unsafe { reader.submit(&read) }.map_err(|error| errno(&error)));
        submitted.map_err(|errno| {
            self.release(plan, entry);
            self.fault(&range, done_bytes, ReadFaultCause::System(errno))
        })
    }

    /// Fills the entry's parts with where the range's bytes from `done_bytes` on belong. Returns how many parts.
    fn slot_parts(
        &mut self,
        plan: &ReadPlan,
        range: &ReadRange,
        entry: u16,
        done_bytes: usize,
        rows: &mut [Option<Rows>],
    ) -> usize {
        let stride_bytes = self.header.layout.stride_bytes();
        let rows = rows_of(range, rows);
        let parts = &mut self.parts[usize::from(entry)];
        let mut count = 0;
        for (index, &slot) in plan.slots(range).iter().enumerate() {
            let skip_bytes = done_bytes.saturating_sub(index * stride_bytes);
            if skip_bytes >= stride_bytes {
                continue;
            }
            let record = match slot {
                UNWANTED => self.unwanted.as_mut_ptr(),
                slot => rows.record_ptr(slot as usize),
            };
            let (address, bytes) = (record.wrapping_add(skip_bytes), stride_bytes - skip_bytes);
            match parts[..count].last_mut() {
                Some(last) if slot != UNWANTED && last.address().wrapping_add(last.bytes()) == address => {
                    *last = Part::new(last.address(), last.bytes() + bytes);
                }
                _ => {
                    parts[count] = Part::new(address, bytes);
                    count += 1;
                }
            }
        }
        count
    }

    /// One part: the entry's staging cell, for the widened range.
    fn staged_part(&mut self, range: &ReadRange, entry: u16, done_bytes: usize) -> (u64, usize) {
        let (from, to) = self.widened(range);
        let cell_at = usize::from(entry) * self.cell_bytes + done_bytes;
        let staging = self.staging.as_mut().expect("widened ranges are read into staging");
        let address = staging.as_mut_ptr().wrapping_add(cell_at);
        self.parts[usize::from(entry)][0] = Part::new(address, (to - from) as usize - done_bytes);
        (from + done_bytes as u64, 1)
    }

    /// The range's bytes, widened to what the drive reads.
    fn widened(&self, range: &ReadRange) -> (u64, u64) {
        let from = self.header.offset(range.layer, range.first);
        let to = from + self.range_bytes(range) as u64;
        let align = if self.staging.is_some() { self.align_bytes as u64 } else { 1 };
        (from / align * align, to.next_multiple_of(align))
    }

    /// Waits for completions and deals with them. Gives the first fault.
    fn collect(&mut self, plan: &ReadPlan, rows: &mut [Option<Rows>]) -> Result<(), ReadFault> {
        self.completions.clear();
        let reader = self.reader.as_mut().expect("reads in flight have a reader");
        if let Err(error) = reader.wait(&mut self.completions) {
            // Dropping a reader waits for what is in flight, so the slots may be given back after it.
            self.reader = None;
            return Err(self.abandon(plan, errno(&error)));
        }
        let mut fault = None;
        for index in 0..self.completions.len() {
            let Completion { id, outcome } = &self.completions[index];
            let outcome = outcome.as_ref().map(|bytes| *bytes).map_err(errno);
            fault = fault.or(self.complete(plan, rows, *id, outcome).err());
        }
        fault.map_or(Ok(()), Err)
    }

    /// The fault of a reader that broke: every entry is free again.
    fn abandon(&mut self, plan: &ReadPlan, errno: i32) -> ReadFault {
        let depth = self.entries.len() as u16;
        let first = (0..depth).filter(|entry| !self.free.contains(entry)).min();
        let range = plan.ranges()[first.map_or(0, |entry| self.entries[usize::from(entry)].range)];
        self.free.clear();
        self.free.extend((0..depth).rev());
        self.in_flight_bytes = 0;
        self.fault(&range, 0, ReadFaultCause::System(errno))
    }

    fn complete(
        &mut self,
        plan: &ReadPlan,
        rows: &mut [Option<Rows>],
        id: u64,
        outcome: Result<usize, i32>,
    ) -> Result<(), ReadFault> {
        let entry = id as u16;
        let Entry { range, done_bytes, generation } = self.entries[usize::from(entry)];
        assert_eq!((id >> 32) as u32, generation, "a completion of a read that is over");
        let range = plan.ranges()[range];
        let (from, to) = self.widened(&range);
        let missing = (to - from) as usize - done_bytes;
        let failed = match outcome {
            Ok(bytes) if bytes == missing => {
                self.release(plan, entry);
                return self.arrive(plan, &range, entry, rows);
            }
            Ok(0) => ReadFaultCause::EndOfFile,
            Ok(bytes) => {
                // Direct reads go on at a block's beginning; a read of less than a block will not get further.
                let whole = bytes / self.align_bytes * self.align_bytes;
                if 0 < whole && bytes < missing {
                    self.entries[usize::from(entry)].done_bytes += whole;
                    return self.start(plan, entry, rows);
                }
                ReadFaultCause::System(libc::EIO)
            }
            Err(errno) => ReadFaultCause::System(errno),
        };
        self.release(plan, entry);
        Err(self.fault(&range, done_bytes, failed))
    }

    fn release(&mut self, plan: &ReadPlan, entry: u16) {
        self.in_flight_bytes -= self.range_bytes(&plan.ranges()[self.entries[usize::from(entry)].range]);
        self.free.push(entry);
    }

    /// Checks the records of a range that was read whole, and counts it.
    fn arrive(
        &mut self,
        plan: &ReadPlan,
        range: &ReadRange,
        entry: u16,
        rows: &mut [Option<Rows>],
    ) -> Result<(), ReadFault> {
        let layout = self.header.layout;
        let stride_bytes = layout.stride_bytes();
        let (from, _) = self.widened(range);
        let lead = (self.header.offset(range.layer, range.first) - from) as usize;
        let target = rows_of(range, rows);
        for (index, &slot) in plan.slots(range).iter().enumerate().filter(|(_, slot)| **slot != UNWANTED) {
            if let Some(staging) = &self.staging {
                let record_at = usize::from(entry) * self.cell_bytes + lead + index * stride_bytes;
                target.record_mut(slot as usize).copy_from_slice(&staging[record_at..][..stride_bytes]);
            }
            let neuron = range.first + index as u32;
            let record = target.record(slot as usize);
            let checked = match self.options.verify {
                true => layout.verify(range.layer, neuron, record).map(drop),
                false => layout.check_tag(range.layer, neuron, record).map(drop),
            };
            checked.map_err(|fault| self.fault(range, index * stride_bytes, ReadFaultCause::Record(fault)))?;
        }
        self.remaining[range.layer_index as usize] -= 1;
        Ok(())
    }

    fn fault(&self, range: &ReadRange, done_bytes: usize, cause: ReadFaultCause) -> ReadFault {
        let done = (done_bytes / self.header.layout.stride_bytes()) as u32;
        let neuron = range.first + done.min(range.count - 1);
        ReadFault { layer: range.layer, neuron, offset: self.header.offset(range.layer, neuron), cause }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // The reader first: it waits for what is in flight, and only then may parts and staging go.
        self.reader = None;
    }
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

fn rows_of<'a>(range: &ReadRange, rows: &'a mut [Option<Rows>]) -> &'a mut Rows {
    rows[range.layer_index as usize].as_mut().expect("a layer with reads in flight was not given back")
}
