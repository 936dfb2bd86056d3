//! Text to tokens and back, and what a checkpoint says about its own text: BOS, EOS, chat template.

use crate::chat_template::{ChatTemplate, Message};
use np_formats::{Error, Result};
use serde_json::Value;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

/// The tokenizer's vocabulary, merges and pipeline.
const TOKENIZER_NAME: &str = "tokenizer.json";
/// Which of its tokens are special, and often the chat template.
const TOKENIZER_CONFIG_NAME: &str = "tokenizer_config.json";
const GENERATION_CONFIG_NAME: &str = "generation_config.json";
const CONFIG_NAME: &str = "config.json";
const TEMPLATE_NAME: &str = "chat_template.jinja";
/// What stands for bytes that are no character.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// A checkpoint's tokenizer and conventions.
pub struct Text {
    tokenizer: Tokenizer,
    path: PathBuf,
    bos: Option<u32>,
    adds_bos: bool,
    eos: Vec<u32>,
    template: Option<ChatTemplate>,
    notes: Vec<String>,
}

impl Text {
    /// Reads `tokenizer.json` and, those that exist, `tokenizer_config.json`, `generation_config.json`, `config.json`
    /// and `chat_template.jinja` of the directory.
    ///
    /// # Errors
    /// Names the file and the key that is missing or wrong.
    pub fn load(directory: &Path) -> Result<Self> {
        let path = directory.join(TOKENIZER_NAME);
        let bytes = read(&path)?.ok_or_else(|| Error::Missing {
            path: path.clone(),
            remedy: "copy it from the model's checkpoint; a tokenizer.model alone is not supported",
        })?;
        let tokenizer = Tokenizer::from_bytes(bytes)
            .map_err(|error| Error::Header { path: path.clone(), problem: one_line(&*error) })?;

        let tokenizer_config = Keys::load(directory.join(TOKENIZER_CONFIG_NAME))?;
        let generation_config = Keys::load(directory.join(GENERATION_CONFIG_NAME))?;
        let config = Keys::load(directory.join(CONFIG_NAME))?;

        let named_bos = tokenizer_config.token("bos_token", &tokenizer)?;
        let first = tokenizer.encode("", true).ok().and_then(|encoding| encoding.get_ids().first().copied());
        let bos = named_bos.or_else(|| config.ids("bos_token_id").ok()?.first().copied()).or(first);
        let adds_bos = match tokenizer_config.flag("add_bos_token")? {
            Some(adds_bos) => adds_bos,
            None => bos.is_some() && first == bos,
        };

        let mut eos = config.ids("eos_token_id")?;
        eos.extend(generation_config.ids("eos_token_id")?);
        eos.extend(tokenizer_config.token("eos_token", &tokenizer)?);
        eos.sort_unstable();
        eos.dedup();

        let template = template(directory, &tokenizer_config)?;
        let mut notes = Vec::new();
        if template.is_none() {
            notes.push(format!("{}: no chat template; prompts are taken as they are", directory.display()));
        }
        if eos.is_empty() {
            notes.push(format!("{}: no end-of-text token; only a limit ends a text", directory.display()));
        }
        Ok(Self { tokenizer, path, bos, adds_bos, eos, template, notes })
    }

    /// The tokens of `text`, special tokens written out in it included. With `add_bos`, for text that begins a
    /// sequence, exactly one BOS stands first if the checkpoint wants one, whether or not the text has it already.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode(&self, text: &str, add_bos: bool) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|error| self.failed(&*error))?;
        match self.bos {
            Some(bos) if add_bos && self.adds_bos => {
                let rest = encoding.get_ids().iter().copied().skip_while(|&id| id == bos);
                Ok(std::iter::once(bos).chain(rest).collect())
            }
            _ => Ok(encoding.get_ids().to_vec()),
        }
    }

    /// The text of `ids`, without special tokens. Bytes that are no character become replacement characters.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer.decode(ids, true).map_err(|error| self.failed(&*error))
    }

    /// The text of a conversation as the model was trained to see it. With `add_generation_prompt` it ends where the
    /// model's answer begins. Without a template (see [`Self::has_template`]) it is the messages' text, line by line.
    ///
    /// # Errors
    /// When the template refuses the messages.
    pub fn chat(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        match &self.template {
            Some(template) => template.render(messages, add_generation_prompt),
            None => Ok(messages.iter().map(|message| message.content.as_str()).collect::<Vec<_>>().join("\n")),
        }
    }

    /// Whether the checkpoint has a chat template.
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// Whether `id` ends a text.
    pub fn is_eos(&self, id: u32) -> bool {
        self.eos.contains(&id)
    }

    /// All tokens that end a text, ascending.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// What the checkpoint lacks, one sentence each, to be shown once.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Decodes tokens as they come.
    pub fn decoder(&self) -> Decoder<'_> {
        Decoder { text: self, ids: Vec::new(), shown: 0 }
    }

    fn failed(&self, error: &(dyn std::error::Error + 'static)) -> Error {
        Error::Header { path: self.path.clone(), problem: one_line(error) }
    }
}

/// Decodes tokens as they come, in whole characters: the parts joined are the whole.
///
/// A tokenizer may treat a token by what stands before it (a leading space, bytes of one character), so the tokens last
/// shown are decoded again with each new one and what they gave is cut off.
pub struct Decoder<'a> {
    text: &'a Text,
    /// The tokens last shown, then those held back.
    ids: Vec<u32>,
    /// Of `ids`, the number shown.
    shown: usize,
}

impl Decoder<'_> {
    /// The text that `id` completes; empty while a character is incomplete.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let (before, after) = (self.text.decode(&self.ids[..self.shown])?, self.text.decode(&self.ids)?);
        match after.strip_prefix(before.as_str()) {
            Some(new) if !new.is_empty() && !new.ends_with(REPLACEMENT) => {
                let new = new.to_owned();
                self.ids.drain(..self.shown);
                self.shown = self.ids.len();
                Ok(new)
            }
            _ => Ok(String::new()),
        }
    }

    /// What is held back: bytes that never became a character, as replacement characters.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn finish(self) -> Result<String> {
        let (before, after) = (self.text.decode(&self.ids[..self.shown])?, self.text.decode(&self.ids)?);
        match after.strip_prefix(before.as_str()) {
            Some(new) => Ok(new.to_owned()),
            // A decoder that gives up on a run of bytes as a whole takes back characters that were shown already.
            None => self.text.decode(&self.ids[self.shown..]),
        }
    }
}

/// The chat template: a file of its own wins, then the tokenizer's config.
fn template(directory: &Path, tokenizer_config: &Keys) -> Result<Option<ChatTemplate>> {
    const KEY: &str = "chat_template";
    let specials = tokenizer_config.special_tokens();
    let path = directory.join(TEMPLATE_NAME);
    if let Some(bytes) = read(&path)? {
        let source = String::from_utf8(bytes)
            .map_err(|_| Error::Header { path: path.clone(), problem: "not UTF-8 text".into() })?;
        return ChatTemplate::compile(source, path, KEY, specials).map(Some);
    }
    let path = &tokenizer_config.path;
    let source = match tokenizer_config.get(KEY) {
        Value::Null => return Ok(None),
        Value::String(source) => source,
        Value::Array(named) => {
            let default = named.iter().find(|entry| entry["name"] == "default");
            let default = default.and_then(|entry| entry["template"].as_str());
            &default.ok_or_else(|| tokenizer_config.wrong(KEY, "a list without a template named `default`"))?.to_owned()
        }
        _ => return Err(tokenizer_config.wrong(KEY, "neither a text nor a list of named templates")),
    };
    ChatTemplate::compile(source.clone(), path.clone(), KEY, specials).map(Some)
}

/// The keys of one JSON file; none if there is no such file.
struct Keys {
    path: PathBuf,
    value: Value,
}

impl Keys {
    fn load(path: PathBuf) -> Result<Self> {
        let value = match read(&path)? {
            Some(bytes) => {
                serde_json::from_slice(&bytes).map_err(|source| Error::Json { path: path.clone(), source })?
            }
            None => Value::Null,
        };
        Ok(Self { path, value })
    }

    /// The key's value, null when it is absent.
    fn get(&self, key: &str) -> &Value {
        &self.value[key]
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            Value::Null => Ok(None),
            Value::Bool(flag) => Ok(Some(*flag)),
            _ => Err(self.wrong(key, "neither true nor false")),
        }
    }

    /// One token id, a list of them or none.
    fn ids(&self, key: &str) -> Result<Vec<u32>> {
        let value = self.get(key);
        let values = match value {
            Value::Null => &[],
            Value::Array(values) => values.as_slice(),
            value => std::slice::from_ref(value),
        };
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        values.iter().map(|value| id(value).ok_or_else(|| self.wrong(key, "not a token id"))).collect()
    }

    /// The id of a token that is named by its text.
    fn token(&self, key: &str, tokenizer: &Tokenizer) -> Result<Option<u32>> {
        let Some(token) = token_text(self.get(key)) else { return Ok(None) };
        match tokenizer.token_to_id(token) {
            Some(id) => Ok(Some(id)),
            None => Err(self.wrong(key, &format!("{TOKENIZER_NAME} has no token `{token}`"))),
        }
    }

    /// Every `..._token` with its text, as templates use them.
    fn special_tokens(&self) -> Vec<(String, String)> {
        let keys = self.value.as_object().into_iter().flatten();
        keys.filter(|(key, _)| key.ends_with("_token"))
            .filter_map(|(key, value)| Some((key.clone(), token_text(value)?.to_owned())))
            .collect()
    }

    fn wrong(&self, key: &str, problem: &str) -> Error {
        Error::Config { path: self.path.clone(), key: key.into(), problem: problem.into() }
    }
}

/// A token's text: the value itself or its `content`.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}

/// The file's bytes, or nothing if there is no such file.
fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Io { path: path.into(), action: "read", source }),
    }
}

fn one_line(error: &(dyn std::error::Error + 'static)) -> String {
    error.to_string().replace('\n', " ")
}

#[cfg(test)]
#[path = "text_tests.rs"]
mod tests;
