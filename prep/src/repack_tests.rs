use super::*;
use crate::provenance::source_of;
use crate::test_checkpoint::{encode, geometry, values, write_checkpoint, write_sharded_checkpoint};
use np_formats::{Dtype, NeuronFile, TensorFile, partial_path};
use std::path::PathBuf;

struct Model {
    directory: tempfile::TempDir,
    checkpoint: Checkpoint,
}

impl Model {
    fn new(geometry: &Geometry, dtype: Dtype, seed: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model");
        write_checkpoint(&path, geometry, dtype, seed);
        Self { directory, checkpoint: Checkpoint::open(&path, None).unwrap() }
    }

    fn out(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn repack(&self, out: &Path) -> Result<Manifest> {
        let source = source_of(&self.checkpoint, Progress::Silent)?;
        repack(&self.checkpoint, &source, out, Progress::Silent)
    }
}

/// All files of a directory by name.
fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect()
}

#[track_caller]
fn check_round_trip(geometry: &Geometry, stored: Dtype, read: Dtype) {
    let model = Model::new(geometry, stored, 3);
    let out = model.out("out.np");
    let manifest = model.repack(&out).unwrap();
    assert_eq!((&manifest.geometry, manifest.dtype), (geometry, read));
    let neurons = NeuronFile::open(&out.join(NEURONS_NAME)).unwrap();
    let layout = neurons.header().layout;
    let tensors = model_tensors(geometry);
    let tensor = |name: String| encode(&values(tensors.iter().find(|tensor| tensor.name == name).unwrap(), 3), read);
    for layer in 0..geometry.layers {
        assert_eq!(neurons.verify_layer(layer as u16).unwrap(), manifest.layer_hashes[layer]);
        let name = |projection: &str| layer_tensor(layer, &format!("mlp.{projection}_proj.weight"));
        let (gate, up, down) = (tensor(name("gate")), tensor(name("up")), tensor(name("down")));
        for neuron in 0..geometry.intermediate {
            let mut record = vec![0; layout.stride_bytes()];
            neurons.read_records(layer as u16, neuron as u32, &mut record).unwrap();
            let row = neuron * layout.row_bytes()..(neuron + 1) * layout.row_bytes();
            let column = down.chunks_exact(2).skip(neuron).step_by(geometry.intermediate).flatten().copied();
            let expected = [&gate[row.clone()], &up[row], &column.collect::<Vec<u8>>()].concat();
            assert!(record[..layout.payload_bytes()] == expected, "layer {layer}, neuron {neuron}");
        }
    }
    let resident = TensorFile::open_made_from(&out.join(RESIDENT_NAME), manifest.fingerprint).unwrap();
    resident.verify().unwrap();
    for wanted in tensors.iter().filter(|tensor| !tensor.mlp) {
        let dtype = if wanted.shape.len() == 1 { stored } else { read };
        let mut bytes = vec![0; resident.spec(&wanted.name).unwrap().bytes()];
        resident.read_at(&wanted.name, 0, &mut bytes).unwrap();
        assert!(bytes == encode(&values(wanted, 3), dtype), "{}", wanted.name);
    }
    assert_eq!(resident.names().len(), tensors.iter().filter(|tensor| !tensor.mlp).count());
}

#[test]
fn every_row_lies_where_it_should() {
    // Row bytes that are no multiple of 512, more neurons than a tile, more layers than one digit.
    check_round_trip(&Geometry { layers: 12, ..geometry() }, Dtype::F16, Dtype::F16);
    check_round_trip(
        &Geometry { hidden: 896, layers: 1, heads: 14, head_dim: 64, ..geometry() },
        Dtype::Bf16,
        Dtype::Bf16,
    );
    check_round_trip(&Geometry { hidden: 576, layers: 1, intermediate: 300, ..geometry() }, Dtype::F32, Dtype::F16);
    check_round_trip(&Geometry { tied_embedding: true, ..geometry() }, Dtype::F16, Dtype::F16);
}

#[test]
fn a_killed_run_goes_on_and_ends_the_same() {
    let twelve = Geometry { layers: 12, ..geometry() };
    let model = Model::new(&twelve, Dtype::F16, 1);
    let undisturbed = model.out("a.np");
    model.repack(&undisturbed).unwrap();
    for layers in [0, 1, 7, 12] {
        let killed = model.out(&format!("b{layers}.np"));
        fs::create_dir(&killed).unwrap();
        begin(&model, &killed, layers);
        assert!(Manifest::open(&killed).is_err());
        // Left by a write that a kill cut short.
        fs::write(partial_path(&killed.join(RESIDENT_NAME)), "half").unwrap();
        model.repack(&killed).unwrap();
        assert!(files(&killed) == files(&undisturbed), "killed after {layers} layers");
    }
}

/// Leaves `out` as a run does that is killed in the layer after `layers`.
fn begin(model: &Model, out: &Path, layers: usize) {
    let geometry = model.checkpoint.geometry();
    let layout = RecordLayout::new(geometry.hidden, model.checkpoint.dtype());
    let neurons = geometry.intermediate as u32;
    let header = NeuronFileHeader { layers: geometry.layers as u16, neurons, layout, fingerprint: Fingerprint(0) };
    let source = source_of(&model.checkpoint, Progress::Silent).unwrap();
    let origin = serde_json::to_vec(&(FORMAT_VERSION, &source, geometry, model.checkpoint.dtype())).unwrap();
    let mut writer = NeuronFileWriter::resume(&out.join(NEURONS_NAME), header, Fingerprint::of(&origin)).unwrap();
    for _ in 0..layers {
        write_layer(&model.checkpoint, layout, &mut writer, &mut Buffers::default()).unwrap();
    }
    if layers < geometry.layers {
        writer.write(&mut vec![7; 3 * layout.stride_bytes()]).unwrap();
    }
}

#[test]
fn a_partial_of_another_source_is_not_continued() {
    let (one, other) = (Model::new(&geometry(), Dtype::F16, 1), Model::new(&geometry(), Dtype::F16, 2));
    let (out, undisturbed) = (one.out("out.np"), one.out("undisturbed.np"));
    fs::create_dir(&out).unwrap();
    begin(&other, &out, 1);
    one.repack(&out).unwrap();
    one.repack(&undisturbed).unwrap();
    assert!(files(&out) == files(&undisturbed));
}

#[test]
fn a_whole_directory_is_kept_a_damaged_one_made_again_and_another_models_refused() {
    let model = Model::new(&geometry(), Dtype::F16, 1);
    let out = model.out("out.np");
    let first = model.repack(&out).unwrap();
    let whole = files(&out);
    let path = out.join(NEURONS_NAME);
    let made = || fs::metadata(&path).unwrap().modified().unwrap();
    let when = made();
    assert_eq!(model.repack(&out).unwrap(), first);
    assert_eq!(made(), when);
    for name in [NEURONS_NAME, RESIDENT_NAME, MANIFEST_NAME, "config.json"] {
        let mut bytes = whole[name].clone();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(out.join(name), bytes).unwrap();
        model.repack(&out).unwrap();
        assert!(files(&out) == whole, "{name}");
    }
    let other = Model::new(&geometry(), Dtype::F16, 2);
    let message = other.repack(&out).unwrap_err().to_string();
    assert!(message.contains("manifest.json") && message.contains("another directory"), "{message}");
    assert!(files(&out) == whole);
}

#[test]
fn shards_give_the_same_neurons() {
    let twelve = Geometry { layers: 12, ..geometry() };
    let single = Model::new(&twelve, Dtype::F16, 1);
    let sharded = single.out("sharded");
    write_sharded_checkpoint(&sharded, &twelve, 1);
    let checkpoint = Checkpoint::open(&sharded, None).unwrap();
    let source = source_of(&checkpoint, Progress::Silent).unwrap();
    let of_shards = repack(&checkpoint, &source, &single.out("b.np"), Progress::Silent).unwrap();
    assert_eq!(of_shards.fingerprint, single.repack(&single.out("a.np")).unwrap().fingerprint);
}

#[test]
fn overflow_leaves_nothing_that_looks_whole() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model");
    write_checkpoint(&path, &geometry(), Dtype::F32, 1);
    let mut tensors = crate::test_checkpoint::raw_tensors(&geometry(), Dtype::F32, 1);
    let down = tensors.iter_mut().find(|tensor| tensor.0 == "model.layers.1.mlp.down_proj.weight").unwrap();
    down.3[..4].copy_from_slice(&1e9f32.to_le_bytes());
    crate::test_checkpoint::write_safetensors(&path.join("model.safetensors"), &tensors);
    let repack = |narrow_to, out: &str| {
        let checkpoint = Checkpoint::open(&path, narrow_to).unwrap();
        let source = source_of(&checkpoint, Progress::Silent).unwrap();
        repack(&checkpoint, &source, &directory.path().join(out), Progress::Silent)
    };
    let message = repack(None, "out.np").unwrap_err().to_string();
    assert!(message.contains("model.layers.1.mlp.down_proj.weight") && message.contains("--dtype bf16"), "{message}");
    assert!(Manifest::open(&directory.path().join("out.np")).is_err());
    repack(Some(Dtype::Bf16), "out.np").unwrap();
}
