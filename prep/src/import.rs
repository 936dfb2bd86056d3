//! Whatever a model comes as becomes a checkpoint directory in one normal form.

use crate::checkpoint::{CONFIG_NAME, COPIED_NAMES, Checkpoint};
use crate::checkpoint_writer::CheckpointWriter;
use crate::error::{Error, Result, io_error};
use crate::gguf::import_gguf;
use crate::progress::Progress;
use crate::provenance::{Provenance, source_of};
use crate::tensors::model_tensors;
use np_formats::{AtomicFile, Dtype, Source, TensorSpec};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Bytes of a tensor in memory at once.
const PIECE_BYTES: usize = 16 << 20;

/// What an import found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Imported {
    /// Where the model came from.
    pub source: Source,
    /// What is odd but could be worked with.
    pub warnings: Vec<String>,
}

/// Makes the checkpoint directory `directory` of a GGUF file or of another checkpoint directory. F32 matrices (and all
/// tensors of a GGUF file) become `dtype`: F16 or BF16, F16 by default.
pub fn import(path: &Path, directory: &Path, dtype: Option<Dtype>, progress: Progress) -> Result<Imported> {
    if path.is_dir() {
        return import_directory(path, directory, dtype, progress);
    }
    let source = import_gguf(path, directory, dtype.unwrap_or(Dtype::F16), progress)?;
    Ok(Imported { source, warnings: Vec::new() })
}

/// Copies a checkpoint: one file of tensors in the order of the layers, leftovers dropped, F32 matrices narrowed, and a
/// config that says outright what had to be found out.
fn import_directory(path: &Path, directory: &Path, dtype: Option<Dtype>, progress: Progress) -> Result<Imported> {
    let checkpoint = Checkpoint::open(path, dtype)?;
    fs::create_dir_all(directory).map_err(io_error(directory, "create"))?;
    let canonical = |path: &Path| fs::canonicalize(path).map_err(io_error(path, "open"));
    if canonical(path)? == canonical(directory)? {
        let problem = "is both source and target; name another directory".into();
        return Err(Error::Source { path: path.into(), problem });
    }
    let source = source_of(&checkpoint, progress)?;
    copy_small_files(&checkpoint, directory)?;
    AtomicFile::write(&directory.join(CONFIG_NAME), &normal_config(&checkpoint)?)?;
    let weights_sha256 = write_tensors(&checkpoint, directory, progress)?;
    Provenance { source: source.clone(), weights_sha256 }.write(directory)?;
    Ok(Imported { source, warnings: checkpoint.warnings().to_vec() })
}

/// Copies the small files of a checkpoint, those that exist, as they are. Returns their names.
pub fn copy_small_files(checkpoint: &Checkpoint, directory: &Path) -> Result<Vec<&'static str>> {
    let mut copied = Vec::new();
    for name in COPIED_NAMES {
        let from = checkpoint.directory().join(name);
        if from.is_file() {
            let text = fs::read(&from).map_err(io_error(&from, "read"))?;
            AtomicFile::write(&directory.join(name), &text)?;
            copied.push(name);
        }
    }
    Ok(copied)
}

fn write_tensors(checkpoint: &Checkpoint, directory: &Path, progress: Progress) -> Result<String> {
    let tensors = model_tensors(checkpoint.geometry());
    let specs: Vec<TensorSpec> = tensors.iter().map(|tensor| checkpoint.spec(&tensor.name)).collect();
    let bar = progress.bytes("import", specs.iter().map(|spec| spec.bytes() as u64).sum());
    let mut writer = CheckpointWriter::create(directory, &specs)?;
    for spec in &specs {
        for_each_piece(checkpoint, spec, |piece| {
            bar.inc(piece.len() as u64);
            writer.write(piece)
        })?;
    }
    bar.finish_and_clear();
    writer.finish()
}

/// Hands over the bytes of a tensor in order, a piece at a time.
pub fn for_each_piece(
    checkpoint: &Checkpoint,
    spec: &TensorSpec,
    mut take: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let value_bytes = spec.dtype.bitsize() / 8;
    let mut piece = Vec::new();
    for at in (0..spec.bytes()).step_by(PIECE_BYTES) {
        piece.resize(PIECE_BYTES.min(spec.bytes() - at), 0);
        checkpoint.read(&spec.name, at / value_bytes, &mut piece)?;
        take(&piece)?;
    }
    Ok(())
}

fn normal_config(checkpoint: &Checkpoint) -> Result<Vec<u8>> {
    let path = checkpoint.directory().join(CONFIG_NAME);
    let text = fs::read(&path).map_err(io_error(&path, "read"))?;
    let mut config: Value = serde_json::from_slice(&text).map_err(|source| np_formats::Error::Json { path, source })?;
    let fields = config.as_object_mut().expect("an opened checkpoint's config is an object");
    fields.shift_remove("dtype");
    let dtype = if checkpoint.dtype() == Dtype::F16 { "float16" } else { "bfloat16" };
    fields.insert("torch_dtype".into(), json!(dtype));
    fields.insert("tie_word_embeddings".into(), json!(checkpoint.geometry().tied_embedding));
    let mut text = serde_json::to_vec_pretty(&config).expect("a value becomes JSON");
    text.push(b'\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_checkpoint::{config, geometry, write_checkpoint, write_sharded_checkpoint};
    use np_formats::Geometry;

    fn tensor(directory: &Path, name: &str) -> (TensorSpec, Vec<u8>) {
        let checkpoint = Checkpoint::open(directory, None).unwrap();
        let spec = checkpoint.spec(name);
        let mut bytes = vec![0; spec.bytes()];
        checkpoint.read(name, 0, &mut bytes).unwrap();
        (spec, bytes)
    }

    #[test]
    fn a_sharded_checkpoint_becomes_one_file_with_the_same_tensors() {
        let temporary = tempfile::tempdir().unwrap();
        let (from, to) = (temporary.path().join("from"), temporary.path().join("to"));
        let twelve = Geometry { layers: 12, ..geometry() };
        write_sharded_checkpoint(&from, &twelve, 1);
        let imported = import(&from, &to, None, Progress::Silent).unwrap();
        assert_eq!((imported.source.name.as_str(), imported.warnings.len()), ("from", 0));
        for wanted in model_tensors(&twelve) {
            assert_eq!(tensor(&to, &wanted.name), tensor(&from, &wanted.name), "{}", wanted.name);
        }
        let noted = source_of(&Checkpoint::open(&to, None).unwrap(), Progress::Silent).unwrap();
        assert_eq!(noted, imported.source);
        assert!(to.join("tokenizer.json").is_file() && !to.join("model.safetensors.index.json").exists());
    }

    #[test]
    fn single_precision_is_narrowed_and_the_config_says_so() {
        let temporary = tempfile::tempdir().unwrap();
        let (from, to) = (temporary.path().join("from"), temporary.path().join("to"));
        write_checkpoint(&from, &geometry(), Dtype::F32, 1);
        let mut odd = config(&geometry());
        odd["dtype"] = json!("float32");
        odd.as_object_mut().unwrap().remove("tie_word_embeddings");
        fs::write(from.join(CONFIG_NAME), odd.to_string()).unwrap();
        import(&from, &to, Some(Dtype::Bf16), Progress::Silent).unwrap();
        assert_eq!(Checkpoint::open(&to, None).unwrap().dtype(), Dtype::Bf16);
        let written: Value = serde_json::from_slice(&fs::read(to.join(CONFIG_NAME)).unwrap()).unwrap();
        assert_eq!(written["torch_dtype"], "bfloat16");
        assert_eq!(written["tie_word_embeddings"], false);
        assert_eq!(written.get("dtype"), None);
    }

    #[test]
    fn a_checkpoint_is_not_imported_onto_itself() {
        let temporary = tempfile::tempdir().unwrap();
        write_checkpoint(temporary.path(), &geometry(), Dtype::F16, 1);
        let same = temporary.path().join(".");
        let message = import(temporary.path(), &same, None, Progress::Silent).unwrap_err().to_string();
        assert!(message.contains("another directory"), "{message}");
        Checkpoint::open(temporary.path(), None).unwrap();
    }
}
