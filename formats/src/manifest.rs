//! `manifest.json`: what an artifact directory holds and what it was made from.

use crate::error::{Result, io_error};
use crate::{AtomicFile, Dtype, Error, Fingerprint, Geometry};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Version of the artifact directory's layout.
pub const FORMAT_VERSION: u32 = 1;
/// Name of the manifest in its directory.
pub const MANIFEST_NAME: &str = "manifest.json";

const REMEDY: &str = "run `np-prep repack` again";
const NO_CHECKSUM: &str = "";

/// Pins every file that preparation writes once: the copies of the model's own small files, the resident tensors and
/// the neuron file. Sidecars made later (centroids, predictor, traces) carry its fingerprint instead.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Layout of the directory.
    pub format_version: u32,
    /// Version of np-prep that wrote it.
    pub tool_version: String,
    /// Stands for this preparation; every file made from it carries it.
    pub fingerprint: Fingerprint,
    /// Where the model came from.
    pub source: Source,
    /// Sizes and options of the model.
    pub geometry: Geometry,
    /// Type of the neuron rows.
    pub dtype: Dtype,
    /// Hash of each layer of the neuron file, see [`crate::LayerHash`].
    pub layer_hashes: Vec<Fingerprint>,
    /// The other pinned files, by name.
    pub files: BTreeMap<String, PinnedFile>,
    /// xxh3-128 of this file's text with an empty string here.
    pub checksum: String,
}

/// Where a model came from, as far as it is known.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Name of the repository, file or directory.
    pub name: String,
    /// Commit of the repository.
    pub revision: Option<String>,
    /// sha256 of the single source file, where there is one.
    pub sha256: Option<String>,
}

/// Length and checksum of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PinnedFile {
    /// Its length.
    pub bytes: u64,
    /// xxh3-128 of its bytes.
    pub xxh3: Fingerprint,
}

impl PinnedFile {
    /// Measures `path`.
    pub fn of(path: &Path) -> Result<Self> {
        let mut file = File::open(path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => Error::Missing { path: path.into(), remedy: REMEDY },
            _ => io_error(path, "open")(source),
        })?;
        let mut hasher = Xxh3::new();
        let mut piece = vec![0; 1 << 20];
        let mut bytes = 0;
        loop {
            let count = file.read(&mut piece).map_err(io_error(path, "read"))?;
            if count == 0 {
                return Ok(Self { bytes, xxh3: Fingerprint(hasher.digest128()) });
            }
            hasher.update(&piece[..count]);
            bytes += count as u64;
        }
    }

    /// Checks that `path` still has this length and content.
    pub fn check(&self, path: &Path) -> Result<()> {
        let found = Self::of(path)?;
        if found.bytes != self.bytes {
            let (actual, expected) = (found.bytes, self.bytes);
            return Err(Error::Length { path: path.into(), actual, expected, remedy: REMEDY });
        }
        if found.xxh3 != self.xxh3 { Err(Error::Checksum { path: path.into(), remedy: REMEDY }) } else { Ok(()) }
    }
}

impl Manifest {
    /// The fingerprint of a preparation: of its geometry, its rows' type and order, and all its tensors.
    pub fn fingerprint_of(
        geometry: &Geometry,
        dtype: Dtype,
        layer_hashes: &[Fingerprint],
        resident: Fingerprint,
    ) -> Fingerprint {
        let order = "natural";
        let text = serde_json::to_vec(&(FORMAT_VERSION, geometry, dtype, order, layer_hashes, resident));
        Fingerprint::of(&text.expect("numbers and hashes become JSON"))
    }

    /// Reads the manifest of `directory` and checks its checksum.
    pub fn open(directory: &Path) -> Result<Self> {
        let path = directory.join(MANIFEST_NAME);
        let text = fs::read(&path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => Error::Missing {
                path: path.clone(),
                remedy: "not an artifact directory, or preparation did not finish; run `np-prep repack`",
            },
            _ => io_error(&path, "read")(source),
        })?;
        // A version from the future may have other fields, so it is looked at first.
        let version: VersionOnly = parse(&path, &text)?;
        if version.format_version != FORMAT_VERSION {
            let problem =
                format!("has format version {}, this program reads {FORMAT_VERSION}; {REMEDY}", version.format_version);
            return Err(Error::Header { path, problem });
        }
        let manifest: Self = parse(&path, &text)?;
        if manifest.sealed_text() == text { Ok(manifest) } else { Err(Error::Checksum { path, remedy: REMEDY }) }
    }

    /// Writes the manifest into `directory`. It is written last: a directory without one is not whole.
    pub fn write(&self, directory: &Path) -> Result<()> {
        AtomicFile::write(&directory.join(MANIFEST_NAME), &self.sealed_text())
    }

    /// Checks all pinned files but the neuron file against their lengths and checksums.
    pub fn check_files(&self, directory: &Path) -> Result<()> {
        self.files.iter().try_for_each(|(name, pinned)| pinned.check(&directory.join(name)))
    }

    /// Path of a pinned file, if the directory has it.
    pub fn file(&self, directory: &Path, name: &str) -> Option<PathBuf> {
        self.files.contains_key(name).then(|| directory.join(name))
    }

    fn sealed_text(&self) -> Vec<u8> {
        let text = |checksum: String| {
            let manifest = Self { checksum, ..self.clone() };
            let mut text = serde_json::to_vec_pretty(&manifest).expect("the manifest becomes JSON");
            text.push(b'\n');
            text
        };
        text(Fingerprint::of(&text(NO_CHECKSUM.into())).to_string())
    }
}

#[derive(Deserialize)]
struct VersionOnly {
    format_version: u32,
}

fn parse<T: for<'de> Deserialize<'de>>(path: &Path, text: &[u8]) -> Result<T> {
    serde_json::from_slice(text)
        .map_err(|source| Error::Header { path: path.into(), problem: format!("{source}; {REMEDY}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let config = r#"{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 256}"#;
        let geometry = Geometry::from_config(Path::new("config.json"), config).unwrap();
        let pinned = PinnedFile { bytes: 3, xxh3: Fingerprint::of(b"abc") };
        Manifest {
            format_version: FORMAT_VERSION,
            tool_version: "0.1.0".into(),
            fingerprint: Fingerprint(1),
            source: Source { name: "tiny".into(), revision: None, sha256: None },
            geometry,
            dtype: Dtype::F16,
            layer_hashes: vec![Fingerprint(3), Fingerprint(4)],
            files: BTreeMap::from([("f".to_string(), pinned)]),
            checksum: String::new(),
        }
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let directory = tempfile::tempdir().unwrap();
        manifest().write(directory.path()).unwrap();
        assert_eq!(Manifest::open(directory.path()).unwrap().geometry, manifest().geometry);
        let path = directory.path().join(MANIFEST_NAME);
        let whole = fs::read(&path).unwrap();
        for bit in 0..whole.len() * 8 {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &bytes).unwrap();
            assert!(Manifest::open(directory.path()).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn pinned_files_are_checked() {
        let directory = tempfile::tempdir().unwrap();
        let check = |content: Option<&[u8]>| {
            let path = directory.path().join("f");
            let _ = fs::remove_file(&path);
            if let Some(content) = content {
                fs::write(&path, content).unwrap();
            }
            manifest().check_files(directory.path())
        };
        check(Some(b"abc")).unwrap();
        assert!(matches!(check(Some(b"abd")), Err(Error::Checksum { .. })));
        assert!(matches!(check(Some(b"ab")), Err(Error::Length { .. })));
        assert!(matches!(check(None), Err(Error::Missing { .. })));
    }
}
