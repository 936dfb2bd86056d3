//! Training on a planted mapping: each token belongs to one of four groups, which its features show through noise and
//! which decides its centroids and its masks.

use crate::model::{Network, values};
use crate::{Dataset, Epoch, Options, Recall, Report, train_predictor};
use burn::backend::Flex;
use burn::tensor::{Tensor, TensorData};
use half::bf16;
use np_formats::{
    CENTROIDS_NAME, Dtype, FORMAT_VERSION, Features, Fingerprint, Geometry, Manifest, Mask, PREDICTOR_NAME,
    PredictorWeights, Projection, Source, TRACES_NAME, TensorDtype, TensorFileWriter, TensorSpec, centroid_specs,
    features_path, labels_path, layer_trace_path, layer_trace_specs,
};
use np_runtime::Predictor;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256Plus;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const HIDDEN: usize = 64;
const NEURONS: usize = 96;
const LAYERS: usize = 3;
const TOKENS: usize = 1_200;
const SEQUENCE: usize = 100;
const GROUPS: usize = 4;
const CENTROIDS: usize = 5;
const PARENT: Fingerprint = Fingerprint(21);

#[derive(Default)]
struct Seen {
    epochs: Vec<Epoch>,
    steps: usize,
}

impl Report for Seen {
    fn step(&mut self, _: Projection, _: usize, _: usize) {
        self.steps += 1;
    }

    fn epoch(&mut self, epoch: &Epoch) {
        self.epochs.push(*epoch);
    }
}

impl Seen {
    fn last(&self, projection: Projection) -> Epoch {
        *self.epochs.iter().rfind(|epoch| epoch.projection == projection).expect("an epoch was reported")
    }
}

fn manifest() -> Manifest {
    let config = r#"{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "vocab_size": 256}"#;
    Manifest {
        format_version: FORMAT_VERSION,
        tool_version: "0".into(),
        fingerprint: PARENT,
        source: Source { name: "tiny".into(), revision: None, sha256: None },
        geometry: Geometry::from_config(Path::new("config.json"), config).unwrap(),
        dtype: Dtype::F16,
        layer_hashes: vec![PARENT; LAYERS],
        files: BTreeMap::new(),
        checksum: String::new(),
    }
}

fn group(token: usize) -> usize {
    token * 7 / 3 % GROUPS
}

/// The centroid of a group in a head: another numbering for each; centroid 4 is never used.
fn label(group: usize, head: usize) -> usize {
    (group + head) % GROUPS
}

/// Neurons that matter to a group in a layer.
fn is_active(group: usize, layer: usize, neuron: usize) -> bool {
    (neuron + layer) % GROUPS == group
}

/// Writes a file of F32, U16, U32, U64 or BF16 tensors, given as bytes.
fn write(path: &Path, extra: &[(&str, String)], tensors: Vec<(TensorSpec, Vec<u8>)>) {
    let specs = tensors.iter().map(|(spec, _)| spec.clone()).collect();
    let mut writer = TensorFileWriter::create(path, PARENT, extra, specs).unwrap();
    for (spec, bytes) in tensors {
        writer.write(&spec.name, &bytes).unwrap();
    }
    writer.finish().unwrap();
}

fn bytes<T: bytemuck::Pod>(values: impl IntoIterator<Item = T>) -> Vec<u8> {
    bytemuck::cast_slice(&values.into_iter().collect::<Vec<_>>()).to_vec()
}

/// An artifact directory between `np-prep build-centroids` and `np-train`.
fn prepared() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    manifest().write(path).unwrap();
    fs::create_dir(path.join(TRACES_NAME)).unwrap();
    write_features(path);
    (1..LAYERS).for_each(|layer| write_trace(path, layer));
    write_labels(path, "one");
    write_centroids(path);
    directory
}

fn write_features(directory: &Path) {
    let mut rng = Xoshiro256Plus::seed_from_u64(5);
    let directions: Vec<f32> = (0..GROUPS * HIDDEN).map(|_| rng.gen_range(-1.0..1.0)).collect();
    let mut features: Vec<f32> = (0..TOKENS)
        .flat_map(|token| directions[group(token) * HIDDEN..][..HIDDEN].to_vec())
        .map(|value| value + rng.gen_range(-2.0..2.0) + 3.0)
        .collect();
    for row in features.chunks_exact_mut(HIDDEN) {
        let rms = (row.iter().map(|value| value * value).sum::<f32>() / HIDDEN as f32).sqrt();
        row.iter_mut().for_each(|value| *value /= rms);
    }
    let starts: Vec<u32> = (0..TOKENS as u32).step_by(SEQUENCE).collect();
    let specs = [
        TensorSpec::new("features", TensorDtype::F32, &[TOKENS, HIDDEN]),
        TensorSpec::new("sequence_starts", TensorDtype::U32, &[starts.len()]),
    ];
    write(&features_path(directory), &[], specs.into_iter().zip([bytes(features), bytes(starts)]).collect());
}

fn write_trace(directory: &Path, layer: usize) {
    let masks = bytes((0..TOKENS).flat_map(|token| {
        let ones: Vec<u32> = (0..NEURONS as u32).filter(|n| is_active(group(token), layer, *n as usize)).collect();
        Mask::from_ones(NEURONS, &ones).words().to_vec()
    }));
    let content = |spec: TensorSpec| {
        let is_mask = spec.name == "masks.joint";
        let bytes = if is_mask { masks.clone() } else { vec![0; spec.bytes()] };
        (spec, bytes)
    };
    let tensors = layer_trace_specs(TOKENS, NEURONS).into_iter().map(content).collect();
    write(&layer_trace_path(directory, layer), &[("np.k_fraction", "0.25".into())], tensors);
}

fn write_labels(directory: &Path, build: &str) {
    let heads = (1..LAYERS).flat_map(|layer| ["joint", "gate", "up"].map(|part| (layer, part)));
    let tensors = heads.map(|(layer, part)| {
        let spec = TensorSpec::new(format!("layers.{layer}.{part}"), TensorDtype::U16, &[TOKENS]);
        (spec, bytes((0..TOKENS).map(|token| label(group(token), layer) as u16)))
    });
    write(&labels_path(directory), &[("np.vocabulary", build.into())], tensors.collect());
}

fn write_centroids(directory: &Path) {
    let specs = (1..LAYERS).flat_map(|layer| centroid_specs(layer, NEURONS, Some(CENTROIDS), Some(CENTROIDS)));
    let tensors = specs.map(|spec| {
        let layer: usize = spec.name.split('.').nth(1).unwrap().parse().unwrap();
        let of_centroid = |centroid: usize, neuron: usize| {
            (0..GROUPS).any(|group| label(group, layer) == centroid && is_active(group, layer, neuron))
        };
        let table = || (0..CENTROIDS * NEURONS).map(|at| of_centroid(at / NEURONS, at % NEURONS));
        let bytes = match spec.dtype {
            TensorDtype::BF16 => bytes(table().map(|active| bf16::from_f32(if active { 0.9 } else { 0.1 }))),
            TensorDtype::F32 => bytes((0..NEURONS).map(|neuron| 1.0 / (1.0 + neuron as f32))),
            _ => vec![0; spec.bytes()],
        };
        (spec, bytes)
    });
    write(&directory.join(CENTROIDS_NAME), &[("np.vocabulary", "one".into())], tensors.collect());
}

fn train(directory: &Path, options: Options) -> Seen {
    let mut seen = Seen::default();
    train_predictor(directory, &options, &mut seen).unwrap();
    seen
}

fn read(directory: &Path) -> PredictorWeights {
    let centroids = np_formats::Centroids::open(directory, &manifest().geometry, PARENT).unwrap();
    PredictorWeights::read(directory, HIDDEN, PARENT, centroids.checksum()).unwrap()
}

#[test]
fn a_planted_mapping_is_learned() {
    let directory = prepared();
    let seen = train(directory.path(), Options { epochs: 8, ..Options::default() });
    for projection in [Projection::Joint, Projection::Separate] {
        let last = seen.last(projection);
        assert!((0.2..0.3).contains(&last.majority_accuracy), "{last:?}");
        assert!(last.accuracy > 0.95, "{last:?}");
        assert!((0.2..0.3).contains(&last.static_recall), "{last:?}");
        assert!(last.recall > 0.95, "{last:?}");
    }
    assert!(seen.steps > 0);
}

#[test]
fn without_a_learning_rate_nothing_is_learned_and_training_ends_early() {
    let directory = prepared();
    let seen = train(directory.path(), Options { epochs: 8, learning_rate: 0.0, ..Options::default() });
    let last = seen.last(Projection::Joint);
    assert!(last.accuracy < 0.6 && last.held_out_loss > 1.4, "{last:?}");
    // The first epoch is kept, and two more do not help.
    let kept: Vec<bool> = seen.epochs.iter().map(|epoch| epoch.kept).collect();
    assert_eq!(kept, [true, false, false, true, false, false]);
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let directory = prepared();
    let bytes = |seed| {
        train(directory.path(), Options { epochs: 2, seed, ..Options::default() });
        fs::read(directory.path().join(PREDICTOR_NAME)).unwrap()
    };
    let first = bytes(1);
    assert!(first == bytes(1), "two runs differ");
    assert!(first != bytes(2), "the seed has no effect");
}

/// The runtime starts from the residual stream, burn from the features that collection made of it.
#[test]
fn the_runtime_computes_what_burn_computes() {
    const RESIDUAL_SCALE: f32 = 7.0;
    let directory = prepared();
    train(directory.path(), Options { epochs: 2, ..Options::default() });
    let weights = read(directory.path());
    let dataset = Dataset::open(directory.path()).unwrap();
    assert_eq!((&weights.mean, &weights.std), (&dataset.mean, &dataset.std));
    let features = Features::read(directory.path(), HIDDEN, PARENT).unwrap();
    let separate = weights.separate.as_ref().unwrap();
    assert_eq!(separate.outputs, 2 * weights.joint.as_ref().unwrap().outputs);
    for network in [weights.joint.as_ref().unwrap(), separate] {
        let shape = [dataset.held_out.len(), HIDDEN];
        let batch = Tensor::from_data(TensorData::new(dataset.gather(&dataset.held_out), shape), &Default::default());
        let burned = values(Network::<Flex>::new(network, &Default::default()).logits(batch));
        assert!(burned.iter().any(|logit| logit.abs() > 0.5), "the logits say nothing");
        for skipped in [0, CENTROIDS] {
            let geometry = &dataset.geometry;
            let mut predictor = Predictor::new(&weights, network, geometry, network.outputs, skipped).unwrap();
            for (token, burned) in dataset.held_out.iter().zip(burned.chunks_exact(network.outputs)) {
                let row = &features.values[*token as usize * HIDDEN..][..HIDDEN];
                let residual: Vec<f32> = row.iter().map(|value| value * RESIDUAL_SCALE).collect();
                let found = predictor.logits(&residual);
                assert_eq!(found.len(), network.outputs - skipped);
                for (found, burned) in found.iter().zip(&burned[skipped..]) {
                    assert!((found - burned).abs() < 1e-4, "{found} {burned}");
                }
            }
        }
    }
}

#[test]
fn one_projection_alone_gives_one_network() {
    let directory = prepared();
    let only = |projection| Options { epochs: 1, projection: Some(projection), ..Options::default() };
    train(directory.path(), only(Projection::Separate));
    let weights = read(directory.path());
    assert!(weights.joint.is_none() && weights.separate.is_some());
    train(directory.path(), only(Projection::Joint));
    let weights = read(directory.path());
    assert!(weights.joint.is_some() && weights.separate.is_none());
}

#[test]
fn recall_is_that_of_the_selectors() {
    let directory = prepared();
    let dataset = Dataset::open(directory.path()).unwrap();
    let recall = Recall::open(&dataset, Projection::Joint).unwrap();
    let perfect = recall.sample.iter().flat_map(|&token| {
        let heads = (1..LAYERS).flat_map(move |layer| {
            (0..CENTROIDS).map(move |centroid| if label(group(token as usize), layer) == centroid { 9.0 } else { 0.0 })
        });
        heads.collect::<Vec<f32>>()
    });
    assert_eq!(recall.of(&perfect.collect::<Vec<_>>()), 1.0);
}

#[track_caller]
fn check_refused(damage: impl FnOnce(&Path), words: &[&str]) {
    let directory = prepared();
    damage(directory.path());
    let error = train_predictor(directory.path(), &Options::default(), &mut Seen::default()).unwrap_err();
    let message = error.to_string();
    assert!(words.iter().all(|word| message.contains(word)) && !message.contains('\n'), "{message}");
    assert!(!directory.path().join(PREDICTOR_NAME).exists());
}

#[test]
fn damage_is_refused_by_name() {
    let remove = |name: &'static str| move |directory: &Path| fs::remove_file(directory.join(name)).unwrap();
    check_refused(remove("manifest.json"), &["manifest.json"]);
    check_refused(remove(CENTROIDS_NAME), &["centroids.safetensors", "np-prep build-centroids"]);
    check_refused(remove("traces/labels.safetensors"), &["labels.safetensors", "np-prep build-centroids"]);
    check_refused(remove("traces/features.safetensors"), &["features.safetensors", "np-prep collect"]);
    check_refused(remove("traces/layer_002.safetensors"), &["layer_002", "np-prep collect"]);
    check_refused(|directory| write_labels(directory, "two"), &["labels.safetensors", "two builds"]);
    let flip = |name: &'static str| {
        move |directory: &Path| {
            let mut bytes = fs::read(directory.join(name)).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(directory.join(name), bytes).unwrap();
        }
    };
    check_refused(flip("traces/labels.safetensors"), &["labels.safetensors", "checksum"]);
    check_refused(flip("traces/features.safetensors"), &["features.safetensors", "checksum"]);
    check_refused(flip(CENTROIDS_NAME), &["centroids.safetensors", "checksum"]);
}

#[test]
fn a_mask_of_another_size_is_damage() {
    check_refused(
        |directory| {
            let path = layer_trace_path(directory, 1);
            let mut bytes = fs::read(&path).unwrap();
            let masks_at =
                bytes.len() - layer_trace_specs(TOKENS, NEURONS)[1..].iter().map(TensorSpec::bytes).sum::<usize>();
            let first_held_out = TOKENS - 2 * SEQUENCE + 1;
            bytes[masks_at + first_held_out * 16] ^= 1;
            fs::write(&path, bytes).unwrap();
        },
        &["layer_001", "masks.joint", "tokens 1001 and 1002", "np-prep collect"],
    );
}

#[test]
fn too_little_text_is_said_to_be_that() {
    check_refused(
        |directory| {
            let specs = [
                (TensorSpec::new("features", TensorDtype::F32, &[2, HIDDEN]), vec![0; 8 * HIDDEN]),
                (TensorSpec::new("sequence_starts", TensorDtype::U32, &[2]), bytes([0u32, 1])),
            ];
            write(&features_path(directory), &[], specs.into());
        },
        &["features.safetensors", "0 usable tokens", "more text"],
    );
}

#[cfg(not(feature = "train-cuda"))]
#[test]
fn a_backend_that_is_not_compiled_in_is_refused() {
    let options = Options { compute: crate::Compute::Cuda, ..Options::default() };
    let error = train_predictor(Path::new("nowhere"), &options, &mut Seen::default()).unwrap_err();
    assert!(matches!(error, crate::Error::CudaNotCompiledIn), "{error}");
}
