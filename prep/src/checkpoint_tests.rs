use super::*;
use crate::test_checkpoint as made;
use crate::test_checkpoint::{geometry, raw_tensors, write_checkpoint, write_safetensors, write_sharded_checkpoint};
use serde_json::json;

const GATE: &str = "model.layers.1.mlp.gate_proj.weight";

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[track_caller]
fn check_refused(directory: &Path, narrow_to: Option<Dtype>, words: &[&str]) {
    let message = Checkpoint::open(directory, narrow_to).unwrap_err().to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
    assert_eq!(message.lines().count(), 1, "{message:?}");
}

fn set_config(directory: &Path, key: &str, value: Option<Value>) {
    let mut config = made::config(&geometry());
    match value {
        Some(value) => config[key] = value,
        None => drop(config.as_object_mut().unwrap().remove(key)),
    }
    fs::write(directory.join(CONFIG_NAME), config.to_string()).unwrap();
}

fn write_tensors(directory: &Path, change: impl FnOnce(&mut Vec<made::RawTensor>)) {
    let mut tensors = raw_tensors(&geometry(), Dtype::F16, 1);
    change(&mut tensors);
    write_safetensors(&directory.join("model.safetensors"), &tensors);
}

fn gate_values(seed: u64) -> Vec<f32> {
    let tensors = crate::tensors::model_tensors(&geometry());
    made::values(tensors.iter().find(|tensor| tensor.name == GATE).unwrap(), seed)
}

#[test]
fn sixteen_bits_are_read_as_they_are() {
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let directory = directory();
        write_checkpoint(directory.path(), &geometry(), dtype, 1);
        let checkpoint = Checkpoint::open(directory.path(), None).unwrap();
        assert_eq!((checkpoint.dtype(), checkpoint.geometry()), (dtype, &geometry()));
        let mut row = vec![0; 2 * 64];
        checkpoint.read(GATE, 5 * 64, &mut row).unwrap();
        assert_eq!(row, made::encode(&gate_values(1)[5 * 64..6 * 64], dtype));
    }
}

#[test]
fn single_precision_matrices_are_narrowed_and_vectors_kept() {
    for (narrow_to, dtype) in [(None, Dtype::F16), (Some(Dtype::Bf16), Dtype::Bf16)] {
        let directory = directory();
        write_checkpoint(directory.path(), &geometry(), Dtype::F32, 1);
        let checkpoint = Checkpoint::open(directory.path(), narrow_to).unwrap();
        assert_eq!(checkpoint.dtype(), dtype);
        let mut rows = vec![0; 2 * 64 * 96];
        checkpoint.read(GATE, 0, &mut rows).unwrap();
        assert_eq!(rows, made::encode(&gate_values(1), dtype));
        assert_eq!(checkpoint.spec("model.norm.weight").dtype, TensorDtype::F32);
    }
}

#[test]
fn too_large_values_are_refused_when_read() {
    let directory = directory();
    write_checkpoint(directory.path(), &geometry(), Dtype::F32, 1);
    let mut tensors = raw_tensors(&geometry(), Dtype::F32, 1);
    let gate = tensors.iter_mut().find(|tensor| tensor.0 == GATE).unwrap();
    gate.3[8..12].copy_from_slice(&1e6f32.to_le_bytes());
    write_safetensors(&directory.path().join("model.safetensors"), &tensors);
    let read = |narrow_to| {
        let checkpoint = Checkpoint::open(directory.path(), narrow_to).unwrap();
        checkpoint.read(GATE, 0, &mut vec![0; 2 * 64 * 96])
    };
    let message = read(None).unwrap_err().to_string();
    assert!(message.contains(GATE) && message.contains("value 2") && message.contains("--dtype bf16"), "{message}");
    read(Some(Dtype::Bf16)).unwrap();
}

#[test]
fn shards_are_read_as_one() {
    let directory = directory();
    let twelve = Geometry { layers: 12, ..geometry() };
    write_sharded_checkpoint(directory.path(), &twelve, 1);
    // A consolidated file beside the shards holds the same tensors under other names.
    write_safetensors(&directory.path().join("consolidated.safetensors"), &[]);
    let checkpoint = Checkpoint::open(directory.path(), None).unwrap();
    assert_eq!(checkpoint.files().count(), 13);
    for layer in [2, 10] {
        let name = layer_tensor(layer, "mlp.up_proj.weight");
        let tensors = crate::tensors::model_tensors(&twelve);
        let expected = made::values(tensors.iter().find(|tensor| tensor.name == name).unwrap(), 1);
        let mut bytes = vec![0; 2 * expected.len()];
        checkpoint.read(&name, 0, &mut bytes).unwrap();
        assert_eq!(bytes, made::encode(&expected, Dtype::F16));
    }
}

#[test]
fn all_missing_shards_are_named() {
    let directory = directory();
    write_sharded_checkpoint(directory.path(), &geometry(), 1);
    for shard in ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"] {
        fs::remove_file(directory.path().join(shard)).unwrap();
    }
    let words = ["2 of 3", "model-00001-of-00003", "model-00003-of-00003", "incomplete download"];
    check_refused(directory.path(), None, &words);
}

#[test]
fn an_index_that_does_not_fit_its_shards_is_refused() {
    let directory = directory();
    write_sharded_checkpoint(directory.path(), &geometry(), 1);
    let path = directory.path().join("model.safetensors.index.json");
    let text = fs::read_to_string(&path).unwrap();
    let mut index: Value = serde_json::from_str(&text).unwrap();
    index["weight_map"][GATE] = json!("model-00001-of-00003.safetensors");
    fs::write(&path, index.to_string()).unwrap();
    check_refused(directory.path(), None, &["model-00001-of-00003", GATE, "not there"]);
    index["weight_map"][GATE] = json!("../model.safetensors");
    fs::write(&path, index.to_string()).unwrap();
    check_refused(directory.path(), None, &["index.json", "../model.safetensors", "not a file beside it"]);
    fs::write(&path, "{").unwrap();
    check_refused(directory.path(), None, &["index.json"]);
}

#[test]
fn damaged_tensor_files_are_refused() {
    let directory = directory();
    write_checkpoint(directory.path(), &geometry(), Dtype::F16, 1);
    let path = directory.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() * 9 / 10]).unwrap();
    let (actual, expected) = ((whole.len() * 9 / 10).to_string(), whole.len().to_string());
    check_refused(directory.path(), None, &["model.safetensors", &actual, &expected, "fetch it again"]);
    fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 135\n").unwrap();
    check_refused(directory.path(), None, &["model.safetensors", "git lfs pull"]);
    for length in [1 << 63, 200_000_000, u64::MAX] {
        let mut bytes = whole.clone();
        bytes[..8].copy_from_slice(&u64::to_le_bytes(length));
        fs::write(&path, bytes).unwrap();
        check_refused(directory.path(), None, &["model.safetensors", "header"]);
    }
}

#[test]
fn other_dtypes_are_refused_by_name() {
    let directory = directory();
    write_checkpoint(directory.path(), &geometry(), Dtype::F16, 1);
    for (dtype, bytes_of_two) in [("F8_E4M3", 1), ("F4", 0), ("F64", 8)] {
        write_tensors(directory.path(), |tensors| {
            let gate = tensors.iter_mut().find(|tensor| tensor.0 == GATE).unwrap();
            gate.1 = dtype.into();
            let values = 64 * 96;
            gate.3 = vec![0; if bytes_of_two == 0 { values / 2 } else { values * bytes_of_two }];
        });
        check_refused(directory.path(), None, &[GATE, dtype, "F16, BF16 and F32"]);
    }
}

#[test]
fn one_type_for_all_rows() {
    let directory = directory();
    write_checkpoint(directory.path(), &geometry(), Dtype::F16, 1);
    check_refused(directory.path(), Some(Dtype::Bf16), &["F16", "--dtype"]);
    write_tensors(directory.path(), |tensors| {
        tensors.iter_mut().find(|tensor| tensor.0 == GATE).unwrap().1 = "BF16".into();
    });
    check_refused(directory.path(), None, &[GATE, "BF16", "F16"]);
}

#[test]
fn directories_without_usable_tensors_are_explained() {
    let directory = directory();
    let path = directory.path();
    check_refused(path, None, &["config.json", "not found"]);
    set_config(path, "hidden_act", Some(json!("silu")));
    check_refused(path, None, &["model.safetensors", "fetch the model again"]);
    fs::write(path.join("pytorch_model-00001-of-00002.bin"), "").unwrap();
    fs::write(path.join("pytorch_model-00002-of-00002.bin"), "").unwrap();
    check_refused(path, None, &["pytorch_model-00001-of-00002.bin, pytorch_model-00002", "save_pretrained"]);
    fs::write(path.join("model-00001-of-00002.safetensors"), "").unwrap();
    check_refused(path, None, &["index.json is missing", "model-00001-of-00002"]);
    fs::write(path.join("consolidated.safetensors"), "").unwrap();
    check_refused(path, None, &["consolidated", "model-*.safetensors"]);
}

#[test]
fn tying_is_decided_by_what_is_there() {
    let directory = directory();
    let path = directory.path();
    write_checkpoint(path, &geometry(), Dtype::F16, 1);
    let tied = || {
        let checkpoint = Checkpoint::open(path, None).unwrap();
        (checkpoint.geometry().tied_embedding, checkpoint.warnings().len())
    };
    set_config(path, "tie_word_embeddings", None);
    assert_eq!(tied(), (false, 0));
    set_config(path, "tie_word_embeddings", Some(json!(true)));
    assert_eq!(tied(), (true, 1));
    write_tensors(path, |tensors| {
        let embedding = tensors[0].3.clone();
        tensors.iter_mut().find(|tensor| tensor.0 == HEAD).unwrap().3 = embedding;
    });
    assert_eq!(tied(), (true, 0));
    write_tensors(path, |tensors| tensors.retain(|tensor| tensor.0 != HEAD));
    assert_eq!(tied(), (true, 0));
    set_config(path, "tie_word_embeddings", None);
    assert_eq!(tied(), (true, 0));
    set_config(path, "tie_word_embeddings", Some(json!(false)));
    check_refused(path, None, &[HEAD, "missing"]);
}

#[test]
fn the_tensors_tell_the_type_and_absent_kv_heads_mean_all_heads() {
    let directory = directory();
    let all_heads = Geometry { kv_heads: 4, ..geometry() };
    write_checkpoint(directory.path(), &all_heads, Dtype::Bf16, 1);
    let mut config = made::config(&all_heads);
    config.as_object_mut().unwrap().remove("num_key_value_heads");
    config["dtype"] = json!("float16");
    fs::write(directory.path().join(CONFIG_NAME), config.to_string()).unwrap();
    let checkpoint = Checkpoint::open(directory.path(), None).unwrap();
    assert_eq!((checkpoint.dtype(), checkpoint.geometry().kv_heads), (Dtype::Bf16, 4));
}

#[test]
fn qwen_needs_its_biases_and_norms() {
    for family in ["qwen2", "qwen3"] {
        let directory = directory();
        write_checkpoint(directory.path(), &geometry(), Dtype::F16, 1);
        set_config(directory.path(), "model_type", Some(json!(family)));
        check_refused(directory.path(), None, &["model.layers.0.self_attn.", "missing"]);
        let whole = Geometry { qkv_bias: family == "qwen2", qk_norm: family == "qwen3", ..geometry() };
        let path = directory.path().join("model.safetensors");
        write_safetensors(&path, &raw_tensors(&whole, Dtype::F16, 1));
        assert_eq!(Checkpoint::open(directory.path(), None).unwrap().geometry(), &whole);
        set_config(directory.path(), "model_type", Some(json!("llama")));
        check_refused(directory.path(), None, &["model.layers.0.self_attn.k", "not known"]);
    }
}
