use super::*;
use crate::test_gguf::{metadata, tensor_shapes, value, with, write};
use candle_core::quantized::gguf_file::Value as Gguf;

const FFN_GATE: &str = "blk.0.ffn_gate.weight";

struct Import {
    directory: tempfile::TempDir,
}

impl Import {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    fn gguf(&self) -> std::path::PathBuf {
        self.directory.path().join("m.gguf")
    }

    fn out(&self) -> std::path::PathBuf {
        self.directory.path().join("out")
    }

    fn write(&self, architecture: &str, changes: &[(&str, Option<Gguf>)]) {
        write(&self.gguf(), &with(metadata(architecture), changes), &tensor_shapes(), &[FFN_GATE]);
    }

    fn run(&self, dtype: Dtype) -> Result<Source> {
        import_gguf(&self.gguf(), &self.out(), dtype, Progress::Silent)
    }

    /// A tensor of the result in single precision.
    fn read(&self, name: &str) -> Vec<f32> {
        let checkpoint = Checkpoint::open(&self.out(), None).unwrap();
        let mut bytes = vec![0; checkpoint.spec(name).bytes()];
        checkpoint.read(name, 0, &mut bytes).unwrap();
        let bits = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        bits.map(|bits| half::f16::from_bits(bits).to_f32()).collect()
    }

    #[track_caller]
    fn check_refused(&self, words: &[&str]) {
        let message = self.run(Dtype::F16).unwrap_err().to_string();
        for word in words.iter().chain(&["m.gguf"]) {
            assert!(message.contains(word), "{message:?} lacks {word:?}");
        }
        assert_eq!(message.lines().count(), 1, "{message:?}");
    }
}

/// First value of each row: it tells which row of the file it was.
fn rows(values: &[f32]) -> Vec<usize> {
    values.chunks_exact(64).map(|row| row[0] as usize).collect()
}

#[test]
fn the_result_is_a_checkpoint() {
    let import = Import::new();
    import.write("llama", &[]);
    let source = import.run(Dtype::F16).unwrap();
    assert_eq!(source.name, "m.gguf");
    let checkpoint = Checkpoint::open(&import.out(), None).unwrap();
    let geometry = checkpoint.geometry();
    assert_eq!((geometry.head_dim, geometry.kv_heads, geometry.rope_theta), (32, 1, 100_000.0));
    assert!(geometry.tied_embedding);
    let up = import.read("model.layers.0.mlp.up_proj.weight");
    assert_eq!(up[3 * 64 + 5], half::f16::from_f32(value(3, 5)).to_f32());
    for name in crate::checkpoint::COPIED_NAMES.iter().take(4) {
        assert!(import.out().join(name).is_file(), "{name}");
    }
    assert_eq!(Provenance::read(&import.out()).unwrap().source, source);
}

#[test]
fn quantised_rows_are_dequantised() {
    let import = Import::new();
    import.write("llama", &[]);
    import.run(Dtype::F16).unwrap();
    for (at, found) in import.read("model.layers.0.mlp.gate_proj.weight").into_iter().enumerate() {
        let expected = value(at / 64, at % 64);
        // Q8_0 has 127 steps up to the largest value of a block, here the row's number.
        assert!((found - expected).abs() <= expected / 127.0 + 0.01, "{at}: {found}, not {expected}");
    }
}

#[test]
fn rotated_rows_of_llama_come_in_halves_and_those_of_qwen_stay() {
    let halves: Vec<usize> = (0..32).step_by(2).chain((1..32).step_by(2)).collect();
    let import = Import::new();
    import.write("llama", &[]);
    import.run(Dtype::F16).unwrap();
    assert_eq!(rows(&import.read("model.layers.0.self_attn.k_proj.weight")), halves);
    let query = rows(&import.read("model.layers.0.self_attn.q_proj.weight"));
    assert_eq!(query[..32], halves);
    assert_eq!(query[32..], halves.iter().map(|row| row + 32).collect::<Vec<_>>());
    assert_eq!(rows(&import.read("model.layers.0.self_attn.v_proj.weight")), (0..32).collect::<Vec<_>>());

    let import = Import::new();
    let mut shapes = tensor_shapes();
    for (name, count) in [("blk.0.attn_q.bias", 64), ("blk.0.attn_k.bias", 32), ("blk.0.attn_v.bias", 32)] {
        shapes.push((name, vec![count]));
    }
    let qwen = with(metadata("qwen2"), &[("tokenizer.ggml.pre", Some(Gguf::String("qwen2".into())))]);
    write(&import.gguf(), &qwen, &shapes, &[]);
    import.run(Dtype::F16).unwrap();
    assert_eq!(rows(&import.read("model.layers.0.self_attn.k_proj.weight")), (0..32).collect::<Vec<_>>());
}

#[test]
fn the_same_file_is_not_imported_twice() {
    let import = Import::new();
    import.write("llama", &[]);
    import.run(Dtype::F16).unwrap();
    let tensors = import.out().join("model.safetensors");
    let made = || fs::metadata(&tensors).unwrap().modified().unwrap();
    let first = made();
    import.run(Dtype::F16).unwrap();
    assert_eq!(made(), first);
    let mut bytes = fs::read(&tensors).unwrap();
    let whole = bytes.clone();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&tensors, &bytes).unwrap();
    import.run(Dtype::F16).unwrap();
    assert_eq!(fs::read(&tensors).unwrap(), whole);
    import.run(Dtype::Bf16).unwrap();
    assert_eq!(Checkpoint::open(&import.out(), None).unwrap().dtype(), Dtype::Bf16);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let import = Import::new();
    let text = |text: &str| Some(Gguf::String(text.into()));
    for (key, value, words) in [
        ("general.architecture", text("gptj"), ["general.architecture", "gptj"]),
        ("llama.rope.scaling.type", text("yarn"), ["llama.rope.scaling.type", "yarn"]),
        ("llama.expert_count", Some(Gguf::U32(8)), ["llama.expert_count", "experts"]),
        ("llama.block_count", None, ["llama.block_count", "missing"]),
        ("llama.block_count", Some(Gguf::U32(2)), ["model.layers.1.input_layernorm.weight", "missing"]),
        ("llama.embedding_length", Some(Gguf::U32(128)), ["model.embed_tokens.weight", "shape"]),
        ("llama.attention.head_count", Some(Gguf::U32(0)), ["num_attention_heads", "whole number"]),
    ] {
        import.write("llama", &[(key, value)]);
        import.check_refused(&words);
    }
    let mut shapes = tensor_shapes();
    shapes.push(("rope_freqs.weight", vec![16]));
    write(&import.gguf(), &metadata("llama"), &shapes, &[]);
    import.check_refused(&["rope_freqs.weight", "not supported"]);
    assert!(!import.out().exists());
}

#[test]
fn damaged_files_are_refused() {
    let import = Import::new();
    import.write("llama", &[("general.alignment", Some(Gguf::U32(0)))]);
    import.check_refused(&["general.alignment", "damaged"]);
    import.write("llama", &[]);
    let whole = fs::read(import.gguf()).unwrap();
    fs::write(import.gguf(), &whole[..whole.len() - 1_000]).unwrap();
    import.check_refused(&["expected", "fetch it again"]);
    for length in [0, 3, 20, 400] {
        fs::write(import.gguf(), &whole[..length]).unwrap();
        import.check_refused(&["fetch it again"]);
    }
    fs::write(import.gguf(), b"PK\x03\x04 something else").unwrap();
    import.check_refused(&["not a GGUF file"]);
}

#[test]
fn overflow_is_refused_unless_bf16_is_asked_for() {
    let import = Import::new();
    let mut shapes = tensor_shapes();
    // The row's number is its value: 70,000 rows reach beyond F16.
    shapes[0] = ("token_embd.weight", vec![70_000, 64]);
    write(&import.gguf(), &metadata("llama"), &shapes, &[]);
    import.check_refused(&["model.embed_tokens.weight", "does not fit F16", "--dtype bf16"]);
    assert!(!import.out().join("model.safetensors").exists());
    import.run(Dtype::Bf16).unwrap();
}
