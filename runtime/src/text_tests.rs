//! Tests of `text.rs` on tokenizers made here.

use super::*;
use serde_json::json;

/// Writes a checkpoint's text files; the tokenizer is byte-level BPE, or with byte fallback as Llama 2 has it.
fn directory(tokenizer: &Value, files: &[(&str, Value)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join(TOKENIZER_NAME), tokenizer.to_string()).unwrap();
    for (name, value) in files {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        fs::write(directory.path().join(name), text).unwrap();
    }
    directory
}

fn load(files: &[(&str, Value)]) -> Text {
    Text::load(directory(&byte_level(), files).path()).unwrap()
}

/// Ids 0 to 2 are `<s>`, `</s>` and `<|end|>`, then the 256 bytes, then two merges.
fn byte_level() -> Value {
    let mut alphabet: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut vocabulary = serde_json::Map::new();
    let specials = ["<s>", "</s>", "<|end|>"];
    let tokens = specials.map(str::to_owned).into_iter().chain(alphabet.iter().map(char::to_string));
    for token in tokens.chain(["he".into(), "ll".into()]) {
        vocabulary.insert(token, vocabulary.len().into());
    }
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": added(&specials),
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocabulary, "merges": ["h e", "l l"]},
    })
}

/// Ids 0 to 2 are `<unk>`, `<s>` and `</s>`, then the 256 bytes, then `▁` and `a`; `<s>` is added by its processor.
fn byte_fallback() -> Value {
    let mut vocabulary = serde_json::Map::new();
    let specials = ["<unk>", "<s>", "</s>"];
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let tokens = specials.map(str::to_owned).into_iter().chain(bytes);
    for token in tokens.chain(["▁".into(), "a".into()]) {
        vocabulary.insert(token, vocabulary.len().into());
    }
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added(&specials),
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocabulary, "merges": []},
    })
}

fn added(specials: &[&str]) -> Value {
    let token = |(id, content): (usize, &&str)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    specials.iter().enumerate().map(token).collect()
}

/// The parts are whole characters and joined are the whole; gives the parts.
#[track_caller]
fn check_stream(text: &Text, ids: &[u32]) -> Vec<String> {
    let mut decoder = text.decoder();
    let mut parts: Vec<String> = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
    assert!(parts.iter().all(|part| !part.ends_with(REPLACEMENT)), "{parts:?}");
    parts.push(decoder.finish().unwrap());
    assert_eq!(parts.concat(), text.decode(ids).unwrap());
    parts
}

#[test]
fn text_goes_there_and_back() {
    for tokenizer in [byte_level(), byte_fallback()] {
        let text = Text::load(directory(&tokenizer, &[]).path()).unwrap();
        for words in ["hello, world", "", " two  spaces ", "naïve 🙂 テスト\n", "a🙂"] {
            let ids = text.encode(words, false).unwrap();
            assert_eq!(text.decode(&ids).unwrap(), words);
            check_stream(&text, &ids);
        }
    }
}

#[test]
fn a_stream_never_splits_a_character() {
    for tokenizer in [byte_level(), byte_fallback()] {
        let text = Text::load(directory(&tokenizer, &[]).path()).unwrap();
        let ids = text.encode("a🙂b", false).unwrap();
        assert!(ids.len() >= 6, "the emoji must be several tokens: {ids:?}");
        let parts = check_stream(&text, &ids);
        assert!(parts.contains(&"🙂".to_owned()), "{parts:?}");
        // Every cut inside the emoji ends in replacement characters and no panic.
        for count in 0..ids.len() {
            check_stream(&text, &ids[..count]);
        }
        // Bytes that are never a character, then text again.
        let broken: Vec<u32> = [&ids[..ids.len() - 2], &ids[ids.len() - 1..], &ids[..]].concat();
        check_stream(&text, &broken);
    }
}

#[test]
fn a_stream_keeps_what_a_decoder_takes_back() {
    let text = Text::load(directory(&byte_fallback(), &[]).path()).unwrap();
    let emoji = text.encode("🙂", false).unwrap();
    // The tokenizer gives up on the whole run of bytes when its end is cut; what was shown stays shown.
    let cut = [&emoji[..], &emoji[1..3]].concat();
    let mut decoder = text.decoder();
    let shown: String = cut.iter().map(|&id| decoder.push(id).unwrap()).collect();
    assert_eq!(shown, "🙂");
    assert_eq!(decoder.finish().unwrap(), "\u{FFFD}\u{FFFD}");
}

#[test]
fn special_tokens_are_read_and_not_shown() {
    let text = load(&[]);
    let ids = text.encode("<s>he<|end|>", false).unwrap();
    assert_eq!(ids, [0, 259, 2]);
    assert_eq!(text.decode(&ids).unwrap(), "he");
    assert_eq!(check_stream(&text, &ids).concat(), "he");
    // An id beyond the vocabulary has no text.
    assert_eq!(text.decode(&[259, 99_999]).unwrap(), "he");
}

#[test]
fn one_bos() {
    let config = |value| [(TOKENIZER_CONFIG_NAME, value)];
    let with = load(&config(json!({"bos_token": "<s>", "add_bos_token": true})));
    assert_eq!(with.encode("he", true).unwrap(), [0, 259]);
    assert_eq!(with.encode("<s>he", true).unwrap(), [0, 259]);
    assert_eq!(with.encode("<s><s>he", true).unwrap(), [0, 259]);
    assert_eq!(with.encode("he", false).unwrap(), [259]);
    assert_eq!(with.encode("", true).unwrap(), [0]);
    let without = load(&config(json!({"bos_token": "<s>", "add_bos_token": false})));
    assert_eq!(without.encode("he", true).unwrap(), [259]);
    assert_eq!(without.encode("<s>he", true).unwrap(), [0, 259]);
    let silent = load(&config(json!({"bos_token": {"content": "<s>"}, "add_bos_token": null})));
    assert_eq!(silent.encode("he", true).unwrap(), [259]);
    // Only the processor says so: with the token named, not named, and overruled.
    for (value, expected) in [
        (json!({"bos_token": "<s>"}), &[1, 259, 260][..]),
        (json!({}), &[1, 259, 260]),
        (json!({"add_bos_token": false}), &[259, 260]),
    ] {
        let text = Text::load(directory(&byte_fallback(), &config(value)).path()).unwrap();
        assert_eq!(text.encode("a", true).unwrap(), expected);
    }
    // Only config.json names it.
    let by_id = load(&[(CONFIG_NAME, json!({"bos_token_id": 1})), config(json!({"add_bos_token": true}))[0].clone()]);
    assert_eq!(by_id.encode("he", true).unwrap(), [1, 259]);
}

#[test]
fn eos_is_the_union() {
    let text = load(&[
        (CONFIG_NAME, json!({"eos_token_id": 7})),
        (GENERATION_CONFIG_NAME, json!({"eos_token_id": [9, 7, 1]})),
        (TOKENIZER_CONFIG_NAME, json!({"eos_token": {"content": "<|end|>"}})),
    ]);
    assert_eq!(text.eos(), [1, 2, 7, 9]);
    assert!(text.is_eos(9) && !text.is_eos(0));
    let none = load(&[(CONFIG_NAME, json!({"eos_token_id": null}))]);
    assert!(none.eos().is_empty() && none.notes().iter().any(|note| note.contains("end-of-text")));
}

#[test]
fn the_template_file_wins_then_the_default_of_a_list() {
    let hi = [Message { role: "user".into(), content: "Hi".into() }];
    let list = json!([{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ bos_token }}"}]);
    let config = |template| (TOKENIZER_CONFIG_NAME, json!({"bos_token": "<s>", "chat_template": template}));
    let check = |files: &[(&str, Value)], expected: &str| {
        let text = load(files);
        assert_eq!(text.chat(&hi, true).unwrap(), expected);
        assert_eq!(text.has_template(), text.notes().iter().all(|note| !note.contains("chat template")));
    };
    check(&[config(json!("S{{ messages[0].content }}"))], "SHi");
    check(&[config(list.clone())], "D<s>");
    check(&[config(list), (TEMPLATE_NAME, json!("F{{ bos_token }}"))], "F<s>");
    check(&[config(Value::Null)], "Hi");
    check(&[], "Hi");
}

/// The message is one line and names the file and what else is expected.
#[track_caller]
fn check_error(name: &str, content: &str, expected: &[&str]) {
    let directory = directory(&byte_level(), &[(name, json!(content))]);
    let error = Text::load(directory.path()).err().expect("it is wrong").to_string();
    assert!(error.contains(name) && !error.contains('\n'), "{error}");
    assert!(expected.iter().all(|expected| error.contains(expected)), "{error}");
}

#[test]
fn errors_name_file_and_key() {
    check_error(TOKENIZER_NAME, "{", &[]);
    check_error(TOKENIZER_NAME, "{}", &[]);
    check_error(TOKENIZER_CONFIG_NAME, "[1,", &[]);
    check_error(TOKENIZER_CONFIG_NAME, r#"{"eos_token": "<x>"}"#, &["eos_token", "<x>"]);
    check_error(TOKENIZER_CONFIG_NAME, r#"{"bos_token": "<x>"}"#, &["bos_token", "<x>"]);
    check_error(TOKENIZER_CONFIG_NAME, r#"{"add_bos_token": 1}"#, &["add_bos_token"]);
    check_error(TOKENIZER_CONFIG_NAME, r#"{"chat_template": [{"name": "x"}]}"#, &["chat_template", "default"]);
    check_error(TOKENIZER_CONFIG_NAME, r#"{"chat_template": 3}"#, &["chat_template"]);
    check_error(TOKENIZER_CONFIG_NAME, r#"{"chat_template": "{% if %}"}"#, &["chat_template", "line 1"]);
    check_error(TEMPLATE_NAME, "\n{% endfor %}", &["line 2"]);
    check_error(CONFIG_NAME, r#"{"eos_token_id": "2"}"#, &["eos_token_id"]);
    check_error(GENERATION_CONFIG_NAME, r#"{"eos_token_id": [2, -1]}"#, &["eos_token_id"]);
    let empty = tempfile::tempdir().unwrap();
    let error = Text::load(empty.path()).err().expect("there is no tokenizer").to_string();
    assert!(error.contains("tokenizer.json: not found"), "{error}");
}
