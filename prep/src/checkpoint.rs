//! A Hugging Face checkpoint directory, checked when opened and read a piece at a time.

use crate::convert::{Origin, narrow};
use crate::error::{Error, Result, io_error};
use crate::locate::{Located, locate};
use crate::tensors::{EMBEDDING, HEAD, check_tensors, is_harmless, layer_tensor};
use np_formats::{Dtype, Geometry, TensorDtype, TensorFile, TensorSpec};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Name of the config in a checkpoint.
pub const CONFIG_NAME: &str = "config.json";
/// Small files that travel with a model; those that exist are copied as they are.
pub const COPIED_NAMES: [&str; 5] =
    [CONFIG_NAME, "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"];
/// Values that are converted or compared at once.
const PIECE_VALUES: usize = 1 << 18;

/// An open checkpoint whose config, tensor names, shapes and types fit together.
///
/// Matrices stored as F32 are read as a 16-bit type; all else is read as it is stored.
#[derive(Debug)]
pub struct Checkpoint {
    directory: PathBuf,
    geometry: Geometry,
    dtype: Dtype,
    files: Vec<TensorFile>,
    tensors: BTreeMap<String, Stored>,
    warnings: Vec<String>,
}

/// Where a tensor lies, and as what it is read.
#[derive(Clone, Debug)]
struct Stored {
    file: usize,
    stored: Dtype,
    read: Dtype,
    shape: Vec<usize>,
}

impl Checkpoint {
    /// Opens `directory`. `narrow_to` (F16 or BF16) is what F32 matrices become, by default F16.
    ///
    /// Nothing of a tensor is read yet (except to compare a tied head with its embedding), so that a directory that
    /// can't be prepared is refused at once, with everything that is missing named.
    pub fn open(directory: &Path, narrow_to: Option<Dtype>) -> Result<Self> {
        let config_path = directory.join(CONFIG_NAME);
        let config = fs::read_to_string(&config_path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => Error::Source {
                path: config_path.clone(),
                problem: "not found; this must be a Hugging Face checkpoint directory or a .gguf file".into(),
            },
            _ => io_error(&config_path, "read")(source),
        })?;
        let mut geometry = Geometry::from_config(&config_path, &config)?;
        let located = locate(directory)?;
        let files =
            located.files().iter().map(|path| TensorFile::open(path)).collect::<np_formats::Result<Vec<_>>>()?;
        let tensors = index(&located, &files, narrow_to.unwrap_or(Dtype::F16))?;
        geometry.tied_embedding = is_tied(&config, tensors.contains_key(HEAD));
        let shapes = tensors.iter().map(|(name, stored)| (name.clone(), stored.shape.clone())).collect();
        check_tensors(directory, &geometry, &shapes)?;
        let dtype = tensors[&layer_tensor(0, "mlp.gate_proj.weight")].read;
        let mut checkpoint =
            Self { directory: directory.into(), geometry, dtype, files, tensors, warnings: Vec::new() };
        checkpoint.check_dtypes(narrow_to)?;
        checkpoint.compare_tied_head()?;
        Ok(checkpoint)
    }

    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Sizes and options of the model. Whether the embedding is tied is decided by what is in the files.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Type in which the MLP's matrices are read: F16 or BF16.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// What is odd but can be worked with, one line each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The files that hold the tensors.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(TensorFile::path)
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Type (as it is read) and shape of a tensor that the geometry implies.
    pub fn spec(&self, name: &str) -> TensorSpec {
        let stored = &self.tensors[name];
        let dtype = match stored.read {
            Dtype::F16 => TensorDtype::F16,
            Dtype::Bf16 => TensorDtype::BF16,
            Dtype::F32 => TensorDtype::F32,
        };
        TensorSpec::new(name, dtype, &stored.shape)
    }

    /// Reads values of a tensor from its value `first` on, as many as `bytes` holds in the type of
    /// [`Checkpoint::spec`].
    pub fn read(&self, name: &str, first: usize, bytes: &mut [u8]) -> Result<()> {
        let stored = &self.tensors[name];
        let file = &self.files[stored.file];
        if stored.stored == stored.read {
            return Ok(file.read_at(name, (first * stored.read.bytes()) as u64, bytes)?);
        }
        let mut values = vec![0f32; PIECE_VALUES.min(bytes.len() / 2)];
        let mut first = first;
        for bytes in bytes.chunks_mut(2 * PIECE_VALUES) {
            let values = &mut values[..bytes.len() / 2];
            file.read_at(name, (first * stored.stored.bytes()) as u64, bytemuck::cast_slice_mut(values))?;
            narrow(Origin { path: file.path(), tensor: name, first }, values, stored.read, bytes)?;
            first += values.len();
        }
        Ok(())
    }

    /// All neuron rows are of one 16-bit type, and `--dtype` asks for nothing that would lose precision in silence.
    fn check_dtypes(&self, narrow_to: Option<Dtype>) -> Result<()> {
        for (name, stored) in self.tensors.iter().filter(|(_, stored)| stored.shape.len() == 2) {
            let wrong = |problem: String| {
                let path = self.files[stored.file].path().into();
                Err(Error::Format(np_formats::Error::Tensor { path, tensor: name.clone(), problem }))
            };
            if name.contains(".mlp.") && stored.read != self.dtype {
                let (this, other) = (stored.read.name(), self.dtype.name());
                return wrong(format!("is {this}, but other MLP tensors are {other}; all must be of one type"));
            }
            if narrow_to.is_some_and(|wanted| stored.stored != Dtype::F32 && stored.stored != wanted) {
                let name = stored.stored.name();
                return wrong(format!("is {name} and stays so: --dtype says what F32 becomes; leave it out"));
            }
        }
        Ok(())
    }

    /// A tied model may still bring a head. It is not used, which must not pass in silence if it differs.
    fn compare_tied_head(&mut self) -> Result<()> {
        if !self.geometry.tied_embedding || !self.tensors.contains_key(HEAD) {
            return Ok(());
        }
        if self.spec(HEAD).dtype != self.spec(EMBEDDING).dtype || !self.same_values(HEAD, EMBEDDING)? {
            let place = self.directory.display();
            self.warnings.push(format!(
                "{place}: {HEAD} differs from {EMBEDDING}, but config.json ties them: the embedding is used as the head"
            ));
        }
        Ok(())
    }

    fn same_values(&self, one: &str, other: &str) -> Result<bool> {
        let spec = self.spec(one);
        let value_bytes = spec.dtype.bitsize() / 8;
        let total = spec.bytes() / value_bytes;
        let (mut left, mut right) = (Vec::new(), Vec::new());
        for first in (0..total).step_by(PIECE_VALUES) {
            let bytes = PIECE_VALUES.min(total - first) * value_bytes;
            left.resize(bytes, 0);
            right.resize(bytes, 0);
            self.read(one, first, &mut left)?;
            self.read(other, first, &mut right)?;
            if left != right {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Finds every tensor in its file and decides as what it is read.
fn index(located: &Located, files: &[TensorFile], narrow_to: Dtype) -> Result<BTreeMap<String, Stored>> {
    assert!(narrow_to != Dtype::F32, "F32 is not narrower than F32");
    let mut tensors = BTreeMap::new();
    for (number, file) in files.iter().enumerate() {
        let wrong = |tensor: &str, problem: String| np_formats::Error::Tensor {
            path: file.path().into(),
            tensor: tensor.into(),
            problem,
        };
        for name in file.names() {
            if is_harmless(&name) {
                continue;
            }
            let spec = file.spec(&name).expect("a name of the file");
            let dtype_name = format!("{:?}", spec.dtype);
            let Some(stored) = Dtype::from_name(&dtype_name) else {
                return Err(Error::UnsupportedDtype { path: file.path().into(), tensor: name, dtype: dtype_name });
            };
            if !located.places(&name, number) {
                return Err(wrong(&name, "is not placed in this file by the index; fetch both again".into()).into());
            }
            let read = if stored == Dtype::F32 && spec.shape.len() == 2 { narrow_to } else { stored };
            tensors.insert(name, Stored { file: number, stored, read, shape: spec.shape });
        }
        for name in located.placed_in(number) {
            if !tensors.contains_key(name) && !is_harmless(name) {
                return Err(wrong(
                    name,
                    "is not there, although the index places it in this file; fetch both again".into(),
                )
                .into());
            }
        }
    }
    Ok(tensors)
}

/// Whether the embedding is the head: as the config says, or, where it says nothing, when there is no head.
fn is_tied(config: &str, has_head: bool) -> bool {
    let config: Value = serde_json::from_str(config).unwrap_or_default();
    config.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(!has_head)
}

#[cfg(test)]
#[path = "checkpoint_tests.rs"]
mod tests;
