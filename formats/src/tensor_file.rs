//! Safetensors files, read and written a piece at a time.

use crate::error::{Result, io_error};
use crate::{AtomicFile, Error, Fingerprint};
use safetensors::Dtype as TensorDtype;
use safetensors::tensor::Metadata;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Longest header that is read, as the safetensors library has it.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

const PARENT_KEY: &str = "np.parent";
const CHECKSUM_KEY: &str = "np.checksum";
const NO_CHECKSUM: &str = "00000000000000000000000000000000";
const REMEDY_REMAKE: &str = "make it again with the command that wrote it";
const REMEDY_FETCH: &str = "fetch it again";
const PIECE_BYTES: usize = 4 << 20;

/// Type and place of one tensor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Type of its values.
    pub dtype: TensorDtype,
    /// Its shape, outermost first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// A tensor called `name`.
    pub fn new(name: impl Into<String>, dtype: TensorDtype, shape: &[usize]) -> Self {
        Self { name: name.into(), dtype, shape: shape.to_vec() }
    }

    /// Bytes of the tensor. Panics on types smaller than a byte, which we never write.
    pub fn bytes(&self) -> usize {
        assert!(self.dtype.bitsize().is_multiple_of(8), "{:?} is smaller than a byte", self.dtype);
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// An open safetensors file. Tensors are read by position; nothing is mapped, so a file that shrinks gives an error
/// and not a signal.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    data_at: u64,
    metadata: Metadata,
    checksum_at: Option<u64>,
}

impl TensorFile {
    /// Opens any safetensors file and checks that its length is what its header says.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => Error::Missing { path: path.into(), remedy: "check the directory" },
            _ => io_error(path, "open")(source),
        })?;
        let actual = file.metadata().map_err(io_error(path, "stat"))?.len();
        let short = |expected| Error::Length { path: path.into(), actual, expected, remedy: REMEDY_FETCH };
        if actual < 8 {
            return Err(short(8));
        }
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(io_error(path, "read"))?;
        if length == *b"version " {
            let problem = "is a Git LFS pointer, not the tensors; run `git lfs pull` where it came from".into();
            return Err(Error::Header { path: path.into(), problem });
        }
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > HEADER_BYTES_MAX {
            let problem = format!("a header of {header_bytes} bytes: not a safetensors file, or damaged");
            return Err(Error::Header { path: path.into(), problem });
        }
        if actual < 8 + header_bytes {
            return Err(short(8 + header_bytes));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact_at(&mut header, 8).map_err(io_error(path, "read"))?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|source| Error::Header { path: path.into(), problem: format!("bad header: {source}") })?;
        let expected = 8 + header_bytes + metadata.data_len() as u64;
        if actual != expected {
            return Err(short(expected));
        }
        let checksum = metadata.metadata().as_ref().and_then(|extra| extra.get(CHECKSUM_KEY));
        let checksum_at = checksum.and_then(|text| find(&header, text.as_bytes())).map(|at| 8 + at as u64);
        Ok(Self { path: path.into(), file, data_at: 8 + header_bytes, metadata, checksum_at })
    }

    /// Opens a file that [`TensorFileWriter`] wrote, and checks that it was made from `parent`.
    pub fn open_made_from(path: &Path, parent: Fingerprint) -> Result<Self> {
        let opened = Self::open(path)?;
        let found = opened.extra(PARENT_KEY).unwrap_or("nothing known").to_string();
        if found != parent.to_string() {
            let remedy = REMEDY_REMAKE;
            return Err(Error::Foreign { path: path.into(), found, expected: parent.to_string(), remedy });
        }
        Ok(opened)
    }

    /// Compares every byte with the checksum written with the file.
    pub fn verify(&self) -> Result<()> {
        let damaged = || Error::Checksum { path: self.path.clone(), remedy: REMEDY_REMAKE };
        let stated: Fingerprint = self.extra(CHECKSUM_KEY).and_then(|text| text.parse().ok()).ok_or_else(damaged)?;
        let checksum_at = self.checksum_at.ok_or_else(damaged)? as usize;
        let mut hasher = Xxh3::new();
        let mut piece = vec![0; self.data_at as usize];
        self.file.read_exact_at(&mut piece, 0).map_err(io_error(&self.path, "read"))?;
        piece[checksum_at..checksum_at + NO_CHECKSUM.len()].copy_from_slice(NO_CHECKSUM.as_bytes());
        hasher.update(&piece);
        let end = self.data_at + self.metadata.data_len() as u64;
        let mut at = self.data_at;
        while at < end {
            piece.resize(PIECE_BYTES.min((end - at) as usize), 0);
            self.file.read_exact_at(&mut piece, at).map_err(io_error(&self.path, "read"))?;
            hasher.update(&piece);
            at += piece.len() as u64;
        }
        if Fingerprint(hasher.digest128()) == stated { Ok(()) } else { Err(damaged()) }
    }

    /// The checksum written with the file.
    pub fn checksum(&self) -> Option<Fingerprint> {
        self.extra(CHECKSUM_KEY)?.parse().ok()
    }

    /// What it was made from.
    pub fn parent(&self) -> Option<Fingerprint> {
        self.extra(PARENT_KEY)?.parse().ok()
    }

    /// A value of the header's free-form section.
    pub fn extra(&self, key: &str) -> Option<&str> {
        self.metadata.metadata().as_ref()?.get(key).map(String::as_str)
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names, in file order.
    pub fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    /// Type and shape of a tensor, if it is there.
    pub fn spec(&self, name: &str) -> Option<TensorSpec> {
        self.metadata.info(name).map(|info| TensorSpec::new(name, info.dtype, &info.shape))
    }

    /// Checks that a tensor is there with this type and shape.
    pub fn expect(&self, name: &str, dtype: TensorDtype, shape: &[usize]) -> Result<()> {
        let wrong = |problem| Error::Tensor { path: self.path.clone(), tensor: name.into(), problem };
        let spec = self.spec(name).ok_or_else(|| wrong("is missing".into()))?;
        if spec.dtype == dtype && spec.shape == shape {
            return Ok(());
        }
        Err(wrong(format!("is {:?} {:?}, expected {dtype:?} {shape:?}", spec.dtype, spec.shape)))
    }

    /// Reads `bytes.len()` bytes of a tensor from its byte `from` on.
    pub fn read_at(&self, name: &str, from: u64, bytes: &mut [u8]) -> Result<()> {
        let info = self.metadata.info(name).ok_or_else(|| Error::Tensor {
            path: self.path.clone(),
            tensor: name.into(),
            problem: "is missing".into(),
        })?;
        let (start, end) = info.data_offsets;
        let within = from + bytes.len() as u64 <= (end - start) as u64;
        assert!(within, "{name}: bytes {from}+{} of {}", bytes.len(), end - start);
        let at = self.data_at + start as u64 + from;
        self.file.read_exact_at(bytes, at).map_err(io_error(&self.path, "read"))
    }

    /// Reads a whole tensor of this type and shape.
    pub fn read<T: bytemuck::Pod>(&self, name: &str, dtype: TensorDtype, shape: &[usize]) -> Result<Vec<T>> {
        self.expect(name, dtype, shape)?;
        assert_eq!(dtype.bitsize(), 8 * size_of::<T>(), "{name}: {dtype:?} read as another size");
        let mut values = vec![T::zeroed(); shape.iter().product()];
        self.read_at(name, 0, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}

/// Writes a safetensors file tensor by tensor, with its parent and a checksum over all of it in its header.
///
/// The checksum is xxh3-128 of the whole file with the checksum's own digits set to zero.
pub struct TensorFileWriter {
    file: AtomicFile,
    path: PathBuf,
    specs: Vec<TensorSpec>,
    tensor: usize,
    written_bytes: usize,
    checksum_at: u64,
    hasher: Xxh3,
}

impl TensorFileWriter {
    /// Starts `path`, which will hold `specs` in this order. `extra` goes into the header's free-form section.
    pub fn create(path: &Path, parent: Fingerprint, extra: &[(&str, String)], specs: Vec<TensorSpec>) -> Result<Self> {
        let header = header(parent, extra, &specs);
        let marker = format!("\"{CHECKSUM_KEY}\":\"");
        let checksum_at = find(&header, marker.as_bytes()).expect("the header names the checksum") + marker.len();
        let mut file = AtomicFile::create(path)?;
        let length = (header.len() as u64).to_le_bytes();
        file.write_all(&length).and_then(|()| file.write_all(&header)).map_err(io_error(path, "write"))?;
        let mut hasher = Xxh3::new();
        hasher.update(&length);
        hasher.update(&header);
        let checksum_at = 8 + checksum_at as u64;
        let mut writer = Self { file, path: path.into(), specs, tensor: 0, written_bytes: 0, checksum_at, hasher };
        writer.skip_whole();
        Ok(writer)
    }

    /// Writes the next bytes of tensor `name`. Tensors come in the order of the specs, each in one or more pieces.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let spec = self.specs.get(self.tensor).expect("no tensor is left to write");
        assert_eq!(spec.name, name, "tensors are written in the order of the specs");
        assert!(self.written_bytes + bytes.len() <= spec.bytes(), "{name} is longer than its spec");
        self.file.write_all(bytes).map_err(io_error(&self.path, "write"))?;
        self.hasher.update(bytes);
        self.written_bytes += bytes.len();
        self.skip_whole();
        Ok(())
    }

    /// Writes a whole tensor from values.
    pub fn write_values<T: bytemuck::Pod>(&mut self, name: &str, values: &[T]) -> Result<()> {
        self.write(name, bytemuck::cast_slice(values))
    }

    /// Completes the header and gives the file its name. Panics when a tensor is not whole.
    pub fn finish(self) -> Result<Fingerprint> {
        assert_eq!(self.tensor, self.specs.len(), "a tensor is not whole");
        let checksum = Fingerprint(self.hasher.digest128());
        let digits = checksum.to_string();
        let put = self.file.file().write_all_at(digits.as_bytes(), self.checksum_at);
        put.map_err(io_error(&self.path, "write"))?;
        self.file.commit()?;
        Ok(checksum)
    }

    fn skip_whole(&mut self) {
        while self.specs.get(self.tensor).is_some_and(|spec| spec.bytes() == self.written_bytes) {
            self.tensor += 1;
            self.written_bytes = 0;
        }
    }
}

/// The JSON header, padded with spaces so that the data begins 64-byte aligned.
fn header(parent: Fingerprint, extra: &[(&str, String)], specs: &[TensorSpec]) -> Vec<u8> {
    let mut fields = serde_json::Map::new();
    let mut notes = serde_json::Map::new();
    notes.insert(PARENT_KEY.into(), parent.to_string().into());
    notes.insert(CHECKSUM_KEY.into(), NO_CHECKSUM.into());
    for (key, value) in extra {
        notes.insert((*key).into(), value.clone().into());
    }
    fields.insert("__metadata__".into(), notes.into());
    let mut offset = 0;
    for spec in specs {
        let end = offset + spec.bytes();
        let entry = serde_json::json!({
            "dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offset, end],
        });
        let previous = fields.insert(spec.name.clone(), entry);
        assert!(previous.is_none(), "tensor {} is named twice", spec.name);
        offset = end;
    }
    let mut text = serde_json::to_vec(&fields).expect("strings and numbers become JSON");
    text.resize((text.len() + 8).next_multiple_of(64) - 8, b' ');
    text
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const PARENT: Fingerprint = Fingerprint(7);

    fn written() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("t.safetensors");
        let specs = vec![
            TensorSpec::new("a", TensorDtype::F32, &[2, 2]),
            TensorSpec::new("empty", TensorDtype::U8, &[0]),
            TensorSpec::new("b", TensorDtype::U64, &[1]),
        ];
        let mut writer = TensorFileWriter::create(&path, PARENT, &[("k", "0.5".into())], specs).unwrap();
        writer.write_values("a", &[1f32, 2.0]).unwrap();
        writer.write_values("a", &[3f32, 4.0]).unwrap();
        writer.write_values("b", &[9u64]).unwrap();
        writer.finish().unwrap();
        (directory, path)
    }

    #[test]
    fn what_was_written_is_read() {
        let (_directory, path) = written();
        let file = TensorFile::open_made_from(&path, PARENT).unwrap();
        file.verify().unwrap();
        assert_eq!(file.read::<f32>("a", TensorDtype::F32, &[2, 2]).unwrap(), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(file.read::<u64>("b", TensorDtype::U64, &[1]).unwrap(), [9]);
        assert_eq!(file.extra("k"), Some("0.5"));
        // The library agrees on what the bytes mean.
        let bytes = fs::read(&path).unwrap();
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(theirs.tensor("b").unwrap().data(), 9u64.to_le_bytes());
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let (_directory, path) = written();
        let whole = fs::read(&path).unwrap();
        for bit in 0..whole.len() * 8 {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &bytes).unwrap();
            let found = TensorFile::open_made_from(&path, PARENT).and_then(|file| file.verify());
            assert!(found.is_err(), "bit {bit}");
        }
    }

    #[test]
    fn every_cut_is_found() {
        let (_directory, path) = written();
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let message = TensorFile::open(&path).unwrap_err().to_string();
            assert!(message.contains("t.safetensors"), "{length}: {message}");
        }
    }

    #[track_caller]
    fn check_refused(bytes: &[u8], words: &str) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("t.safetensors");
        fs::write(&path, bytes).unwrap();
        let message = TensorFile::open(&path).unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
    }

    #[test]
    fn bad_headers_are_refused_before_anything_is_allocated() {
        check_refused(&[0xff; 64], "header");
        check_refused(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull");
        check_refused(&[4, 0, 0, 0, 0, 0, 0, 0, b'n', b'o', b'p', b'e'], "bad header");
    }

    #[test]
    fn another_parent_is_refused_by_name() {
        let (_directory, path) = written();
        let message = TensorFile::open_made_from(&path, Fingerprint(8)).unwrap_err().to_string();
        assert!(message.contains(&PARENT.to_string()) && message.contains("t.safetensors"), "{message}");
    }
}
