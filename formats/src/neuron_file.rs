//! The neuron file: every neuron's record, layer after layer.
//!
//! ```text
//! header block, 4,096 bytes | layer 0: M records, zeros up to 4,096 | layer 1 | ...
//! ```

use crate::error::{Result, io_error};
use crate::{AtomicFile, Dtype, Error, Fingerprint, RecordLayout, partial_path, rename_durably};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Bytes of the header; layers begin at multiples of it.
pub const BLOCK_BYTES: u64 = 4096;

const MAGIC: [u8; 8] = *b"NPNEURON";
const VERSION: u16 = 1;
/// Reads back as another number on a machine of the other endianness.
const ENDIANNESS: u16 = 0x0102;
/// Records hold three rows: gate, up and down^T. Other kinds of records get other numbers.
const KIND_THREE_ROWS: u16 = 1;
const HASH_AT: usize = BLOCK_BYTES as usize - 8;

/// What the header states, and where everything lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NeuronFileHeader {
    /// Layers in the file.
    pub layers: u16,
    /// Neurons in each layer.
    pub neurons: u32,
    /// Layout of every record.
    pub layout: RecordLayout,
    /// The preparation that the file belongs to.
    pub fingerprint: Fingerprint,
}

impl NeuronFileHeader {
    /// Bytes from one layer's first record to the next layer's.
    pub fn layer_bytes(&self) -> u64 {
        self.records_bytes().next_multiple_of(BLOCK_BYTES)
    }

    /// Bytes of one layer's records, without the zeros after them.
    pub fn records_bytes(&self) -> u64 {
        u64::from(self.neurons) * self.layout.stride_bytes() as u64
    }

    /// Where a record begins.
    pub fn offset(&self, layer: u16, neuron: u32) -> u64 {
        debug_assert!(layer < self.layers && neuron < self.neurons, "layer {layer}, neuron {neuron}");
        BLOCK_BYTES + u64::from(layer) * self.layer_bytes() + u64::from(neuron) * self.layout.stride_bytes() as u64
    }

    /// Bytes of the whole file.
    pub fn file_bytes(&self) -> u64 {
        BLOCK_BYTES + u64::from(self.layers) * self.layer_bytes()
    }

    /// The header block. All numbers are little-endian:
    /// `magic 0..8 | version 8..10 | endianness 10..12 | dtype 12..14 | record kind 14..16 | layers 16..20 |
    /// hidden 20..24 | neurons 24..28 | stride 28..32 | first layer at 32..40 | layer bytes 40..48 |
    /// fingerprint 48..64 | zero | xxh3-64 of the block before it 4088..4096`.
    pub fn to_block(&self) -> Vec<u8> {
        let mut block = vec![0; BLOCK_BYTES as usize];
        block[0..8].copy_from_slice(&MAGIC);
        block[8..10].copy_from_slice(&VERSION.to_le_bytes());
        block[10..12].copy_from_slice(&ENDIANNESS.to_le_bytes());
        block[12..14].copy_from_slice(&self.layout.dtype().code().to_le_bytes());
        block[14..16].copy_from_slice(&KIND_THREE_ROWS.to_le_bytes());
        block[16..20].copy_from_slice(&u32::from(self.layers).to_le_bytes());
        block[20..24].copy_from_slice(&(self.layout.hidden() as u32).to_le_bytes());
        block[24..28].copy_from_slice(&self.neurons.to_le_bytes());
        block[28..32].copy_from_slice(&(self.layout.stride_bytes() as u32).to_le_bytes());
        block[32..40].copy_from_slice(&BLOCK_BYTES.to_le_bytes());
        block[40..48].copy_from_slice(&self.layer_bytes().to_le_bytes());
        block[48..64].copy_from_slice(&self.fingerprint.0.to_le_bytes());
        let hash = xxh3_64(&block[..HASH_AT]);
        block[HASH_AT..].copy_from_slice(&hash.to_le_bytes());
        block
    }

    /// Reads a header block; the error says what is wrong with it.
    pub fn from_block(block: &[u8]) -> std::result::Result<Self, String> {
        assert_eq!(block.len(), BLOCK_BYTES as usize);
        let u16_at = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
        let u32_at = |at: usize| u32::from_le_bytes(block[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(block[at..at + 8].try_into().expect("eight bytes"));
        if block[0..8] != MAGIC {
            return Err("is not a neuron file".into());
        }
        if u16_at(8) != VERSION {
            return Err(format!("has format version {}, this program reads {VERSION}", u16_at(8)));
        }
        if u64_at(HASH_AT) != xxh3_64(&block[..HASH_AT]) {
            return Err("the header is damaged".into());
        }
        if u16_at(10) != ENDIANNESS {
            return Err("was written on a machine of the other endianness".into());
        }
        if u16_at(14) != KIND_THREE_ROWS {
            return Err(format!("holds records of kind {}, which this program does not know", u16_at(14)));
        }
        let dtype = Dtype::from_code(u16_at(12)).ok_or_else(|| format!("holds unknown dtype {}", u16_at(12)))?;
        let layers = u16::try_from(u32_at(16)).map_err(|_| format!("states {} layers", u32_at(16)))?;
        let header = Self {
            layers,
            neurons: u32_at(24),
            layout: RecordLayout::new(u32_at(20) as usize, dtype),
            fingerprint: Fingerprint(u128::from_le_bytes(block[48..64].try_into().expect("sixteen bytes"))),
        };
        // What follows from the rest must agree with it, so that there is one way to read the file.
        if header.to_block() != block {
            return Err("the header contradicts itself".into());
        }
        Ok(header)
    }
}

/// An open neuron file whose header and length are right.
#[derive(Debug)]
pub struct NeuronFile {
    path: PathBuf,
    file: File,
    header: NeuronFileHeader,
}

impl NeuronFile {
    /// Opens `path` and checks its header and length.
    pub fn open(path: &Path) -> Result<Self> {
        let remedy = "run `np-prep repack` again";
        let file = File::open(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => Error::Missing { path: path.into(), remedy },
            _ => io_error(path, "open")(source),
        })?;
        let actual = file.metadata().map_err(io_error(path, "stat"))?.len();
        if actual < BLOCK_BYTES {
            return Err(Error::Length { path: path.into(), actual, expected: BLOCK_BYTES, remedy });
        }
        let mut block = vec![0; BLOCK_BYTES as usize];
        file.read_exact_at(&mut block, 0).map_err(io_error(path, "read"))?;
        let header = NeuronFileHeader::from_block(&block)
            .map_err(|problem| Error::Header { path: path.into(), problem: format!("{problem}; {remedy}") })?;
        let expected = header.file_bytes();
        if actual != expected {
            return Err(Error::Length { path: path.into(), actual, expected, remedy });
        }
        Ok(Self { path: path.into(), file, header })
    }

    /// The header.
    pub fn header(&self) -> &NeuronFileHeader {
        &self.header
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads consecutive whole records from `first` on; `records` is as long as the records to read. Tags are not
    /// checked.
    pub fn read_records(&self, layer: u16, first: u32, records: &mut [u8]) -> Result<()> {
        let at = self.header.offset(layer, first);
        self.file.read_exact_at(records, at).map_err(io_error(&self.path, "read"))
    }

    /// Checks every bit of one layer: all records, and the zeros after them. Returns the hash of the layer.
    pub fn verify_layer(&self, layer: u16) -> Result<Fingerprint> {
        let stride_bytes = self.header.layout.stride_bytes();
        let batch = ((4 << 20) / stride_bytes).max(1) as u32;
        let mut buffer = Vec::new();
        let mut hash = LayerHash::default();
        for first in (0..self.header.neurons).step_by(batch as usize) {
            let count = batch.min(self.header.neurons - first);
            buffer.resize(count as usize * stride_bytes, 0);
            self.read_records(layer, first, &mut buffer)?;
            for (index, record) in buffer.chunks_exact(stride_bytes).enumerate() {
                let neuron = first + index as u32;
                let payload = self.header.layout.verify(layer, neuron, record);
                hash.add(payload.map_err(|fault| self.record_error(layer, neuron, fault))?);
            }
        }
        self.verify_gap(layer)?;
        Ok(hash.finish())
    }

    /// The error for a fault in one record.
    pub fn record_error(&self, layer: u16, neuron: u32, fault: crate::RecordFault) -> Error {
        let offset = self.header.offset(layer, neuron);
        Error::Record { path: self.path.clone(), layer, neuron, offset, fault }
    }

    fn verify_gap(&self, layer: u16) -> Result<()> {
        let gap_at = self.header.offset(layer, 0) + self.header.records_bytes();
        let mut gap = vec![0; (self.header.layer_bytes() - self.header.records_bytes()) as usize];
        self.file.read_exact_at(&mut gap, gap_at).map_err(io_error(&self.path, "read"))?;
        match gap.iter().position(|&byte| byte != 0) {
            Some(at) => Err(Error::Gap {
                path: self.path.clone(),
                offset: gap_at + at as u64,
                problem: "a byte between two layers is not zero",
            }),
            None => Ok(()),
        }
    }
}

/// Hash of a layer's content: xxh3-128 over its records' payload hashes, in order.
#[derive(Default)]
pub struct LayerHash(Xxh3);

impl LayerHash {
    /// Adds the payload hash of the next record.
    pub fn add(&mut self, payload_xxh3: u64) {
        self.0.update(&payload_xxh3.to_le_bytes());
    }

    /// The layer's hash.
    pub fn finish(&self) -> Fingerprint {
        Fingerprint(self.0.digest128())
    }
}

/// Which layers of a partial neuron file are durable.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Progress {
    source: Fingerprint,
    layer_hashes: Vec<Fingerprint>,
}

/// Writes a neuron file layer by layer, and goes on where an earlier run was killed.
///
/// The bytes lie in `neurons.bin.partial`, and what is durable is noted in `neurons.bin.progress`.
pub struct NeuronFileWriter {
    path: PathBuf,
    file: File,
    header: NeuronFileHeader,
    progress: Progress,
    hash: LayerHash,
    next: u32,
}

impl NeuronFileWriter {
    /// Starts `path`, or goes on with what an earlier run left there if that was made from the same `source` and has
    /// the same shape. The fingerprint in `header` is set by [`NeuronFileWriter::finish`].
    pub fn resume(path: &Path, header: NeuronFileHeader, source: Fingerprint) -> Result<Self> {
        let partial = partial_path(path);
        let earlier = fs::read(progress_path(path)).ok();
        let earlier = earlier.and_then(|text| serde_json::from_slice::<Progress>(&text).ok());
        let whole = fs::metadata(&partial).is_ok_and(|data| data.len() == header.file_bytes());
        let fitting = earlier.filter(|progress| {
            whole && progress.source == source && progress.layer_hashes.len() <= usize::from(header.layers)
        });
        let open = OpenOptions::new().create(true).truncate(fitting.is_none()).read(true).write(true).open(&partial);
        let file = open.map_err(io_error(&partial, "create"))?;
        file.set_len(header.file_bytes()).map_err(io_error(&partial, "resize"))?;
        let progress = fitting.unwrap_or(Progress { source, layer_hashes: Vec::new() });
        Ok(Self { path: path.into(), file, header, progress, hash: LayerHash::default(), next: 0 })
    }

    /// The layer that comes next: all before it are whole.
    pub fn next_layer(&self) -> u16 {
        self.progress.layer_hashes.len() as u16
    }

    /// Seals and writes the next records of the current layer. `records` holds whole records whose payloads are in
    /// place.
    pub fn write(&mut self, records: &mut [u8]) -> Result<()> {
        let layout = self.header.layout;
        let at = self.header.offset(self.next_layer(), self.next);
        for record in records.chunks_exact_mut(layout.stride_bytes()) {
            assert!(self.next < self.header.neurons, "more records than neurons");
            self.hash.add(layout.seal(self.next_layer(), self.next, record));
            self.next += 1;
        }
        self.file.write_all_at(records, at).map_err(io_error(&self.path, "write"))
    }

    /// Makes the current layer durable and goes on to the next.
    pub fn finish_layer(&mut self) -> Result<()> {
        assert_eq!(self.next, self.header.neurons, "the layer is not whole");
        self.file.sync_data().map_err(io_error(&self.path, "sync"))?;
        self.progress.layer_hashes.push(std::mem::take(&mut self.hash).finish());
        self.next = 0;
        let text = serde_json::to_vec(&self.progress).expect("hashes become JSON");
        AtomicFile::write(&progress_path(&self.path), &text)
    }

    /// Hashes of the layers written so far.
    pub fn layer_hashes(&self) -> &[Fingerprint] {
        &self.progress.layer_hashes
    }

    /// Writes the header and gives the file its name.
    pub fn finish(mut self, fingerprint: Fingerprint) -> Result<()> {
        assert_eq!(self.next_layer(), self.header.layers, "a layer is missing");
        self.header.fingerprint = fingerprint;
        self.file.write_all_at(&self.header.to_block(), 0).map_err(io_error(&self.path, "write"))?;
        self.file.sync_all().map_err(io_error(&self.path, "sync"))?;
        rename_durably(&partial_path(&self.path), &self.path)?;
        let progress = progress_path(&self.path);
        fs::remove_file(&progress).map_err(io_error(&progress, "remove"))
    }
}

fn progress_path(path: &Path) -> PathBuf {
    path.with_extension("progress")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: Fingerprint = Fingerprint(1);

    fn header() -> NeuronFileHeader {
        let layout = RecordLayout::new(72, Dtype::Bf16);
        NeuronFileHeader { layers: 12, neurons: 11, layout, fingerprint: Fingerprint(0xabc) }
    }

    fn write_layer(writer: &mut NeuronFileWriter) {
        let layer = writer.next_layer() as usize;
        let stride_bytes = writer.header.layout.stride_bytes();
        let mut bytes: Vec<u8> = (0..11 * stride_bytes).map(|at| (at * 31 + layer * 7) as u8).collect();
        let (some, rest) = bytes.split_at_mut(3 * stride_bytes);
        writer.write(some).unwrap();
        writer.write(rest).unwrap();
        writer.finish_layer().unwrap();
    }

    fn write(path: &Path) {
        let mut writer = NeuronFileWriter::resume(path, header(), SOURCE).unwrap();
        while writer.next_layer() < 12 {
            write_layer(&mut writer);
        }
        writer.finish(header().fingerprint).unwrap();
    }

    #[test]
    fn offsets() {
        let layout = RecordLayout::new(4096, Dtype::F16);
        let mistral = NeuronFileHeader { layers: 32, neurons: 14_336, layout, fingerprint: Fingerprint(0) };
        assert_eq!(mistral.offset(0, 0), 4_096);
        assert_eq!(mistral.offset(0, 1), 4_096 + 25_088);
        assert_eq!(mistral.offset(1, 0), 4_096 + 14_336 * 25_088);
        assert_eq!(mistral.file_bytes(), 11_509_174_272);
        let small = header();
        assert_eq!((small.layout.stride_bytes(), small.layer_bytes()), (512, 8_192));
    }

    #[test]
    fn golden_header() {
        let block = header().to_block();
        assert_eq!(&block[..32], b"NPNEURON\x01\0\x02\x01\x02\0\x01\0\x0c\0\0\0\x48\0\0\0\x0b\0\0\0\0\x02\0\0");
        assert_eq!(&block[32..50], b"\0\x10\0\0\0\0\0\0\0\x20\0\0\0\0\0\0\xbc\x0a");
        assert_eq!(NeuronFileHeader::from_block(&block), Ok(header()));
    }

    #[test]
    fn every_flipped_header_bit_is_found() {
        let mut block = header().to_block();
        for bit in 0..block.len() * 8 {
            block[bit / 8] ^= 1 << (bit % 8);
            assert!(NeuronFileHeader::from_block(&block).is_err(), "bit {bit}");
            block[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn what_was_written_verifies_and_a_flipped_bit_anywhere_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("neurons.bin");
        write(&path);
        let verify = || (0..12).try_for_each(|layer| NeuronFile::open(&path)?.verify_layer(layer).map(drop));
        verify().unwrap();
        let whole = fs::read(&path).unwrap();
        for at in (4_096..whole.len()).step_by(37) {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            fs::write(&path, &bytes).unwrap();
            assert!(verify().is_err(), "byte {at}");
        }
    }

    #[test]
    fn lengths_and_names_are_checked_when_opened() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("neurons.bin");
        assert!(matches!(NeuronFile::open(&path), Err(Error::Missing { .. })));
        write(&path);
        let whole = fs::read(&path).unwrap();
        for length in [0, 100, 4_096, whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            assert!(matches!(NeuronFile::open(&path), Err(Error::Length { .. })), "{length}");
        }
        fs::write(&path, vec![7; whole.len()]).unwrap();
        assert!(matches!(NeuronFile::open(&path), Err(Error::Header { .. })));
    }

    #[test]
    fn an_interrupted_write_goes_on_and_ends_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let (undisturbed, path) = (directory.path().join("a.bin"), directory.path().join("b.bin"));
        write(&undisturbed);
        let mut writer = NeuronFileWriter::resume(&path, header(), SOURCE).unwrap();
        (0..5).for_each(|_| write_layer(&mut writer));
        writer.write(&mut vec![1; 512]).unwrap();
        drop(writer);
        assert_eq!(NeuronFileWriter::resume(&path, header(), SOURCE).unwrap().next_layer(), 5);
        write(&path);
        assert_eq!(fs::read(&path).unwrap(), fs::read(&undisturbed).unwrap());
        assert!(!progress_path(&path).exists() && !partial_path(&path).exists());
    }

    #[test]
    fn a_partial_file_of_another_source_is_not_continued() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("neurons.bin");
        let mut writer = NeuronFileWriter::resume(&path, header(), SOURCE).unwrap();
        write_layer(&mut writer);
        drop(writer);
        assert_eq!(NeuronFileWriter::resume(&path, header(), Fingerprint(2)).unwrap().next_layer(), 0);
    }
}
