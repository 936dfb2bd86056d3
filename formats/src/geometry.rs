//! What a model is, as data: sizes, and the few ways in which supported families differ.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// Type of stored weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub enum Dtype {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE single precision: norms and biases, never neuron rows.
    F32,
}

impl Dtype {
    /// Bytes of one value.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// The number that stands for this type in our files.
    pub const fn code(self) -> u16 {
        match self {
            Self::F16 => 1,
            Self::Bf16 => 2,
            Self::F32 => 3,
        }
    }

    /// The type with this number.
    pub const fn from_code(code: u16) -> Option<Self> {
        match code {
            1 => Some(Self::F16),
            2 => Some(Self::Bf16),
            3 => Some(Self::F32),
            _ => None,
        }
    }

    /// The name that safetensors uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
        }
    }

    /// The type that safetensors calls `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::F16, Self::Bf16, Self::F32].into_iter().find(|dtype| dtype.name() == name)
    }
}

/// How rotary frequencies are stretched.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Positions divided by a factor.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// Llama 3.1's: low frequencies divided, high ones kept, a smooth band between them.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f32,
        /// Wavelengths above `original_context / low_freq_factor` are divided.
        low_freq_factor: f32,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f32,
        /// Context that the model was first trained on.
        original_context: u32,
    },
}

/// Sizes and options of a SwiGLU transformer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Geometry {
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Neurons of one layer's MLP.
    pub intermediate: usize,
    /// Attention heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Longest context the model was made for.
    pub context_max: usize,
    /// Added to the mean square in RMS norms.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// How rotary frequencies are stretched.
    pub rope_scaling: RopeScaling,
    /// Attention sees this many positions back, if limited.
    pub sliding_window: Option<usize>,
    /// The head is the embedding.
    pub tied_embedding: bool,
    /// Query, key and value have biases.
    pub qkv_bias: bool,
    /// Queries and keys are normalised per head.
    pub qk_norm: bool,
}

/// Every id and count on disk fits its field.
const LAYERS_MAX: usize = u16::MAX as usize;
const SIZE_MAX: usize = 1 << 24;

impl Geometry {
    /// Width of all query heads together.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Reads a Hugging Face `config.json`; `path` is for messages.
    ///
    /// Families differ by what the config says, not by name, except where a family implies something that its
    /// configs leave out. Whatever would change the result and is not supported is refused by name.
    pub fn from_config(path: &Path, text: &str) -> Result<Self> {
        let json: Value = serde_json::from_str(text).map_err(|source| Error::Json { path: path.into(), source })?;
        let config = Config { path, json: &json };
        let family = json.get("model_type").and_then(Value::as_str).unwrap_or("llama");
        if !["llama", "mistral", "qwen2", "qwen3"].contains(&family) {
            return Err(config.refuse(
                "model_type",
                &format!("{family:?} is not supported; supported are llama, mistral, qwen2 and qwen3"),
            ));
        }
        let activation = json.get("hidden_act").and_then(Value::as_str).unwrap_or("silu");
        if activation != "silu" {
            return Err(config.refuse("hidden_act", &format!("{activation:?} is not supported; only silu is")));
        }
        for key in ["num_local_experts", "num_experts", "n_routed_experts"] {
            if json.get(key).is_some_and(|value| !value.is_null()) {
                return Err(config.refuse(key, "mixture-of-experts models are not supported"));
            }
        }
        if json.get("quantization_config").is_some_and(|value| !value.is_null()) {
            return Err(config.refuse("quantization_config", "take the checkpoint in F16, BF16 or F32 instead"));
        }
        for key in ["attention_bias", "mlp_bias"] {
            if json.get(key).and_then(Value::as_bool) == Some(true) && family != "qwen2" {
                return Err(config.refuse(key, "biases of this kind are not supported"));
            }
        }
        let hidden = config.size("hidden_size")?;
        let heads = config.size("num_attention_heads")?;
        let head_dim = match config.optional_size("head_dim")? {
            Some(head_dim) => head_dim,
            None if hidden % heads == 0 => hidden / heads,
            None => return Err(config.refuse("num_attention_heads", "does not divide hidden_size")),
        };
        let geometry = Self {
            layers: config.size("num_hidden_layers")?,
            hidden,
            intermediate: config.size("intermediate_size")?,
            heads,
            kv_heads: config.optional_size("num_key_value_heads")?.unwrap_or(heads),
            head_dim,
            vocab: config.size("vocab_size")?,
            context_max: config.optional_size("max_position_embeddings")?.unwrap_or(2_048),
            rms_norm_eps: config.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope_theta: config.rope_theta()?,
            rope_scaling: config.rope_scaling()?,
            sliding_window: config.sliding_window(family)?,
            tied_embedding: json.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false),
            qkv_bias: family == "qwen2",
            qk_norm: family == "qwen3",
        };
        geometry.check(&config)?;
        Ok(geometry)
    }

    fn check(&self, config: &Config) -> Result<()> {
        if self.layers > LAYERS_MAX {
            return Err(config.refuse("num_hidden_layers", &format!("must be at most {LAYERS_MAX}")));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(config.refuse("num_key_value_heads", "does not divide num_attention_heads"));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(config.refuse("head_dim", "must be even"));
        }
        Ok(())
    }
}

/// A parsed config and where it came from.
struct Config<'a> {
    path: &'a Path,
    json: &'a Value,
}

impl Config<'_> {
    fn refuse(&self, key: &str, problem: &str) -> Error {
        Error::Config { path: self.path.into(), key: key.into(), problem: problem.into() }
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.json.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| self.refuse(key, "must be a number")),
        }
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        match self.json.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64() {
                Some(size) if 0 < size && size <= SIZE_MAX as u64 => Ok(Some(size as usize)),
                _ => Err(self.refuse(key, &format!("must be a whole number from 1 to {SIZE_MAX}"))),
            },
        }
    }

    fn size(&self, key: &str) -> Result<usize> {
        self.optional_size(key)?.ok_or_else(|| self.refuse(key, "is missing"))
    }

    /// `rope_parameters` where the config nests them, else the config itself.
    fn rope(&self) -> &Value {
        self.json.get("rope_parameters").filter(|value| value.is_object()).unwrap_or(self.json)
    }

    fn rope_theta(&self) -> Result<f32> {
        let theta = self.rope().get("rope_theta").or_else(|| self.json.get("rope_theta"));
        match theta {
            Some(theta) => theta
                .as_f64()
                .filter(|theta| *theta > 0.0)
                .map(|theta| theta as f32)
                .ok_or_else(|| self.refuse("rope_theta", "must be a positive number")),
            // Nested parameters without a base are damage; old Llama configs leave the base out and mean 10,000.
            None if self.json.get("rope_parameters").is_some_and(Value::is_object) => {
                Err(self.refuse("rope_parameters.rope_theta", "is missing"))
            }
            None => Ok(10_000.0),
        }
    }

    fn rope_scaling(&self) -> Result<RopeScaling> {
        let nested = self.json.get("rope_parameters").filter(|value| value.is_object());
        let Some(scaling) = nested.or_else(|| self.json.get("rope_scaling")).filter(|value| value.is_object()) else {
            return Ok(RopeScaling::None);
        };
        let kind = scaling.get("rope_type").or_else(|| scaling.get("type")).and_then(Value::as_str);
        let field = |key: &str| {
            scaling
                .get(key)
                .and_then(Value::as_f64)
                .filter(|value| *value > 0.0)
                .map(|value| value as f32)
                .ok_or_else(|| self.refuse(&format!("rope_scaling.{key}"), "must be a positive number"))
        };
        match kind.unwrap_or("default") {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor: field("factor")? }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: field("factor")?,
                low_freq_factor: field("low_freq_factor")?,
                high_freq_factor: field("high_freq_factor")?,
                original_context: field("original_max_position_embeddings")? as u32,
            }),
            other => Err(self.refuse(
                "rope_scaling.rope_type",
                &format!("{other:?} is not supported; supported are default, linear and llama3"),
            )),
        }
    }

    fn sliding_window(&self, family: &str) -> Result<Option<usize>> {
        let used = self.json.get("use_sliding_window").and_then(Value::as_bool).unwrap_or(family == "mistral");
        if used { self.optional_size("sliding_window") } else { Ok(None) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(changes: &str) -> String {
        let mut base: Value = serde_json::from_str(
            r#"{"model_type": "llama", "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
                "num_attention_heads": 32, "head_dim": 128, "vocab_size": 131072, "rms_norm_eps": 1e-5}"#,
        )
        .unwrap();
        let changes: Value = serde_json::from_str(changes).unwrap();
        for (key, value) in changes.as_object().unwrap() {
            base[key] = value.clone();
        }
        base.to_string()
    }

    #[track_caller]
    fn check<T: PartialEq + std::fmt::Debug>(changes: &str, field: impl Fn(Geometry) -> T, expected: T) {
        let geometry = Geometry::from_config(Path::new("config.json"), &config(changes)).unwrap();
        assert_eq!(field(geometry), expected);
    }

    #[track_caller]
    fn check_refused(changes: &str, words: &[&str]) {
        let message = Geometry::from_config(Path::new("m/config.json"), &config(changes)).unwrap_err().to_string();
        for word in words.iter().chain(&["m/config.json"]) {
            assert!(message.contains(word), "{message:?} lacks {word:?}");
        }
    }

    #[test]
    fn what_configs_really_say() {
        check("{}", |g| (g.head_dim, g.kv_heads), (128, 32));
        check(r#"{"num_key_value_heads": 8}"#, |g| g.kv_heads, 8);
        check("{}", |g| g.rope_theta, 10_000.0);
        check(r#"{"model_type": "mistral", "sliding_window": null}"#, |g| g.sliding_window, None);
        check(r#"{"model_type": "mistral", "sliding_window": 4096}"#, |g| g.sliding_window, Some(4096));
        check(
            r#"{"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": false}"#,
            |g| (g.sliding_window, g.qkv_bias),
            (None, true),
        );
        check(r#"{"model_type": "qwen3"}"#, |g| g.qk_norm, true);
        check(r#"{"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}"#, |g| g.rope_theta, 5e5);
        check(
            r#"{"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}}"#,
            |g| g.rope_scaling,
            RopeScaling::Linear { factor: 2.0 },
        );
        check(
            r#"{"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}}"#,
            |g| g.rope_scaling,
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 },
        );
    }

    #[test]
    fn what_would_change_the_result_is_refused_by_name() {
        check_refused(r#"{"model_type": "gpt2"}"#, &["model_type", "gpt2"]);
        check_refused(r#"{"hidden_act": "gelu"}"#, &["hidden_act", "gelu"]);
        check_refused(r#"{"num_local_experts": 8}"#, &["num_local_experts", "experts"]);
        check_refused(r#"{"rope_scaling": {"type": "dynamic", "factor": 2}}"#, &["rope_type", "dynamic"]);
        check_refused(r#"{"rope_parameters": {"rope_type": "default"}}"#, &["rope_theta", "missing"]);
        check_refused(r#"{"hidden_size": null}"#, &["hidden_size", "missing"]);
        check_refused(r#"{"hidden_size": -4}"#, &["hidden_size", "whole number"]);
        check_refused(r#"{"num_key_value_heads": 7}"#, &["num_key_value_heads"]);
        check_refused(r#"{"quantization_config": {"bits": 4}}"#, &["quantization_config"]);
        check_refused(r#"{"attention_bias": true}"#, &["attention_bias"]);
    }
}
