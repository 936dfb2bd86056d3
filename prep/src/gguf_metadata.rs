//! Typed access to the metadata of a GGUF file.

use crate::error::{Error, Result};
use candle_core::quantized::gguf_file::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The metadata of one file. A key that begins with a dot is one of the file's architecture.
pub struct Metadata {
    path: PathBuf,
    architecture: String,
    values: HashMap<String, Value>,
}

impl Metadata {
    /// Takes the metadata of the file at `path`.
    pub fn new(path: &Path, values: HashMap<String, Value>) -> Result<Self> {
        let mut metadata = Self { path: path.into(), architecture: String::new(), values };
        metadata.architecture = metadata.need("general.architecture", Self::text)?.to_string();
        Ok(metadata)
    }

    /// The architecture's name, such as `llama`.
    pub fn architecture(&self) -> &str {
        &self.architecture
    }

    /// The value of a key that must be there; `typed` is one of the readers below.
    pub fn need<'a, T>(&'a self, key: &str, typed: impl FnOnce(&'a Self, &str) -> Result<Option<T>>) -> Result<T> {
        typed(self, key)?.ok_or_else(|| self.wrong(key, "is missing; take another conversion of the model"))
    }

    /// A whole number, if the key is there.
    pub fn number(&self, key: &str) -> Result<Option<u64>> {
        let whole = |value: &Value| match value {
            Value::I32(value) => u64::try_from(*value).ok(),
            Value::I64(value) => u64::try_from(*value).ok(),
            Value::Bool(_) => None,
            other => other.to_u64().ok(),
        };
        self.typed(key, whole, "must be a whole number")
    }

    /// A fraction, if the key is there: the shortest decimal that gives the stored single-precision value.
    pub fn fraction(&self, key: &str) -> Result<Option<f64>> {
        let shortest = |value: &Value| value.to_f32().ok()?.to_string().parse().ok();
        self.typed(key, shortest, "must be a fraction")
    }

    /// Yes or no, if the key is there.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, |value| value.to_bool().ok(), "must be true or false")
    }

    /// A string, if the key is there.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, text_of, "must be a string")
    }

    /// A list of strings, if the key is there.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&str>>> {
        self.typed(key, |value| items(value)?.map(text_of).collect(), "must be a list of strings")
    }

    /// A list of whole numbers, if the key is there.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<i32>>> {
        let number = |value: &Value| value.to_i32().ok();
        self.typed(key, |value| items(value)?.map(number).collect(), "must be a list of 32-bit numbers")
    }

    /// The error for a value that is not as it must be.
    pub fn wrong(&self, key: &str, problem: &str) -> Error {
        Error::Source { path: self.path.clone(), problem: format!("metadata {}: {problem}", self.full(key)) }
    }

    fn typed<'a, T>(&'a self, key: &str, read: impl FnOnce(&'a Value) -> Option<T>, kind: &str) -> Result<Option<T>> {
        match self.values.get(&self.full(key)) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.wrong(key, kind)),
        }
    }

    fn full(&self, key: &str) -> String {
        if key.starts_with('.') { format!("{}{key}", self.architecture) } else { key.into() }
    }
}

fn text_of(value: &Value) -> Option<&str> {
    value.to_string().ok().map(String::as_str)
}

fn items(value: &Value) -> Option<impl Iterator<Item = &Value>> {
    value.to_vec().ok().map(|items| items.iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> Metadata {
        let values = [
            ("general.architecture", Value::String("llama".into())),
            ("llama.block_count", Value::U32(3)),
            ("llama.eps", Value::F32(1e-5)),
            ("words", Value::Array(vec![Value::String("a".into()), Value::String("b".into())])),
        ];
        let values = values.into_iter().map(|(key, value)| (key.to_string(), value)).collect();
        Metadata::new(Path::new("m.gguf"), values).unwrap()
    }

    #[test]
    fn values_come_in_the_type_asked_for() {
        let metadata = metadata();
        assert_eq!(metadata.number(".block_count").unwrap(), Some(3));
        assert_eq!(metadata.fraction(".eps").unwrap(), Some(1e-5));
        assert_eq!(metadata.texts("words").unwrap(), Some(vec!["a", "b"]));
        assert_eq!(metadata.flag("absent").unwrap(), None);
    }

    #[test]
    fn a_wrong_type_and_an_absent_key_are_named() {
        let metadata = metadata();
        let message = metadata.number("words").unwrap_err().to_string();
        assert!(message.contains("m.gguf") && message.contains("words: must be a whole number"), "{message}");
        let message = metadata.need(".context_length", Metadata::number).unwrap_err().to_string();
        assert!(message.contains("llama.context_length: is missing"), "{message}");
    }
}
