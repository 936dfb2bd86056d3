//! From traces to the vocabulary: clusters each layer's masks, then makes the tables that selectors read.
//!
//! A finished layer lies in `traces/centroids_LLL.safetensors` until all are finished, so that a build that was killed
//! goes on where it stopped. Then labels and vocabulary are put together and the layers' files go away. Every file
//! names, by a hash, the traces and options that it came from; what came from others is made anew.

use crate::cluster::{ClusterOptions, Clusters, PackedMasks, cluster};
use crate::error::{Error, Result};
use crate::tables::{energy_table, frequency_table};
use half::bf16;
use np_formats::{
    CENTROIDS_NAME, Fingerprint, LayerTrace, Manifest, Projection, TRACES_NAME, TensorDtype, TensorFile,
    TensorFileWriter, TensorSpec, VOCABULARY_KEY, centroid_specs, features_path, labels_path, layer_trace_path,
};
use std::fs;
use std::path::{Path, PathBuf};

/// What to build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BuildOptions {
    /// The projection whose masks are clustered; both when `None`.
    pub projection: Option<Projection>,
    /// Centroids (C) per layer and projection, 1 to 65,536.
    pub centroids: usize,
    /// Same seed, same bytes.
    pub seed: u64,
}

/// Builds `traces/labels.safetensors` and `centroids.safetensors` of an artifact directory from its traces, and tells
/// `progress` the layers done and all layers. Returns whether anything had to be made. A second call with the same
/// options, and one after a kill, reuse what is there.
pub fn build(directory: &Path, options: &BuildOptions, progress: &mut dyn FnMut(usize, usize)) -> Result<bool> {
    let build = Build::open(directory, options)?;
    let total = build.layers.len();
    if build.is_done() {
        build.remove_parts();
        progress(total, total);
        return Ok(false);
    }
    let usable = build.usable_tokens()?;
    progress(0, total);
    for (done, &layer) in build.layers.iter().enumerate() {
        if !build.has_part(layer) {
            build.make_part(layer, &usable)?;
        }
        progress(done + 1, total);
    }
    build.assemble_labels(usable.tokens)?;
    build.assemble_centroids()?;
    build.remove_parts();
    Ok(true)
}

/// One build: what it reads and what its results must say that they came from.
struct Build<'a> {
    directory: &'a Path,
    options: &'a BuildOptions,
    parent: Fingerprint,
    neurons: usize,
    layers: Vec<usize>,
    vocabulary: Fingerprint,
}

/// The tokens that are clustered and counted: all but the first of each sequence.
struct Usable {
    ids: Vec<u32>,
    tokens: usize,
}

/// Tables of one layer, with the labels that they come from.
struct Tables {
    energy: Vec<bf16>,
    joint: Option<Clusters>,
    separate: Option<[(Vec<bf16>, Clusters); 2]>,
}

impl<'a> Build<'a> {
    fn open(directory: &'a Path, options: &'a BuildOptions) -> Result<Self> {
        let manifest = Manifest::open(directory)?;
        let parent = manifest.fingerprint;
        let layers: Vec<usize> = (1..manifest.geometry.layers).collect();
        // The checksums in the headers stand for the traces, so that a rebuild need not read them to know them.
        let mut origin = format!("{parent} {options:?}");
        let features = [features_path(directory)];
        for path in features.into_iter().chain(layers.iter().map(|&layer| layer_trace_path(directory, layer))) {
            let checksum = open_trace(&path, parent)?.checksum();
            origin += &format!(" {}", checksum.map(|checksum| checksum.to_string()).unwrap_or_default());
        }
        let vocabulary = Fingerprint::of(origin.as_bytes());
        let neurons = manifest.geometry.intermediate;
        Ok(Self { directory, options, parent, neurons, layers, vocabulary })
    }

    fn is_done(&self) -> bool {
        self.is_ours(&labels_path(self.directory)) && self.is_ours(&self.directory.join(CENTROIDS_NAME))
    }

    fn has_part(&self, layer: usize) -> bool {
        self.is_ours(&self.part_path(layer))
    }

    /// Whether a file is there, whole, and of this build.
    fn is_ours(&self, path: &Path) -> bool {
        let opened = TensorFile::open_made_from(path, self.parent);
        opened
            .is_ok_and(|file| file.extra(VOCABULARY_KEY) == Some(&self.vocabulary.to_string()) && file.verify().is_ok())
    }

    fn part_path(&self, layer: usize) -> PathBuf {
        self.directory.join(TRACES_NAME).join(format!("centroids_{layer:03}.safetensors"))
    }

    fn count(&self, projection: Projection) -> Option<usize> {
        (self.options.projection.is_none_or(|only| only == projection)).then_some(self.options.centroids)
    }

    fn usable_tokens(&self) -> Result<Usable> {
        let path = features_path(self.directory);
        let file = open_trace(&path, self.parent)?;
        file.verify()?;
        let length = |name| file.spec(name).and_then(|spec| spec.shape.first().copied()).unwrap_or(0);
        let tokens = length("features");
        let starts: Vec<u32> = file.read("sequence_starts", TensorDtype::U32, &[length("sequence_starts")])?;
        let ids: Vec<u32> = (0..tokens as u32).filter(|token| starts.binary_search(token).is_err()).collect();
        if ids.is_empty() {
            let problem = "no sequence has a second token; run `np-prep collect` again with more text".into();
            return Err(Error::Source { path, problem });
        }
        Ok(Usable { ids, tokens })
    }

    fn make_part(&self, layer: usize, usable: &Usable) -> Result<()> {
        let path = layer_trace_path(self.directory, layer);
        open_trace(&path, self.parent)?.verify()?;
        let trace = LayerTrace::read(self.directory, layer, self.neurons, self.parent)?;
        if trace.tokens != usable.tokens || trace.count == 0 {
            let problem = format!(
                "{} tokens, {} of them counted, where the features have {}; run `np-prep collect` again",
                trace.tokens, trace.count, usable.tokens
            );
            return Err(Error::Source { path, problem });
        }
        let tables = self.tables(&trace, layer, &usable.ids);
        self.write_part(layer, &trace, &tables)
    }

    fn tables(&self, trace: &LayerTrace, layer: usize, usable: &[u32]) -> Tables {
        let run = |words: &[u64], stream: u64, centroids: usize| -> Clusters {
            let seed = self.options.seed.wrapping_mul(1 << 20).wrapping_add(4 * layer as u64 + stream);
            cluster(PackedMasks::new(self.neurons, words), usable, ClusterOptions { centroids, seed })
        };
        let joint = self.count(Projection::Joint).map(|count| run(&trace.joint, 0, count));
        let energy = joint.as_ref().map(|joint| energy_table(trace, usable, &joint.labels, self.options.centroids));
        let separate = self.count(Projection::Separate).map(|count| {
            [(&trace.gate, 1), (&trace.up, 2)].map(|(words, stream)| {
                let clusters = run(words, stream, count);
                let masks = PackedMasks::new(self.neurons, words);
                (frequency_table(masks, usable, &clusters.labels, count), clusters)
            })
        });
        Tables { energy: energy.unwrap_or_default(), joint, separate }
    }

    fn write_part(&self, layer: usize, trace: &LayerTrace, tables: &Tables) -> Result<()> {
        let mut specs = self.centroid_specs(layer);
        specs.extend(self.label_specs(layer, trace.tokens));
        let mut writer = self.create(&self.part_path(layer), specs)?;
        let name = |part: &str| format!("layers.{layer}.{part}");
        let mean = trace.energy.iter().map(|sum| (sum / f64::from(trace.count)) as f32);
        writer.write_values(&name("static.energy"), &mean.collect::<Vec<_>>())?;
        if let Some(joint) = &tables.joint {
            writer.write_values(&name("joint.energy"), &tables.energy)?;
            writer.write_values(&name("joint.masks"), &joint.masks)?;
        }
        if let Some([gate, up]) = &tables.separate {
            for (part, (frequency, clusters)) in [("gate", gate), ("up", up)] {
                writer.write_values(&name(&format!("{part}.frequency")), frequency)?;
                writer.write_values(&name(&format!("{part}.masks")), &clusters.masks)?;
            }
        }
        if let Some(joint) = &tables.joint {
            writer.write_values(&name("joint"), &joint.labels)?;
        }
        if let Some([gate, up]) = &tables.separate {
            writer.write_values(&name("gate"), &gate.1.labels)?;
            writer.write_values(&name("up"), &up.1.labels)?;
        }
        writer.finish()?;
        Ok(())
    }

    fn assemble_labels(&self, tokens: usize) -> Result<()> {
        self.assemble(&labels_path(self.directory), |layer| self.label_specs(layer, tokens))
    }

    fn assemble_centroids(&self) -> Result<()> {
        self.assemble(&self.directory.join(CENTROIDS_NAME), |layer| self.centroid_specs(layer))
    }

    /// Writes `path` from the tensors that each layer has in its part.
    fn assemble(&self, path: &Path, specs: impl Fn(usize) -> Vec<TensorSpec>) -> Result<()> {
        let mut writer = self.create(path, self.layers.iter().flat_map(|&layer| specs(layer)).collect())?;
        for &layer in &self.layers {
            let part = TensorFile::open_made_from(&self.part_path(layer), self.parent)?;
            for spec in specs(layer) {
                part.expect(&spec.name, spec.dtype, &spec.shape)?;
                let mut bytes = vec![0; spec.bytes()];
                part.read_at(&spec.name, 0, &mut bytes)?;
                writer.write(&spec.name, &bytes)?;
            }
        }
        writer.finish()?;
        Ok(())
    }

    fn create(&self, path: &Path, specs: Vec<TensorSpec>) -> Result<TensorFileWriter> {
        let extra = [(VOCABULARY_KEY, self.vocabulary.to_string())];
        Ok(TensorFileWriter::create(path, self.parent, &extra, specs)?)
    }

    fn centroid_specs(&self, layer: usize) -> Vec<TensorSpec> {
        centroid_specs(layer, self.neurons, self.count(Projection::Joint), self.count(Projection::Separate))
    }

    fn label_specs(&self, layer: usize, tokens: usize) -> Vec<TensorSpec> {
        let parts: &[&str] = match self.options.projection {
            Some(Projection::Joint) => &["joint"],
            Some(Projection::Separate) => &["gate", "up"],
            None => &["joint", "gate", "up"],
        };
        parts
            .iter()
            .map(|part| TensorSpec::new(format!("layers.{layer}.{part}"), TensorDtype::U16, &[tokens]))
            .collect()
    }

    fn remove_parts(&self) {
        for &layer in &self.layers {
            // A part that stays only takes room: it is checked before it is used.
            let _ = fs::remove_file(self.part_path(layer));
        }
    }
}

fn open_trace(path: &Path, parent: Fingerprint) -> Result<TensorFile> {
    let remedy = "run `np-prep collect` first";
    TensorFile::open_made_from(path, parent).map_err(|error| match error {
        np_formats::Error::Missing { path, .. } => np_formats::Error::Missing { path, remedy }.into(),
        other => other.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threshold::{joint_count, top_mask};
    use np_formats::{
        Centroids, Dtype, FORMAT_VERSION, Geometry, K_FRACTION_KEY, importance_from_u8, importance_to_u8,
        layer_trace_specs,
    };
    use rand::{Rng, SeedableRng};
    use rand_xoshiro::Xoshiro256Plus;
    use std::collections::BTreeMap;

    const NEURONS: usize = 96;
    const TOKENS: usize = 120;
    const LAYERS: usize = 4;
    const PARENT: Fingerprint = Fingerprint(11);
    const OPTIONS: BuildOptions = BuildOptions { projection: None, centroids: 4, seed: 3 };

    fn manifest() -> Manifest {
        let config = r#"{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
            "num_attention_heads": 4, "vocab_size": 256}"#;
        Manifest {
            format_version: FORMAT_VERSION,
            tool_version: "0".into(),
            fingerprint: PARENT,
            source: np_formats::Source { name: "tiny".into(), revision: None, sha256: None },
            geometry: Geometry::from_config(Path::new("config.json"), config).unwrap(),
            dtype: Dtype::F16,
            layer_hashes: vec![PARENT; LAYERS],
            files: BTreeMap::new(),
            checksum: String::new(),
        }
    }

    /// An artifact directory with traces: importance is random but for one of three groups of neurons that is large,
    /// a different group for each token. Sequences have 30 tokens.
    fn collected() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        manifest().write(directory.path()).unwrap();
        fs::create_dir(directory.path().join(TRACES_NAME)).unwrap();
        let specs = vec![
            TensorSpec::new("features", TensorDtype::F32, &[TOKENS, 64]),
            TensorSpec::new("sequence_starts", TensorDtype::U32, &[4]),
        ];
        let mut writer = TensorFileWriter::create(&features_path(directory.path()), PARENT, &[], specs).unwrap();
        writer.write_values("features", &vec![0.5f32; TOKENS * 64]).unwrap();
        writer.write_values("sequence_starts", &[0u32, 30, 60, 90]).unwrap();
        writer.finish().unwrap();
        (1..LAYERS).for_each(|layer| write_trace(directory.path(), layer));
        directory
    }

    fn write_trace(directory: &Path, layer: usize) {
        let mut rng = Xoshiro256Plus::seed_from_u64(layer as u64);
        let mut steps = Vec::new();
        let mut masks = Vec::new();
        let mut energy = vec![0.0; NEURONS];
        for token in 0..TOKENS {
            let scores: Vec<f32> = (0..NEURONS)
                .map(|neuron| rng.gen_range(0.1..1.0) * if neuron % 3 == token % 3 { 20.0 } else { 1.0 })
                .map(|importance: f32| importance_from_u8(importance_to_u8(importance)))
                .collect();
            let mut words = [0; NEURONS.div_ceil(64)];
            top_mask(&scores, joint_count(1.0 / 3.0, NEURONS), &mut Vec::new(), &mut words);
            masks.extend(words);
            steps.extend(scores.iter().copied().map(importance_to_u8));
            if token % 30 != 0 {
                energy.iter_mut().zip(&scores).for_each(|(sum, score)| *sum += f64::from(score * score));
            }
        }
        let extra = [(K_FRACTION_KEY, (1.0f64 / 3.0).to_string())];
        let path = layer_trace_path(directory, layer);
        let specs = layer_trace_specs(TOKENS, NEURONS);
        let mut writer = TensorFileWriter::create(&path, PARENT, &extra, specs).unwrap();
        writer.write_values("importance", &steps).unwrap();
        for name in ["masks.joint", "masks.gate", "masks.up"] {
            writer.write_values(name, &masks).unwrap();
        }
        writer.write_values("energy", &energy).unwrap();
        writer.write_values("count", &[TOKENS as u32 - 4]).unwrap();
        writer.finish().unwrap();
    }

    fn built(directory: &Path, options: &BuildOptions) -> [Vec<u8>; 2] {
        build(directory, options, &mut |_, _| {}).unwrap();
        [labels_path(directory), directory.join(CENTROIDS_NAME)].map(|path| fs::read(path).unwrap())
    }

    #[test]
    fn the_vocabulary_is_what_selectors_read() {
        let directory = collected();
        built(directory.path(), &OPTIONS);
        let centroids = Centroids::open(directory.path(), &manifest().geometry, PARENT).unwrap();
        assert_eq!(centroids.count(Projection::Joint).unwrap(), 4);
        assert_eq!(centroids.count(Projection::Separate).unwrap(), 4);
        let labels = TensorFile::open_made_from(&labels_path(directory.path()), PARENT).unwrap();
        labels.verify().unwrap();
        for layer in 1..LAYERS {
            let joint = labels.read::<u16>(&format!("layers.{layer}.joint"), TensorDtype::U16, &[TOKENS]).unwrap();
            let energy = centroids.joint(layer).unwrap().energy;
            let statics = centroids.static_energy(layer).unwrap();
            for token in 0..TOKENS {
                // A token's group is what its centroid calls important; the static energies tell no group.
                let row = &energy[joint[token] as usize * NEURONS..][..NEURONS];
                let least = (0..NEURONS).filter(|n| n % 3 == token % 3).map(|n| row[n].to_f32()).fold(1e9, f32::min);
                let most = (0..NEURONS).filter(|n| n % 3 != token % 3).map(|n| row[n].to_f32()).fold(0.0, f32::max);
                assert!(least > 2.0 * most, "layer {layer}, token {token}: {least} {most}");
            }
            assert!(statics.iter().all(|energy| (20.0..80.0).contains(energy)), "{statics:?}");
            let frequency = centroids.separate(layer).unwrap().gate_frequency;
            assert!(frequency.iter().all(|share| (0.0..=1.0).contains(&share.to_f32())));
        }
    }

    #[test]
    fn the_same_options_give_the_same_bytes() {
        let (one, other) = (collected(), collected());
        assert_eq!(built(one.path(), &OPTIONS), built(other.path(), &OPTIONS));
        let another_seed = BuildOptions { seed: 4, ..OPTIONS };
        assert_ne!(built(one.path(), &another_seed)[1], built(other.path(), &OPTIONS)[1]);
    }

    #[test]
    fn a_killed_build_goes_on_and_ends_the_same() {
        let (whole, killed) = (collected(), collected());
        let expected = built(whole.path(), &OPTIONS);
        let open = |options| Build::open(killed.path(), options).unwrap();
        // Layer 1 is done, layer 2 was cut off, layer 3 is of a build with another seed.
        let build = open(&OPTIONS);
        let usable = build.usable_tokens().unwrap();
        build.make_part(1, &usable).unwrap();
        let made = fs::metadata(build.part_path(1)).unwrap().modified().unwrap();
        fs::write(build.part_path(2), b"cut off").unwrap();
        open(&BuildOptions { seed: 9, ..OPTIONS }).make_part(3, &usable).unwrap();
        assert_eq!([1, 2, 3].map(|layer| build.has_part(layer)), [true, false, false]);
        build.make_part(2, &usable).unwrap();
        assert_eq!(fs::metadata(build.part_path(1)).unwrap().modified().unwrap(), made);
        assert_eq!(built(killed.path(), &OPTIONS), expected);
        assert_eq!(fs::read_dir(killed.path().join(TRACES_NAME)).unwrap().count(), LAYERS + 1, "parts are left");
    }

    #[test]
    fn a_finished_build_is_not_made_again_unless_something_changed() {
        let directory = collected();
        let again = |options| build(directory.path(), options, &mut |_, _| {}).unwrap();
        assert!(again(&OPTIONS));
        assert!(!again(&OPTIONS));
        assert!(again(&BuildOptions { centroids: 5, ..OPTIONS }));
        assert!(again(&BuildOptions { projection: Some(Projection::Joint), ..OPTIONS }));
        let mut bytes = fs::read(directory.path().join(CENTROIDS_NAME)).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(directory.path().join(CENTROIDS_NAME), bytes).unwrap();
        assert!(again(&BuildOptions { projection: Some(Projection::Joint), ..OPTIONS }));
    }

    #[track_caller]
    fn check_refused(damage: impl FnOnce(&Path), words: &[&str]) {
        let directory = collected();
        damage(directory.path());
        let message = build(directory.path(), &OPTIONS, &mut |_, _| {}).unwrap_err().to_string();
        assert!(words.iter().all(|word| message.contains(word)) && !message.contains('\n'), "{message}");
    }

    #[test]
    fn damaged_traces_are_refused_by_name() {
        let flip = |path: PathBuf| {
            let mut bytes = fs::read(&path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(&path, bytes).unwrap();
        };
        check_refused(|d| fs::remove_file(layer_trace_path(d, 2)).unwrap(), &["layer_002", "np-prep collect"]);
        check_refused(|d| fs::remove_file(features_path(d)).unwrap(), &["features.safetensors", "np-prep collect"]);
        check_refused(|d| flip(layer_trace_path(d, 3)), &["layer_003", "checksum"]);
        check_refused(|d| flip(features_path(d)), &["features.safetensors", "checksum"]);
        check_refused(
            |d| Manifest { fingerprint: Fingerprint(1), ..manifest() }.write(d).unwrap(),
            &["features.safetensors", "made from"],
        );
    }
}
