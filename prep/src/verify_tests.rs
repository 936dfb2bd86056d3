use super::*;
use crate::checkpoint::Checkpoint;
use crate::provenance::source_of;
use crate::repack::repack;
use crate::test_checkpoint::{geometry, write_checkpoint};
use np_formats::{
    Dtype, Fingerprint, PredictorNetwork, Projection, TensorDtype, TensorFileWriter, TensorSpec, layer_trace_path,
    predictor_specs,
};
use std::path::PathBuf;

/// An artifact directory with all kinds of files.
struct Artifact {
    _temporary: tempfile::TempDir,
    directory: PathBuf,
}

impl Artifact {
    fn new(seed: u64) -> Self {
        let temporary = tempfile::tempdir().unwrap();
        let (model, directory) = (temporary.path().join("model"), temporary.path().join("out.np"));
        let small = Geometry { layers: 1, hidden: 32, intermediate: 8, vocab: 16, ..geometry() };
        write_checkpoint(&model, &small, Dtype::F16, seed);
        let checkpoint = Checkpoint::open(&model, None).unwrap();
        let source = source_of(&checkpoint, Progress::Silent).unwrap();
        let parent = repack(&checkpoint, &source, &directory, Progress::Silent).unwrap().fingerprint;
        fs::create_dir(directory.join(TRACES_NAME)).unwrap();
        write_tensor(&layer_trace_path(&directory, 1), parent);
        let centroids = write_tensor(&directory.join(CENTROIDS_NAME), parent);
        write_predictor(&directory, parent, centroids);
        Self { _temporary: temporary, directory }
    }

    fn verify(&self) -> Result<Verified> {
        verify(&self.directory, Progress::Silent)
    }

    fn names(&self) -> Vec<String> {
        self.verify().unwrap().whole
    }
}

fn write_tensor(path: &Path, parent: Fingerprint) -> Fingerprint {
    let specs = vec![TensorSpec::new("t", TensorDtype::U8, &[5])];
    let mut writer = TensorFileWriter::create(path, parent, &[], specs).unwrap();
    writer.write("t", &[1, 2, 3, 4, 5]).unwrap();
    writer.finish().unwrap()
}

fn write_predictor(directory: &Path, parent: Fingerprint, centroids: Fingerprint) {
    let network = PredictorNetwork {
        width: 1,
        outputs: 2,
        hidden_weight: vec![0.5; 32],
        hidden_bias: vec![0.5; 1],
        heads_weight: vec![0.5; 2],
        heads_bias: vec![0.5; 2],
    };
    let specs = predictor_specs(32, &[(Projection::Joint, &network)]);
    let extra = PredictorWeights::extra(Some(centroids));
    let mut writer = TensorFileWriter::create(&directory.join(PREDICTOR_NAME), parent, &extra, specs.clone()).unwrap();
    for spec in specs {
        writer.write(&spec.name, &vec![0; spec.bytes()]).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn a_whole_directory_is_whole() {
    let artifact = Artifact::new(1);
    fs::write(artifact.directory.join("notes.txt"), "mine").unwrap();
    let verified = artifact.verify().unwrap();
    assert_eq!(verified.unknown, ["notes.txt"]);
    let expected = [
        "centroids.safetensors",
        "config.json",
        "manifest.json",
        "neurons.bin",
        "predictor.safetensors",
        "resident.safetensors",
        "tokenizer.json",
        "traces/layer_001.safetensors",
    ];
    assert_eq!(verified.whole, expected);
}

#[test]
fn a_flipped_bit_in_any_byte_of_any_file_is_found() {
    let artifact = Artifact::new(1);
    for name in artifact.names() {
        let path = artifact.directory.join(&name);
        let whole = fs::read(&path).unwrap();
        // Every byte of the small files, a sample of the larger ones, each time another bit.
        let step = (whole.len() / 1_500).max(1);
        for at in (0..whole.len()).step_by(step) {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at / step % 8);
            fs::write(&path, &bytes).unwrap();
            assert!(artifact.verify().is_err(), "{name}: byte {at}");
        }
        fs::write(&path, &whole).unwrap();
    }
    artifact.verify().unwrap();
}

#[test]
fn truncated_swapped_and_missing_files_are_named() {
    let (artifact, other) = (Artifact::new(1), Artifact::new(2));
    for name in artifact.names() {
        let path = artifact.directory.join(&name);
        let whole = fs::read(&path).unwrap();
        let check = |what: &str| {
            let message = artifact.verify().unwrap_err().to_string();
            let own = name.rsplit('/').next().unwrap();
            // A swapped manifest shows in the first file that it does not fit.
            let named = message.contains(own) || (name == "manifest.json" && what == "swapped");
            assert!(named && message.lines().count() == 1, "{name} {what}: {message:?}");
        };
        for length in [0, whole.len() / 2, whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            check("cut");
        }
        let foreign = fs::read(other.directory.join(&name)).unwrap();
        if foreign != whole {
            fs::write(&path, foreign).unwrap();
            check("swapped");
        }
        fs::remove_file(&path).unwrap();
        let sidecar = name.contains('/') || name == PREDICTOR_NAME;
        match name.as_str() {
            // Without its centroids, the predictor is the one that does not fit.
            CENTROIDS_NAME => assert!(artifact.verify().unwrap_err().to_string().contains(PREDICTOR_NAME)),
            _ if sidecar => assert!(!artifact.verify().unwrap().whole.contains(&name)),
            _ => check("missing"),
        }
        fs::write(&path, &whole).unwrap();
    }
}
