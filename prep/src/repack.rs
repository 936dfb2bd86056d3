//! A checkpoint becomes an artifact directory: resident tensors, the neuron file, copies of small files, a manifest.

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result, io_error};
use crate::import::{copy_small_files, for_each_piece};
use crate::progress::Progress;
use crate::tensors::{layer_tensor, model_tensors};
use crate::verify::verify_pinned;
use np_formats::{
    FORMAT_VERSION, Fingerprint, Geometry, MANIFEST_NAME, Manifest, NEURONS_NAME, NeuronFileHeader, NeuronFileWriter,
    PinnedFile, RESIDENT_NAME, RecordLayout, Source, TensorFileWriter, TensorSpec,
};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// Bytes of records in memory at once.
const BATCH_BYTES: usize = 16 << 20;

/// Writes the artifact directory `directory` of `checkpoint`, which came from `source`, and returns its manifest.
///
/// A run that was killed is continued at the layer where it stopped, if it was of the same source; the result does not
/// tell. A directory that is whole and of the same source is left as it is; one of another model is refused. Memory
/// holds one layer's `down_proj` and a few batches of rows, whatever the size of the model.
pub fn repack(checkpoint: &Checkpoint, source: &Source, directory: &Path, progress: Progress) -> Result<Manifest> {
    fs::create_dir_all(directory).map_err(io_error(directory, "create"))?;
    if let Some(manifest) = existing(checkpoint, source, directory, progress)? {
        return Ok(manifest);
    }
    let geometry = checkpoint.geometry();
    let layout = RecordLayout::new(geometry.hidden, checkpoint.dtype());
    let header = NeuronFileHeader {
        layers: geometry.layers as u16,
        neurons: geometry.intermediate as u32,
        layout,
        fingerprint: Fingerprint(0),
    };
    let origin = serde_json::to_vec(&(FORMAT_VERSION, source, geometry, checkpoint.dtype()));
    let origin = Fingerprint::of(&origin.expect("strings and numbers become JSON"));
    let mut neurons = NeuronFileWriter::resume(&directory.join(NEURONS_NAME), header, origin)?;
    let bar = progress.count("repack", geometry.layers as u64);
    bar.set_position(neurons.next_layer().into());
    let mut buffers = Buffers::default();
    while usize::from(neurons.next_layer()) < geometry.layers {
        write_layer(checkpoint, layout, &mut neurons, &mut buffers)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    drop(buffers);
    let resident = resident_hash(checkpoint)?;
    let fingerprint = Manifest::fingerprint_of(geometry, checkpoint.dtype(), neurons.layer_hashes(), resident);
    let layer_hashes = neurons.layer_hashes().to_vec();
    write_resident(checkpoint, directory, fingerprint)?;
    let mut files = BTreeMap::from([(RESIDENT_NAME.to_string(), PinnedFile::of(&directory.join(RESIDENT_NAME))?)]);
    for name in copy_small_files(checkpoint, directory)? {
        files.insert(name.into(), PinnedFile::of(&directory.join(name))?);
    }
    neurons.finish(fingerprint)?;
    let manifest = Manifest {
        format_version: FORMAT_VERSION,
        tool_version: env!("CARGO_PKG_VERSION").into(),
        fingerprint,
        source: source.clone(),
        geometry: geometry.clone(),
        dtype: checkpoint.dtype(),
        layer_hashes,
        files,
        checksum: String::new(),
    };
    manifest.write(directory)?;
    Ok(Manifest::open(directory)?)
}

/// The manifest of `directory`, if it is whole and of this source. A damaged one of this source is made again; another
/// model's is refused.
fn existing(
    checkpoint: &Checkpoint,
    source: &Source,
    directory: &Path,
    progress: Progress,
) -> Result<Option<Manifest>> {
    let Ok(manifest) = Manifest::open(directory) else { return Ok(None) };
    let same = manifest.source == *source
        && manifest.geometry == *checkpoint.geometry()
        && manifest.dtype == checkpoint.dtype();
    if !same {
        let name = |source: &Source, dtype: np_formats::Dtype| {
            let sha256 = source.sha256.as_deref().unwrap_or("unknown");
            format!("{} (sha256 {}..., {})", source.name, &sha256[..sha256.len().min(12)], dtype.name())
        };
        let (found, wanted) = (name(&manifest.source, manifest.dtype), name(source, checkpoint.dtype()));
        return Err(Error::Occupied { path: directory.join(MANIFEST_NAME), found, wanted });
    }
    Ok(verify_pinned(directory, &manifest, progress).is_ok().then_some(manifest))
}

/// Memory that every layer uses anew.
#[derive(Default)]
struct Buffers {
    /// One layer's `down_proj`, (H, M).
    down: Vec<u8>,
    /// Consecutive rows of gate or up.
    rows: Vec<u8>,
    /// Records of the same neurons.
    records: Vec<u8>,
}

fn write_layer(
    checkpoint: &Checkpoint,
    layout: RecordLayout,
    neurons: &mut NeuronFileWriter,
    buffers: &mut Buffers,
) -> Result<()> {
    let Geometry { hidden, intermediate, .. } = *checkpoint.geometry();
    let layer = usize::from(neurons.next_layer());
    let name = |projection: &str| layer_tensor(layer, &format!("mlp.{projection}_proj.weight"));
    let (row_bytes, stride_bytes) = (layout.row_bytes(), layout.stride_bytes());
    buffers.down.resize(intermediate * row_bytes, 0);
    checkpoint.read(&name("down"), 0, &mut buffers.down)?;
    let batch = (BATCH_BYTES / stride_bytes).max(1);
    for first in (0..intermediate).step_by(batch) {
        let count = batch.min(intermediate - first);
        buffers.rows.resize(count * row_bytes, 0);
        buffers.records.resize(count * stride_bytes, 0);
        for (place, projection) in ["gate", "up"].into_iter().enumerate() {
            checkpoint.read(&name(projection), first * hidden, &mut buffers.rows)?;
            for (record, row) in
                buffers.records.chunks_exact_mut(stride_bytes).zip(buffers.rows.chunks_exact(row_bytes))
            {
                record[place * row_bytes..(place + 1) * row_bytes].copy_from_slice(row);
            }
        }
        place_columns(&buffers.down, intermediate, first, layout, &mut buffers.records);
        neurons.write(&mut buffers.records)?;
    }
    neurons.finish_layer()?;
    Ok(())
}

/// Puts columns `first..` of `down` (H, M), one for each record, into the records' third rows.
fn place_columns(down: &[u8], neurons: usize, first: usize, layout: RecordLayout, records: &mut [u8]) {
    let value_bytes = layout.dtype().bytes();
    let row_at = 2 * layout.row_bytes();
    // A tile of records small enough that the lines being written stay in the first-level cache.
    for (tile, records) in records.chunks_mut(TILE * layout.stride_bytes()).enumerate() {
        let first = first + tile * TILE;
        for (index, row) in down.chunks_exact(neurons * value_bytes).enumerate() {
            let at = row_at + index * value_bytes;
            let values = row[first * value_bytes..].chunks_exact(value_bytes);
            for (record, value) in records.chunks_exact_mut(layout.stride_bytes()).zip(values) {
                record[at..at + value_bytes].copy_from_slice(value);
            }
        }
    }
}

/// Records whose third rows are filled together.
const TILE: usize = 128;

fn resident_specs(checkpoint: &Checkpoint) -> Vec<TensorSpec> {
    let resident = model_tensors(checkpoint.geometry()).into_iter().filter(|tensor| !tensor.mlp);
    resident.map(|tensor| checkpoint.spec(&tensor.name)).collect()
}

/// Hash of the resident tensors: names, types, shapes and content.
fn resident_hash(checkpoint: &Checkpoint) -> Result<Fingerprint> {
    let mut hasher = Xxh3::new();
    for spec in resident_specs(checkpoint) {
        hasher.update(format!("{} {:?} {:?}\n", spec.name, spec.dtype, spec.shape).as_bytes());
        for_each_piece(checkpoint, &spec, |piece| {
            hasher.update(piece);
            Ok(())
        })?;
    }
    Ok(Fingerprint(hasher.digest128()))
}

fn write_resident(checkpoint: &Checkpoint, directory: &Path, fingerprint: Fingerprint) -> Result<()> {
    let specs = resident_specs(checkpoint);
    let mut writer = TensorFileWriter::create(&directory.join(RESIDENT_NAME), fingerprint, &[], specs.clone())?;
    for spec in &specs {
        for_each_piece(checkpoint, spec, |piece| Ok(writer.write(&spec.name, piece)?))?;
    }
    writer.finish()?;
    Ok(())
}

#[cfg(test)]
#[path = "repack_tests.rs"]
mod tests;
