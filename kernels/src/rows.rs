//! Slots: memory for whole records.

use crate::{Pages, Result};
use np_formats::RecordLayout;

/// A number of slots, each with room for one whole record, [`RecordLayout::stride_bytes`] apart.
///
/// The rows of a record are used where they lie, so a reader puts a record into its slot and nothing is copied.
#[derive(Debug)]
pub struct Rows {
    layout: RecordLayout,
    pages: Pages,
    slots: usize,
}

impl Rows {
    /// `slots` empty (zeroed) slots.
    pub fn new(layout: RecordLayout, slots: usize) -> Result<Self> {
        Ok(Self { layout, pages: Pages::new(layout.stride_bytes().saturating_mul(slots))?, slots })
    }

    /// Layout of each record.
    pub fn layout(&self) -> RecordLayout {
        self.layout
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// The record in `slot`, tag included.
    pub fn record(&self, slot: usize) -> &[u8] {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        let stride = self.layout.stride_bytes();
        &self.pages[slot * stride..][..stride]
    }

    /// The record in `slot`, to be written.
    pub fn record_mut(&mut self, slot: usize) -> &mut [u8] {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        let stride = self.layout.stride_bytes();
        &mut self.pages[slot * stride..][..stride]
    }

    /// First byte of `slot`, for a reader that lets the kernel write a record there. Slots are contiguous, so a run of
    /// slots is one range of memory. 512-byte aligned.
    pub fn record_ptr(&mut self, slot: usize) -> *mut u8 {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        self.pages.as_mut_ptr().wrapping_add(slot * self.layout.stride_bytes())
    }

    /// All slots as bytes, to be written: a run of records read in one go.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use np_formats::Dtype;

    #[test]
    fn slots_are_whole_records_apart() {
        let layout = RecordLayout::new(72, Dtype::F16);
        let mut rows = Rows::new(layout, 3).unwrap();
        layout.seal(1, 5, rows.record_mut(2));
        assert!(layout.verify(1, 5, rows.record(2)).is_ok());
        assert!(layout.verify(1, 5, rows.record(1)).is_err());
        assert_eq!(rows.record_ptr(2).addr() - rows.record_ptr(0).addr(), 2 * layout.stride_bytes());
        assert_eq!(rows.bytes_mut().len(), 3 * layout.stride_bytes());
        assert_eq!((rows.slots(), rows.layout()), (3, layout));
    }

    #[test]
    #[should_panic(expected = "slot 3 of 3")]
    fn a_slot_beyond_the_last_is_a_bug() {
        Rows::new(RecordLayout::new(72, Dtype::F16), 3).unwrap().record(3);
    }
}
