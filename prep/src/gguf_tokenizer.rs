//! The tokenizer files of a checkpoint, rebuilt from the metadata of a GGUF file.

use crate::error::Result;
use crate::gguf_metadata::Metadata;
use serde_json::{Map, Value, json};

/// Qwen2's pre-tokenizer, as its own tokenizer.json has it.
const QWEN2_SPLIT: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// Token types that GGUF tells apart: ordinary ones, ones that the user never types, ones that were added by hand.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// `tokenizer.json` and `tokenizer_config.json`.
pub struct TokenizerFiles {
    /// The tokenizer itself.
    pub tokenizer: Value,
    /// What surrounds it: special tokens, chat template.
    pub config: Value,
}

/// Rebuilds the files. Byte-level BPE with a pre-tokenizer that is known is supported, all else refused by name.
pub fn tokenizer_files(metadata: &Metadata) -> Result<TokenizerFiles> {
    const MODEL: &str = "tokenizer.ggml.model";
    let model = metadata.need(MODEL, Metadata::text)?;
    if model != "gpt2" {
        let problem = format!("{model:?} is not supported; import the Hugging Face directory of the model instead");
        return Err(metadata.wrong(MODEL, &problem));
    }
    let tokens = Tokens::read(metadata)?;
    Ok(TokenizerFiles { tokenizer: tokenizer(metadata, &tokens)?, config: config(metadata, &tokens)? })
}

struct Tokens<'a> {
    texts: Vec<&'a str>,
    types: Vec<i32>,
}

impl<'a> Tokens<'a> {
    fn read(metadata: &'a Metadata) -> Result<Self> {
        let texts = metadata.need("tokenizer.ggml.tokens", Metadata::texts)?;
        let types = metadata.numbers("tokenizer.ggml.token_type")?.unwrap_or_else(|| vec![NORMAL; texts.len()]);
        if types.len() != texts.len() {
            return Err(metadata.wrong("tokenizer.ggml.token_type", "is not as long as tokenizer.ggml.tokens"));
        }
        Ok(Self { texts, types })
    }

    /// The text of the token whose id stands under `key`.
    fn named(&self, metadata: &Metadata, key: &str) -> Result<Option<&'a str>> {
        let Some(id) = metadata.number(key)? else { return Ok(None) };
        match self.texts.get(id as usize) {
            Some(text) => Ok(Some(text)),
            None => Err(metadata.wrong(key, &format!("{id} is not a token: there are {}", self.texts.len()))),
        }
    }

    /// Tokens that are matched as a whole, before the text is split.
    fn added(&self) -> impl Iterator<Item = (usize, Value)> {
        let whole = |kind: i32| kind == CONTROL || kind == USER_DEFINED;
        self.types.iter().enumerate().filter(move |(_, kind)| whole(**kind)).map(|(id, kind)| {
            let entry = json!({
                "content": self.texts[id], "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": *kind == CONTROL,
            });
            (id, entry)
        })
    }
}

fn tokenizer(metadata: &Metadata, tokens: &Tokens) -> Result<Value> {
    const PRE: &str = "tokenizer.ggml.pre";
    let pre = metadata.need(PRE, Metadata::text)?;
    let byte_level = |use_regex: bool| {
        let mut level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
        level["use_regex"] = use_regex.into();
        level
    };
    let (normalizer, splits, special_in_vocabulary) = match pre {
        "smollm" => (Value::Null, json!([{"type": "Digits", "individual_digits": true}, byte_level(true)]), true),
        "qwen2" => {
            let split = json!({"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated",
                "invert": false});
            (json!({"type": "NFC"}), json!([split, byte_level(false)]), false)
        }
        other => {
            let problem = format!("{other:?} is not supported; import the Hugging Face directory of the model instead");
            return Err(metadata.wrong(PRE, &problem));
        }
    };
    // SmolLM2's own file lists its special tokens in the vocabulary too, Qwen2's does not.
    let ids = (0..tokens.texts.len()).filter(|&id| special_in_vocabulary || tokens.types[id] == NORMAL);
    let vocabulary: Map<String, Value> = ids.map(|id| (tokens.texts[id].to_string(), id.into())).collect();
    let merges = metadata.need("tokenizer.ggml.merges", Metadata::texts)?;
    let added = tokens.added().map(|(id, entry)| {
        let mut whole = Map::from_iter([("id".to_string(), Value::from(id))]);
        whole.extend(entry.as_object().cloned().unwrap_or_default());
        Value::Object(whole)
    });
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "post_processor": null,
        "decoder": byte_level(true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": merges,
        },
    }))
}

fn config(metadata: &Metadata, tokens: &Tokens) -> Result<Value> {
    let named = |key: &str| tokens.named(metadata, &format!("tokenizer.ggml.{key}_token_id"));
    // Qwen2 states a first token that it never uses.
    let first = if metadata.architecture() == "qwen2" { None } else { named("bos")? };
    let added: Map<String, Value> = tokens.added().map(|(id, entry)| (id.to_string(), entry)).collect();
    Ok(json!({
        "add_bos_token": metadata.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(false),
        "add_prefix_space": false,
        "added_tokens_decoder": added,
        "bos_token": first,
        "chat_template": metadata.text("tokenizer.chat_template")?,
        "clean_up_tokenization_spaces": false,
        "eos_token": named("eos")?,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": metadata.need(".context_length", Metadata::number)?,
        "pad_token": named("padding")?,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": named("unknown")?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_gguf::{metadata, with};
    use candle_core::quantized::gguf_file::Value as Gguf;
    use std::path::Path;
    use tokenizers::Tokenizer;

    fn files(changes: &[(&str, Option<Gguf>)]) -> Result<TokenizerFiles> {
        tokenizer_files(&Metadata::new(Path::new("m.gguf"), with(metadata("llama"), changes)).unwrap())
    }

    #[test]
    fn the_tokenizer_works_as_the_metadata_says() {
        let files = files(&[]).unwrap();
        let tokenizer = Tokenizer::from_bytes(serde_json::to_vec(&files.tokenizer).unwrap()).unwrap();
        let encoding = tokenizer.encode("ab a<end>7", false).unwrap();
        assert_eq!(encoding.get_tokens(), ["ab", "Ġ", "a", "<end>", "7"]);
        assert_eq!(tokenizer.decode(encoding.get_ids(), false).unwrap(), "ab a<end>7");
        assert_eq!(files.config["eos_token"], "<end>");
        assert_eq!(files.config["chat_template"], "{{ messages }}");
    }

    #[track_caller]
    fn check_refused(changes: &[(&str, Option<Gguf>)], words: &[&str]) {
        let message = files(changes).err().unwrap().to_string();
        for word in words {
            assert!(message.contains(word), "{message:?} lacks {word:?}");
        }
    }

    #[test]
    fn what_is_not_known_is_refused_by_name() {
        let text = |text: &str| Some(Gguf::String(text.into()));
        check_refused(&[("tokenizer.ggml.model", text("llama"))], &["m.gguf", "tokenizer.ggml.model", "Hugging Face"]);
        check_refused(&[("tokenizer.ggml.pre", text("falcon"))], &["tokenizer.ggml.pre", "falcon"]);
        check_refused(&[("tokenizer.ggml.tokens", None)], &["tokenizer.ggml.tokens", "missing"]);
        check_refused(&[("tokenizer.ggml.eos_token_id", Some(Gguf::U32(99)))], &["eos_token_id", "99"]);
        check_refused(&[("tokenizer.ggml.token_type", Some(Gguf::Array(vec![])))], &["token_type", "long"]);
    }
}
