//! Writes `model.safetensors` of a checkpoint directory, tensor by tensor.

use crate::error::{Result, io_error};
use crate::locate::TENSORS_NAME;
use crate::provenance::hex;
use np_formats::{AtomicFile, TensorSpec};
use serde_json::{Map, json};
use sha2::{Digest, Sha256};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// A `model.safetensors` in the making. Its header is the plain one that other programs write, so that the same tensors
/// give the same bytes wherever they were written.
pub struct CheckpointWriter {
    path: PathBuf,
    file: BufWriter<AtomicFile>,
    hasher: Sha256,
    left_bytes: u64,
}

impl CheckpointWriter {
    /// Starts the file in `directory`; `specs` are its tensors in file order.
    pub fn create(directory: &Path, specs: &[TensorSpec]) -> Result<Self> {
        let path = directory.join(TENSORS_NAME);
        let file = BufWriter::with_capacity(1 << 20, AtomicFile::create(&path)?);
        let left_bytes = specs.iter().map(|spec| spec.bytes() as u64).sum();
        let mut writer = Self { path, file, hasher: Sha256::new(), left_bytes };
        let header = header(specs);
        writer.put(&(header.len() as u64).to_le_bytes())?;
        writer.put(&header)?;
        Ok(writer)
    }

    /// Writes the next bytes of the tensors, in the order of the specs.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        assert!(bytes.len() as u64 <= self.left_bytes, "{} bytes, {} expected", bytes.len(), self.left_bytes);
        self.left_bytes -= bytes.len() as u64;
        self.put(bytes)
    }

    /// Gives the file its name and returns its sha256. Panics when bytes are missing.
    pub fn finish(self) -> Result<String> {
        assert_eq!(self.left_bytes, 0, "the last tensor is not whole");
        let file = self.file.into_inner().map_err(|error| io_error(&self.path, "write")(error.into_error()))?;
        file.commit()?;
        Ok(hex(&self.hasher.finalize()))
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hasher.update(bytes);
        let write: io::Result<()> = self.file.write_all(bytes);
        write.map_err(io_error(&self.path, "write"))
    }
}

/// The JSON header, padded with spaces to a multiple of eight bytes.
fn header(specs: &[TensorSpec]) -> Vec<u8> {
    let mut fields = Map::new();
    fields.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut offset = 0;
    for spec in specs {
        let end = offset + spec.bytes();
        fields.insert(
            spec.name.clone(),
            json!({"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offset, end]}),
        );
        offset = end;
    }
    let mut header = serde_json::to_vec(&fields).expect("strings and numbers become JSON");
    header.resize(header.len().next_multiple_of(8), b' ');
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use np_formats::TensorDtype;
    use std::fs;

    #[test]
    fn golden_bytes() {
        let directory = tempfile::tempdir().unwrap();
        let specs = [TensorSpec::new("b", TensorDtype::F16, &[2]), TensorSpec::new("a", TensorDtype::F32, &[1, 1])];
        let mut writer = CheckpointWriter::create(directory.path(), &specs).unwrap();
        writer.write(&[1, 2, 3]).unwrap();
        writer.write(&[4, 5, 6, 7, 8]).unwrap();
        let sha256 = writer.finish().unwrap();
        let bytes = fs::read(directory.path().join("model.safetensors")).unwrap();
        let header = concat!(
            r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"#,
            r#""a":{"dtype":"F32","shape":[1,1],"data_offsets":[4,8]}}"#,
        );
        let header_bytes = header.len().next_multiple_of(8);
        assert_eq!(bytes[..8], (header_bytes as u64).to_le_bytes());
        assert_eq!(&bytes[8..8 + header.len()], header.as_bytes());
        assert_eq!(bytes[8 + header_bytes..], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(sha256, hex(&Sha256::digest(&bytes)));
    }
}
