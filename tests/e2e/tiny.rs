//! A checkpoint of a tiny model with random weights, as the hub would serve it, and text to go with it.

use half::f16;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256Plus;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Sizes of a tiny model. More than ten layers, so that an order by name shows; 16-bit rows that need padding.
#[derive(Clone, Copy)]
pub struct Tiny {
    /// Decides every weight.
    pub seed: u64,
    /// Size of the residual stream.
    pub hidden: usize,
    /// Neurons of a layer.
    pub neurons: usize,
    /// Layers.
    pub layers: usize,
}

/// The tokens: one for each byte, then the end of a text.
const VOCABULARY: usize = 257;
const END: usize = 256;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

impl Tiny {
    /// The smallest model that has everything.
    pub fn new(seed: u64) -> Self {
        Self { seed, hidden: 64, neurons: 192, layers: 12 }
    }

    /// Writes the checkpoint into the new folder `folder`.
    pub fn write(&self, folder: &Path) {
        fs::create_dir_all(folder).expect("the folder can be made");
        let json = |name: &str, value: serde_json::Value| {
            fs::write(folder.join(name), value.to_string()).expect("the file can be written");
        };
        json("config.json", self.config());
        json("generation_config.json", serde_json::json!({ "eos_token_id": END }));
        json("tokenizer.json", tokenizer());
        json("tokenizer_config.json", serde_json::json!({ "eos_token": "<|end|>", "add_bos_token": false }));
        let tensors = self.tensors();
        let views = tensors.iter().map(|(name, (shape, bytes))| {
            let view = TensorView::new(Dtype::F16, shape.clone(), bytes).expect("shape and bytes agree");
            (name.as_str(), view)
        });
        let bytes = safetensors::serialize(views, None).expect("the tensors can be serialised");
        fs::write(folder.join("model.safetensors"), bytes).expect("the file can be written");
    }

    fn config(&self) -> serde_json::Value {
        serde_json::json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.neurons,
            "num_hidden_layers": self.layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": true,
            "eos_token_id": END,
            "torch_dtype": "float16",
        })
    }

    fn tensors(&self) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
        let mut random = Xoshiro256Plus::seed_from_u64(self.seed);
        let mut tensors = BTreeMap::new();
        let mut matrix = |name: String, rows: usize, columns: usize| {
            // Keeps the size of what passes through about the same.
            let scale = (3.0 / columns as f32).sqrt();
            let values = (0..rows * columns).map(|_| f16::from_f32(scale * random.gen_range(-1.0..1.0f32)));
            tensors.insert(name, (vec![rows, columns], values.flat_map(f16::to_le_bytes).collect()));
        };
        let (hidden, kv) = (self.hidden, self.hidden / HEADS * KV_HEADS);
        matrix("model.embed_tokens.weight".into(), VOCABULARY, hidden);
        for layer in 0..self.layers {
            let at = format!("model.layers.{layer}");
            matrix(format!("{at}.self_attn.q_proj.weight"), hidden, hidden);
            matrix(format!("{at}.self_attn.k_proj.weight"), kv, hidden);
            matrix(format!("{at}.self_attn.v_proj.weight"), kv, hidden);
            matrix(format!("{at}.self_attn.o_proj.weight"), hidden, hidden);
            matrix(format!("{at}.mlp.gate_proj.weight"), self.neurons, hidden);
            matrix(format!("{at}.mlp.up_proj.weight"), self.neurons, hidden);
            matrix(format!("{at}.mlp.down_proj.weight"), hidden, self.neurons);
        }
        let norm = || (vec![hidden], [f16::ONE.to_le_bytes(); 1].concat().repeat(hidden));
        tensors.insert("model.norm.weight".into(), norm());
        for layer in 0..self.layers {
            for name in ["input_layernorm", "post_attention_layernorm"] {
                tensors.insert(format!("model.layers.{layer}.{name}.weight"), norm());
            }
        }
        tensors
    }
}

/// Words in seeded random order, about `bytes` long.
pub fn text(seed: u64, bytes: usize) -> String {
    const WORDS: [&str; 12] =
        ["sea", "ship", "north", "the", "a", "of", "wind", "rope", "turns", "holds", "slowly", "under"];
    let mut random = Xoshiro256Plus::seed_from_u64(seed);
    let mut text = String::new();
    while text.len() < bytes {
        text.push_str(WORDS[random.gen_range(0..WORDS.len())]);
        text.push(if random.gen_range(0..9) == 0 { '\n' } else { ' ' });
    }
    text
}

/// A byte-level tokenizer without merges: a token is a byte.
fn tokenizer() -> serde_json::Value {
    let vocabulary: serde_json::Map<_, _> =
        (0..=255u8).map(|byte| (visible(byte).to_string(), serde_json::json!(byte))).collect();
    let byte_level = serde_json::json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
    });
    serde_json::json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": END, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        }],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": []
        }
    })
}

/// The character that stands for a byte in byte-level vocabularies: itself where it can be seen.
fn visible(byte: u8) -> char {
    let seen = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if seen(byte) {
        return char::from(byte);
    }
    let unseen_before = (0..byte).filter(|&other| !seen(other)).count() as u32;
    char::from_u32(256 + unseen_before).expect("these are letters")
}
