//! The gate, up and down^T rows of one neuron, side by side on disk.

use crate::Dtype;
use xxhash_rust::xxh3::xxh3_64;

/// Records begin at multiples of this, the smallest block of any drive in use.
pub const RECORD_ALIGN_BYTES: usize = 512;
/// The tag fills the record's last bytes.
pub const TAG_BYTES: usize = 64;
/// Rows in a record: gate, up and down^T.
pub const RECORD_ROWS: usize = 3;

const TAG_MAGIC: [u8; 8] = *b"NPRECORD";
const TAG_VERSION: u16 = 1;

/// Where the parts of a record lie: `gate row | up row | down^T row | zero padding | tag`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordLayout {
    hidden: usize,
    dtype: Dtype,
}

// The paper gives 24.5 KiB for Mistral-7B: 24,576 bytes of rows, and room for the tag.
const _: () = assert!(RecordLayout::new(4096, Dtype::F16).stride_bytes() == 25_088);
const _: () = assert!(RecordLayout::new(576, Dtype::F16).stride_bytes() == 3_584);

impl RecordLayout {
    /// The layout for rows of `hidden` values of `dtype`.
    pub const fn new(hidden: usize, dtype: Dtype) -> Self {
        Self { hidden, dtype }
    }

    /// Values in a row.
    pub const fn hidden(&self) -> usize {
        self.hidden
    }

    /// Type of the values.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Bytes of one row.
    pub const fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.bytes()
    }

    /// Bytes of the rows together.
    pub const fn payload_bytes(&self) -> usize {
        RECORD_ROWS * self.row_bytes()
    }

    /// Bytes from one record to the next.
    pub const fn stride_bytes(&self) -> usize {
        (self.payload_bytes() + TAG_BYTES).div_ceil(RECORD_ALIGN_BYTES) * RECORD_ALIGN_BYTES
    }

    /// Where the tag begins. The tag comes last: a read that stops short lacks it and can't pass for a whole record.
    pub const fn tag_offset(&self) -> usize {
        self.stride_bytes() - TAG_BYTES
    }

    /// Completes `record`, whose payload is in place: zero padding, then the tag. Returns the payload's hash.
    pub fn seal(&self, layer: u16, neuron: u32, record: &mut [u8]) -> u64 {
        assert_eq!(record.len(), self.stride_bytes());
        let (payload, rest) = record.split_at_mut(self.payload_bytes());
        let payload_xxh3 = xxh3_64(payload);
        let tag_at = rest.len() - TAG_BYTES;
        rest[..tag_at].fill(0);
        let tag = Tag { dtype: self.dtype, layer, neuron, payload_bytes: self.payload_bytes() as u32, payload_xxh3 };
        rest[tag_at..].copy_from_slice(&tag.to_bytes());
        payload_xxh3
    }

    /// Checks that `record` is whole and belongs to `layer` and `neuron`; the payload itself is not hashed.
    pub fn check_tag(&self, layer: u16, neuron: u32, record: &[u8]) -> Result<Tag, RecordFault> {
        assert_eq!(record.len(), self.stride_bytes());
        let bytes = record[self.tag_offset()..].try_into().expect("a tag's length");
        let tag = Tag::from_bytes(bytes)?;
        if tag.dtype != self.dtype || tag.payload_bytes as usize != self.payload_bytes() {
            return Err(RecordFault::Layout);
        }
        if (tag.layer, tag.neuron) != (layer, neuron) {
            return Err(RecordFault::Misplaced { found_layer: tag.layer, found_neuron: tag.neuron });
        }
        Ok(tag)
    }

    /// Checks every bit of `record`: the tag, the payload's hash and the padding.
    pub fn verify(&self, layer: u16, neuron: u32, record: &[u8]) -> Result<u64, RecordFault> {
        let tag = self.check_tag(layer, neuron, record)?;
        if xxh3_64(&record[..self.payload_bytes()]) != tag.payload_xxh3 {
            return Err(RecordFault::Payload);
        }
        if record[self.payload_bytes()..self.tag_offset()].iter().any(|&byte| byte != 0) {
            return Err(RecordFault::Padding);
        }
        Ok(tag.payload_xxh3)
    }
}

/// The last 64 bytes of a record: what it is and whose.
///
/// `magic 0..8 | version 8..10 | dtype 10..12 | layer 12..14 | zero 14..16 | neuron 16..20 | payload bytes 20..24 |
/// xxh3-64 of the payload 24..32 | zero 32..64`, all little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tag {
    /// Type of the rows' values.
    pub dtype: Dtype,
    /// Layer of the neuron.
    pub layer: u16,
    /// Neuron within the layer.
    pub neuron: u32,
    /// Bytes of the three rows.
    pub payload_bytes: u32,
    /// xxh3-64 of the three rows.
    pub payload_xxh3: u64,
}

/// What is wrong with the bytes of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RecordFault {
    /// The tag does not start with its magic: the record is cut, zeroed, or not a record.
    #[error("the tag is missing")]
    NoTag,
    /// The tag is of another format version.
    #[error("the tag has version {0}, expected {TAG_VERSION}")]
    Version(u16),
    /// The tag is of another dtype or payload size than the file's header states.
    #[error("the tag has another dtype or size than the file's header")]
    Layout,
    /// A byte of the tag that must be zero is not.
    #[error("a reserved byte of the tag is not zero")]
    Reserved,
    /// The record is whole but belongs elsewhere.
    #[error("the record belongs to layer {found_layer}, neuron {found_neuron}")]
    Misplaced {
        /// Layer in the tag.
        found_layer: u16,
        /// Neuron in the tag.
        found_neuron: u32,
    },
    /// The rows do not have the hash that the tag states.
    #[error("the rows do not match the tag's hash")]
    Payload,
    /// A byte between the rows and the tag is not zero.
    #[error("a padding byte is not zero")]
    Padding,
}

impl Tag {
    /// The tag as bytes.
    pub fn to_bytes(&self) -> [u8; TAG_BYTES] {
        let mut bytes = [0; TAG_BYTES];
        bytes[0..8].copy_from_slice(&TAG_MAGIC);
        bytes[8..10].copy_from_slice(&TAG_VERSION.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.dtype.code().to_le_bytes());
        bytes[12..14].copy_from_slice(&self.layer.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.neuron.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.payload_xxh3.to_le_bytes());
        bytes
    }

    /// The tag in these bytes.
    pub fn from_bytes(bytes: &[u8; TAG_BYTES]) -> Result<Self, RecordFault> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        if bytes[0..8] != TAG_MAGIC {
            return Err(RecordFault::NoTag);
        }
        if u16_at(8) != TAG_VERSION {
            return Err(RecordFault::Version(u16_at(8)));
        }
        if u16_at(14) != 0 || bytes[32..].iter().any(|&byte| byte != 0) {
            return Err(RecordFault::Reserved);
        }
        Ok(Self {
            dtype: Dtype::from_code(u16_at(10)).ok_or(RecordFault::Layout)?,
            layer: u16_at(12),
            neuron: u32_at(16),
            payload_bytes: u32_at(20),
            payload_xxh3: u64::from_le_bytes(bytes[24..32].try_into().expect("eight bytes")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(layout: RecordLayout) -> Vec<u8> {
        let mut record: Vec<u8> = (0..layout.stride_bytes()).map(|index| (index % 251) as u8).collect();
        layout.seal(7, 1_234, &mut record);
        record
    }

    #[test]
    fn sizes() {
        let check = |hidden, dtype, payload, stride| {
            let layout = RecordLayout::new(hidden, dtype);
            assert_eq!((layout.payload_bytes(), layout.stride_bytes()), (payload, stride));
        };
        check(4096, Dtype::F16, 24_576, 25_088);
        check(4096, Dtype::Bf16, 24_576, 25_088);
        check(576, Dtype::F16, 3_456, 3_584);
        check(896, Dtype::F16, 5_376, 5_632);
        check(64, Dtype::F16, 384, 512);
    }

    #[test]
    fn golden_tag() {
        let tag = Tag { dtype: Dtype::Bf16, layer: 0x0102, neuron: 0x03040506, payload_bytes: 24_576, payload_xxh3: 9 };
        let mut expected = *b"NPRECORD\x01\0\x02\0\x02\x01\0\0\x06\x05\x04\x03\0\x60\0\0\x09\0\0\0\0\0\0\0\
            \0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        assert_eq!(tag.to_bytes(), expected);
        assert_eq!(Tag::from_bytes(&expected), Ok(tag));
        expected[8] = 2;
        assert_eq!(Tag::from_bytes(&expected), Err(RecordFault::Version(2)));
    }

    #[test]
    fn a_record_of_another_place_is_named() {
        let layout = RecordLayout::new(64, Dtype::F16);
        let record = sealed(layout);
        assert!(layout.verify(7, 1_234, &record).is_ok());
        let fault = RecordFault::Misplaced { found_layer: 7, found_neuron: 1_234 };
        assert_eq!(layout.check_tag(7, 1_235, &record).unwrap_err(), fault);
        assert_eq!(layout.check_tag(6, 1_234, &record).unwrap_err(), fault);
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let layout = RecordLayout::new(72, Dtype::F16);
        let mut record = sealed(layout);
        for bit in 0..record.len() * 8 {
            record[bit / 8] ^= 1 << (bit % 8);
            assert!(layout.verify(7, 1_234, &record).is_err(), "bit {bit}");
            record[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn a_cut_record_lacks_its_tag() {
        let layout = RecordLayout::new(64, Dtype::F16);
        let mut record = sealed(layout);
        record[layout.tag_offset()..].fill(0);
        assert_eq!(layout.check_tag(7, 1_234, &record), Err(RecordFault::NoTag));
    }
}
