//! Finds any flipped bit in any file of an artifact directory.

use crate::error::{Error, Result, io_error};
use crate::progress::Progress;
use np_formats::{
    CENTROIDS_NAME, Geometry, MANIFEST_NAME, Manifest, NEURONS_NAME, NeuronFile, PREDICTOR_NAME, PredictorWeights,
    RESIDENT_NAME, TRACES_NAME, TensorFile,
};
use std::fs;
use std::path::Path;

/// What was looked at.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Verified {
    /// Files that are whole, by their path in the directory.
    pub whole: Vec<String>,
    /// Files that do not belong to an artifact directory, so that nothing is known of them.
    pub unknown: Vec<String>,
}

/// Checks every bit of every file of `directory`, and that the files belong together.
///
/// The manifest has a checksum of itself and those of the small files and the resident tensors. Of the neuron file,
/// every record is checked with its tag, hash and padding, and the zeros between layers; the records' hashes must add
/// up to those of the manifest. Centroids, predictor and traces have checksums in their headers and must be made from
/// this preparation.
pub fn verify(directory: &Path, progress: Progress) -> Result<Verified> {
    let manifest = Manifest::open(directory)?;
    verify_pinned(directory, &manifest, progress)?;
    let mut verified = Verified::default();
    for name in names_in(directory)? {
        let path = directory.join(&name);
        match name.as_str() {
            TRACES_NAME if path.is_dir() => verify_traces(&path, &manifest, &mut verified)?,
            CENTROIDS_NAME => {
                TensorFile::open_made_from(&path, manifest.fingerprint)?.verify()?;
                verified.whole.push(name);
            }
            PREDICTOR_NAME => {
                verify_predictor(directory, &manifest)?;
                verified.whole.push(name);
            }
            MANIFEST_NAME | NEURONS_NAME => verified.whole.push(name),
            _ if manifest.files.contains_key(&name) => verified.whole.push(name),
            _ => verified.unknown.push(name),
        }
    }
    Ok(verified)
}

/// Checks the files that the manifest pins: the small ones, the resident tensors and the neuron file.
pub fn verify_pinned(directory: &Path, manifest: &Manifest, progress: Progress) -> Result<()> {
    manifest.check_files(directory)?;
    TensorFile::open_made_from(&directory.join(RESIDENT_NAME), manifest.fingerprint)?.verify()?;
    let neurons = NeuronFile::open(&directory.join(NEURONS_NAME))?;
    check_header(&neurons, manifest)?;
    let bar = progress.count("verify", manifest.geometry.layers as u64);
    for (layer, expected) in manifest.layer_hashes.iter().enumerate() {
        if neurons.verify_layer(layer as u16)? != *expected {
            let problem = format!("layer {layer} is not the one that the manifest pins; run `np-prep repack` again");
            return Err(Error::Source { path: neurons.path().into(), problem });
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(())
}

fn check_header(neurons: &NeuronFile, manifest: &Manifest) -> Result<()> {
    let header = neurons.header();
    let (path, remedy) = (neurons.path().into(), "run `np-prep repack` again");
    if header.fingerprint != manifest.fingerprint {
        let (found, expected) = (header.fingerprint.to_string(), manifest.fingerprint.to_string());
        return Err(np_formats::Error::Foreign { path, found, expected, remedy }.into());
    }
    let Geometry { layers, hidden, intermediate, .. } = manifest.geometry;
    let found = (usize::from(header.layers), header.neurons as usize, header.layout.hidden(), header.layout.dtype());
    if found != (layers, intermediate, hidden, manifest.dtype) || manifest.layer_hashes.len() != layers {
        let problem = format!("has another shape than the manifest states; {remedy}");
        return Err(np_formats::Error::Header { path, problem }.into());
    }
    Ok(())
}

/// A predictor belongs to the centroids that it names, so it is read with their checksum.
fn verify_predictor(directory: &Path, manifest: &Manifest) -> Result<()> {
    let centroids = directory.join(CENTROIDS_NAME);
    let checksum = match centroids.is_file() {
        true => TensorFile::open_made_from(&centroids, manifest.fingerprint)?.checksum(),
        false => None,
    };
    PredictorWeights::read(directory, manifest.geometry.hidden, manifest.fingerprint, checksum)?;
    Ok(())
}

fn verify_traces(traces: &Path, manifest: &Manifest, verified: &mut Verified) -> Result<()> {
    for name in names_in(traces)? {
        let inner = format!("{TRACES_NAME}/{name}");
        if name.ends_with(".safetensors") {
            TensorFile::open_made_from(&traces.join(&name), manifest.fingerprint)?.verify()?;
            verified.whole.push(inner);
        } else {
            verified.unknown.push(inner);
        }
    }
    Ok(())
}

fn names_in(directory: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(directory).map_err(io_error(directory, "list"))?;
    let name = |entry: std::io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> =
        entries.map(name).collect::<std::io::Result<_>>().map_err(io_error(directory, "list"))?;
    names.sort();
    Ok(names)
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
