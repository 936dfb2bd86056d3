//! Where the weights of a checkpoint directory came from.

use crate::checkpoint::Checkpoint;
use crate::error::{Result, io_error};
use crate::progress::Progress;
use indicatif::ProgressBar;
use np_formats::{AtomicFile, Source};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

/// Name of the note in a checkpoint directory that we made.
pub const PROVENANCE_NAME: &str = "provenance.json";

/// What an import or a download leaves beside the tensors. It is written last, so that it stands for a whole directory.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// What the directory was made from.
    pub source: Source,
    /// Of the tensors beside this note, see [`weights_sha256`]. The note counts only while these are unchanged.
    pub weights_sha256: String,
}

impl Provenance {
    /// The note in `directory`, if there is a readable one.
    pub fn read(directory: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(directory.join(PROVENANCE_NAME)).ok()?).ok()
    }

    /// Writes the note into `directory`.
    pub fn write(&self, directory: &Path) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(self).expect("strings become JSON");
        text.push(b'\n');
        Ok(AtomicFile::write(&directory.join(PROVENANCE_NAME), &text)?)
    }
}

/// What the tensors of `checkpoint` came from: by its note, by its place in a hub's cache, or else by its own name. The
/// sha256 is always there.
pub fn source_of(checkpoint: &Checkpoint, progress: Progress) -> Result<Source> {
    let sha256 = weights_sha256(checkpoint, progress)?;
    let noted = Provenance::read(checkpoint.directory()).filter(|noted| noted.weights_sha256 == sha256);
    if let Some(Provenance { source, .. }) = noted {
        return Ok(source);
    }
    let directory = fs::canonicalize(checkpoint.directory()).unwrap_or_else(|_| checkpoint.directory().into());
    let (name, revision) = cached_repository(&directory).unwrap_or_else(|| (own_name(&directory), None));
    Ok(Source { name, revision, sha256: Some(sha256) })
}

/// Hexadecimal sha256 of a checkpoint's tensors: of the file, or of the list of its shards' sums and names.
pub fn weights_sha256(checkpoint: &Checkpoint, progress: Progress) -> Result<String> {
    let files: Vec<_> = checkpoint.files().collect();
    let length = |path: &&Path| fs::metadata(path).map_or(0, |data| data.len());
    let bar = progress.bytes("checksum", files.iter().map(length).sum());
    let sums = files.iter().map(|path| sha256_of(path, &bar)).collect::<Result<Vec<_>>>()?;
    bar.finish_and_clear();
    if let [sum] = sums.as_slice() {
        return Ok(sum.clone());
    }
    let lines = files.iter().zip(&sums).map(|(path, sum)| format!("{sum}  {}\n", own_name(path)));
    Ok(hex(&Sha256::digest(lines.collect::<String>())))
}

/// Hexadecimal sha256 of a file.
pub fn sha256_of(path: &Path, bar: &ProgressBar) -> Result<String> {
    let mut file = File::open(path).map_err(io_error(path, "open"))?;
    let mut hasher = Sha256::new();
    let mut piece = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut piece).map_err(io_error(path, "read"))?;
        if count == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&piece[..count]);
        bar.inc(count as u64);
    }
}

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The last part of a path.
pub fn own_name(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// Repository and commit of `.../models--OWNER--NAME/snapshots/COMMIT`.
fn cached_repository(directory: &Path) -> Option<(String, Option<String>)> {
    let commit = own_name(directory);
    let snapshots = directory.parent().filter(|parent| parent.ends_with("snapshots"))?;
    let folder = own_name(snapshots.parent()?);
    Some((folder.strip_prefix("models--")?.replacen("--", "/", 1), Some(commit)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_checkpoint::{geometry, write_checkpoint, write_sharded_checkpoint};
    use np_formats::Dtype;

    fn source(directory: &Path) -> Source {
        source_of(&Checkpoint::open(directory, None).unwrap(), Progress::Silent).unwrap()
    }

    #[test]
    fn a_note_counts_while_the_tensors_are_unchanged() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tiny");
        write_checkpoint(&path, &geometry(), Dtype::F16, 1);
        let plain = source(&path);
        assert_eq!(plain.name, "tiny");
        let noted = Source { name: "tiny.gguf".into(), revision: None, sha256: Some("00".into()) };
        let weights_sha256 = plain.sha256.clone().unwrap();
        Provenance { source: noted.clone(), weights_sha256 }.write(&path).unwrap();
        assert_eq!(source(&path), noted);
        write_checkpoint(&path, &geometry(), Dtype::F16, 2);
        assert_eq!(source(&path).name, "tiny");
        assert_ne!(source(&path).sha256, plain.sha256);
    }

    #[test]
    fn a_hubs_cache_tells_repository_and_commit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("models--some--model--name/snapshots/0123abc");
        write_sharded_checkpoint(&path, &geometry(), 1);
        let source = source(&path);
        assert_eq!((source.name.as_str(), source.revision.as_deref()), ("some/model--name", Some("0123abc")));
        assert_eq!(source.sha256.unwrap().len(), 64);
    }

    #[test]
    fn known_sum() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("abc");
        fs::write(&path, "abc").unwrap();
        let sum = sha256_of(&path, &ProgressBar::hidden()).unwrap();
        assert_eq!(sum, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
