//! What to read for one token: ranges of the neuron file, and the slots that their records go to.
//!
//! Masks in, a [`ReadPlan`] out. Nothing here knows a file, a thread or a GPU.

use np_formats::{Mask, NeuronFileHeader};
use std::ops::Range;

/// Longest range: long enough for the drive's sequential rate, short enough that many are in flight.
pub const RANGE_BYTES_MAX: usize = 1 << 20;
/// Most records in a range; each may go to another slot, and each such place is one part of a vectored read.
pub const RANGE_RECORDS_MAX: usize = 64;
/// The slot of a record that is only read because it lies between two wanted ones.
pub const UNWANTED: i32 = -1;

/// Consecutive records of one layer, read by one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadRange {
    /// Their layer.
    pub layer: u16,
    /// Index of the layer in [`ReadPlan::layers`].
    pub layer_index: u32,
    /// The first record's neuron.
    pub first: u32,
    /// Records, wanted or not.
    pub count: u32,
    /// Where in [`ReadPlan::slots`] the records' slots begin.
    pub slots_at: u32,
}

/// The ranges of one layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerReads {
    /// The layer.
    pub layer: u16,
    /// Its ranges in [`ReadPlan::ranges`].
    pub ranges: Range<usize>,
    /// Wanted records among them.
    pub wanted: usize,
}

/// How ranges are formed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadPolicy {
    /// Gaps of at most this many records are read through, where that is cheaper than another request.
    pub bridge_records: u32,
    /// No range is longer than this many bytes, but each holds at least one record.
    pub range_bytes_max: usize,
}

impl ReadPolicy {
    /// Ranges that fit into `staging_bytes` in flight, bridging gaps of at most `bridge_records`.
    pub fn new(staging_bytes: usize, bridge_records: u32) -> Self {
        Self { bridge_records, range_bytes_max: RANGE_BYTES_MAX.min(staging_bytes) }
    }

    fn records_max(&self, stride_bytes: usize) -> u32 {
        (self.range_bytes_max / stride_bytes).clamp(1, RANGE_RECORDS_MAX) as u32
    }
}

/// A token's reads, in layer order. A pure value; rebuilding it allocates nothing once it has grown.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReadPlan {
    ranges: Vec<ReadRange>,
    slots: Vec<i32>,
    layers: Vec<LayerReads>,
}

impl ReadPlan {
    /// An empty plan with room for `records` records in `layers` layers.
    pub fn with_capacity(layers: usize, records: usize) -> Self {
        // A bridged gap adds unwanted records, at most as many as a range holds beside its wanted ones.
        Self {
            ranges: Vec::with_capacity(records),
            slots: Vec::with_capacity(records * 2),
            layers: Vec::with_capacity(layers),
        }
    }

    /// Forgets all reads.
    pub fn clear(&mut self) {
        self.ranges.clear();
        self.slots.clear();
        self.layers.clear();
    }

    /// Adds the records of `incoming`, which go to the slots that `slot_of` names. Layers come in the order in which
    /// they will compute.
    pub fn add_layer(
        &mut self,
        layer: u16,
        incoming: &Mask,
        slot_of: &[i32],
        header: &NeuronFileHeader,
        policy: ReadPolicy,
    ) {
        let records_max = policy.records_max(header.layout.stride_bytes());
        let start = self.ranges.len();
        for run in incoming.runs() {
            let mut next = run.start;
            while next < run.end {
                next += self.extend(layer, next, run.end, start, records_max, policy.bridge_records, slot_of);
            }
        }
        let wanted = incoming.count();
        self.layers.push(LayerReads { layer, ranges: start..self.ranges.len(), wanted });
    }

    /// Adds consecutive neurons, which go to slots 0, 1, and so on.
    pub fn add_block(&mut self, layer: u16, neurons: Range<u32>, header: &NeuronFileHeader, policy: ReadPolicy) {
        let records_max = policy.records_max(header.layout.stride_bytes());
        let start = self.ranges.len();
        let wanted = neurons.len();
        let layer_index = self.layers.len() as u32;
        for first in neurons.clone().step_by(records_max as usize) {
            let count = records_max.min(neurons.end - first);
            let slots_at = self.slots.len() as u32;
            self.ranges.push(ReadRange { layer, layer_index, first, count, slots_at });
            let slot = (first - neurons.start) as i32;
            self.slots.extend(slot..slot + count as i32);
        }
        self.layers.push(LayerReads { layer, ranges: start..self.ranges.len(), wanted });
    }

    /// Adds records from `next` up to `end` at most, to the last range of this layer if it is near, else to a new one.
    /// Returns how many were added.
    #[expect(clippy::too_many_arguments, reason = "the loop of one function, cut where it fits a screen")]
    fn extend(
        &mut self,
        layer: u16,
        next: u32,
        end: u32,
        start: usize,
        records_max: u32,
        bridge_records: u32,
        slot_of: &[i32],
    ) -> u32 {
        let gap = match self.ranges[start..].last() {
            Some(last) => {
                let gap = next - (last.first + last.count);
                (gap <= bridge_records && last.count + gap < records_max).then_some(gap)
            }
            None => None,
        };
        match gap {
            Some(gap) => {
                self.slots.extend(std::iter::repeat_n(UNWANTED, gap as usize));
                self.ranges.last_mut().expect("there is a last range").count += gap;
            }
            None => {
                let (layer_index, slots_at) = (self.layers.len() as u32, self.slots.len() as u32);
                self.ranges.push(ReadRange { layer, layer_index, first: next, count: 0, slots_at });
            }
        }
        let range = self.ranges.last_mut().expect("there is a last range");
        let count = (end - next).min(records_max - range.count);
        range.count += count;
        self.slots.extend_from_slice(&slot_of[next as usize..(next + count) as usize]);
        count
    }

    /// All ranges, in layer order and ascending within a layer.
    pub fn ranges(&self) -> &[ReadRange] {
        &self.ranges
    }

    /// The layers, in the order in which they were added.
    pub fn layers(&self) -> &[LayerReads] {
        &self.layers
    }

    /// Slots of a range's records, [`UNWANTED`] for those between wanted ones.
    pub fn slots(&self, range: &ReadRange) -> &[i32] {
        &self.slots[range.slots_at as usize..(range.slots_at + range.count) as usize]
    }

    /// Records that are wanted.
    pub fn wanted(&self) -> usize {
        self.layers.iter().map(|layer| layer.wanted).sum()
    }

    /// Records that are read, wanted or not.
    pub fn records(&self) -> usize {
        self.slots.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use np_formats::{Dtype, Fingerprint, RecordLayout};
    use proptest::prelude::*;

    const NEURONS: usize = 300;

    fn header() -> NeuronFileHeader {
        let layout = RecordLayout::new(64, Dtype::F16);
        NeuronFileHeader { layers: 4, neurons: NEURONS as u32, layout, fingerprint: Fingerprint(0) }
    }

    fn plan_of(incoming: &Mask, policy: ReadPolicy) -> ReadPlan {
        let slot_of: Vec<i32> = (0..NEURONS as i32).map(|neuron| NEURONS as i32 - neuron).collect();
        let mut plan = ReadPlan::default();
        plan.add_layer(3, incoming, &slot_of, &header(), policy);
        plan
    }

    #[track_caller]
    fn check_ranges(ones: &[u32], bridge_records: u32, records_max: usize, expected: &[(u32, u32)]) {
        let policy = ReadPolicy { bridge_records, range_bytes_max: records_max * header().layout.stride_bytes() };
        let plan = plan_of(&Mask::from_ones(NEURONS, ones), policy);
        let ranges: Vec<_> = plan.ranges().iter().map(|range| (range.first, range.count)).collect();
        assert_eq!(ranges, expected);
    }

    #[test]
    fn runs_become_ranges() {
        check_ranges(&[], 0, 8, &[]);
        check_ranges(&[1, 2, 3, 9], 0, 8, &[(1, 3), (9, 1)]);
        check_ranges(&[1, 2, 3, 9], 5, 16, &[(1, 9)]);
        check_ranges(&[1, 2, 3, 9], 4, 16, &[(1, 3), (9, 1)]);
        check_ranges(&[1, 2, 3, 9], 5, 8, &[(1, 3), (9, 1)]);
        check_ranges(&(0..10).collect::<Vec<_>>(), 0, 4, &[(0, 4), (4, 4), (8, 2)]);
        check_ranges(&[5, 6], 9, 1, &[(5, 1), (6, 1)]);
        check_ranges(&(0..100).collect::<Vec<_>>(), 0, 1_000, &[(0, 64), (64, 36)]);
    }

    #[test]
    fn staging_below_one_record_still_reads_single_records() {
        let plan = plan_of(&Mask::from_ones(NEURONS, &[1, 2]), ReadPolicy::new(1, 0));
        assert_eq!(plan.ranges().iter().map(|range| range.count).collect::<Vec<_>>(), [1, 1]);
    }

    proptest! {
        #[test]
        fn every_wanted_record_is_read_once_into_its_slot(
            ones in proptest::collection::btree_set(0..NEURONS as u32, 0..200),
            bridge_records in 0u32..6,
            records_max in 1usize..70,
        ) {
            let incoming = Mask::from_ones(NEURONS, &ones.iter().copied().collect::<Vec<_>>());
            let range_bytes_max = records_max * header().layout.stride_bytes();
            let plan = plan_of(&incoming, ReadPolicy { bridge_records, range_bytes_max });
            let mut wanted = Vec::new();
            let mut end = 0;
            for range in plan.ranges() {
                prop_assert!(range.first >= end, "ranges ascend and do not meet");
                prop_assert!((1..=records_max.min(RANGE_RECORDS_MAX) as u32).contains(&range.count));
                end = range.first + range.count;
                for (index, &slot) in plan.slots(range).iter().enumerate() {
                    let neuron = range.first + index as u32;
                    if slot != UNWANTED {
                        prop_assert_eq!(slot, NEURONS as i32 - neuron as i32);
                        wanted.push(neuron);
                    }
                }
                prop_assert!(plan.slots(range)[0] != UNWANTED, "a range begins with a wanted record");
                prop_assert!(*plan.slots(range).last().unwrap() != UNWANTED, "and ends with one");
            }
            prop_assert_eq!(&wanted, &ones.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(plan.wanted(), wanted.len());
        }
    }
}
