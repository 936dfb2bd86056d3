//! Which files of a directory hold the tensors of a checkpoint.

use crate::error::{Error, Result, io_error};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Name of the file of a checkpoint that is not sharded.
pub const TENSORS_NAME: &str = "model.safetensors";
/// Name of the index of a sharded checkpoint.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

/// The files, and what the index says about them.
#[derive(Debug)]
pub struct Located {
    files: Vec<PathBuf>,
    /// File number of each tensor; `None` without an index.
    placement: Option<BTreeMap<String, usize>>,
}

impl Located {
    /// The files, in the order of their names.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Whether tensor `name` belongs in file number `file`.
    pub fn places(&self, name: &str, file: usize) -> bool {
        self.placement.as_ref().is_none_or(|placement| placement.get(name) == Some(&file))
    }

    /// The tensors that the index places in file number `file`.
    pub fn placed_in(&self, file: usize) -> impl Iterator<Item = &str> {
        let placed = self.placement.iter().flatten();
        placed.filter(move |(_, place)| **place == file).map(|(name, _)| name.as_str())
    }
}

/// Finds `model.safetensors`, or the shards that `model.safetensors.index.json` names. Other files of tensors that lie
/// beside them are ignored.
pub fn locate(directory: &Path) -> Result<Located> {
    let single = directory.join(TENSORS_NAME);
    if single.is_file() {
        return Ok(Located { files: vec![single], placement: None });
    }
    let index = directory.join(INDEX_NAME);
    if index.is_file() { read_index(directory, &index) } else { Err(nothing_found(directory)) }
}

/// The shards that an index names, sorted, and the number of the shard of each tensor.
pub fn parse_index(index: &Path, text: &str) -> Result<(Vec<String>, BTreeMap<String, usize>)> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let parsed: Index = serde_json::from_str(text)
        .map_err(|source| Error::Format(np_formats::Error::Json { path: index.into(), source }))?;
    let mut shards: Vec<String> = parsed.weight_map.values().cloned().collect();
    shards.sort();
    shards.dedup();
    // A shard lies beside its index; a name that leads elsewhere is damage or worse.
    if let Some(shard) = shards.iter().find(|shard| !is_plain_name(shard)) {
        let problem = format!("names {shard:?}, which is not a file beside it; fetch the index again");
        return Err(Error::Source { path: index.into(), problem });
    }
    let number = |shard: &String| shards.binary_search(shard).expect("a shard of the list");
    let placement = parsed.weight_map.iter().map(|(name, shard)| (name.clone(), number(shard))).collect();
    Ok((shards, placement))
}

fn read_index(directory: &Path, index: &Path) -> Result<Located> {
    let text = fs::read_to_string(index).map_err(io_error(index, "read"))?;
    let (shards, placement) = parse_index(index, &text)?;
    let missing: Vec<_> = shards.iter().filter(|shard| !directory.join(shard).is_file()).cloned().collect();
    if !missing.is_empty() {
        return Err(Error::MissingShards { index: index.into(), missing, total: shards.len() });
    }
    Ok(Located { files: shards.iter().map(|shard| directory.join(shard)).collect(), placement: Some(placement) })
}

fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}

fn nothing_found(directory: &Path) -> Error {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    Error::Source { path: directory.into(), problem: explain_absence(&names) }
}

/// Says what a directory or repository with files of these names holds instead of tensors that can be read, and what to
/// do about that.
pub fn explain_absence(names: &[String]) -> String {
    let ending = |ending: &str| -> Vec<&str> {
        let mut found: Vec<&str> = names.iter().map(String::as_str).filter(|name| name.ends_with(ending)).collect();
        found.sort_unstable();
        found
    };
    let (pickles, tensors, ggufs) = (ending(".bin"), ending(".safetensors"), ending(".gguf"));
    if tensors.iter().any(|name| name.starts_with("consolidated")) {
        "only Mistral's own consolidated.safetensors is there, whose tensors have other names; \
         fetch the model-*.safetensors of the same repository"
            .into()
    } else if !tensors.is_empty() {
        format!("{INDEX_NAME} is missing beside {}; fetch it from the same repository", tensors.join(", "))
    } else if !pickles.is_empty() {
        format!(
            "only PyTorch files are there ({}); convert them once: python3 -c \"from transformers import \
             AutoModelForCausalLM as M; M.from_pretrained('DIRECTORY').save_pretrained('CONVERTED')\"",
            pickles.join(", ")
        )
    } else if !ggufs.is_empty() {
        format!("holds {}; fetch that file and name it instead of the directory", ggufs.join(", "))
    } else {
        format!("neither {TENSORS_NAME} nor {INDEX_NAME} is there; fetch the model again")
    }
}
