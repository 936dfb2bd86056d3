//! Damaged artifact directories: one line that names the file, exit code 1, no panic.

use crate::programs::{clean_failure, copy_folder, fail, files_below, program, succeed};
use crate::tiny::{Tiny, text};
use np_formats::NeuronFile;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn every_file_every_damage() {
    let models = Models::new();
    let mut problems = Vec::new();
    for file in files_below(&models.path("whole.np")) {
        for damage in [Damage::Empty, Damage::Cut, Damage::Flip, Damage::Swap, Damage::Missing] {
            let artifact = models.damaged(&file, damage);
            let case = format!("{} {damage:?}", file.display());
            let mut try_program = |name: &str, command: &mut Command, notices: bool| {
                let output = command.output().expect("the program starts");
                match clean_failure(&output) {
                    Ok(line) if notices && !names_the_file(&line, &file, damage) => {
                        problems.push(format!("{case}: {name} does not name the file: {line}"));
                    }
                    Err(problem) if notices || !output.status.success() => {
                        problems.push(format!("{case}: {name}: {problem}"));
                    }
                    _ => {}
                }
            };
            try_program("verify", program("np-prep").arg("verify").arg(&artifact), verify_notices(&file, damage));
            try_program("generate", &mut generate(&artifact), generate_notices(&file));
            try_program("train", &mut train(&artifact), train_notices(&file));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn verify_finds_any_flipped_bit_of_the_neuron_file() {
    let models = Models::new();
    let artifact = models.path("whole.np");
    let path = artifact.join("neurons.bin");
    let whole = fs::read(&path).unwrap();
    succeed(program("np-prep").arg("verify").arg(&artifact));
    for bit in bits(&path) {
        let mut bytes = whole.clone();
        bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
        fs::write(&path, &bytes).unwrap();
        let line = fail(program("np-prep").arg("verify").arg(&artifact));
        assert!(line.contains("neurons.bin"), "bit {bit}: {line}");
    }
}

/// Bits of every kind of place: the header block, and of three records the rows, the padding and each byte of the
/// tag, and the gap behind a layer.
fn bits(path: &Path) -> Vec<u64> {
    let file = NeuronFile::open(path).unwrap();
    let header = file.header();
    let layout = header.layout;
    let (payload, stride) = (layout.payload_bytes() as u64, layout.stride_bytes() as u64);
    let mut bytes: Vec<u64> = (0..64).chain([100, 1_000, 4_087, 4_088, 4_095]).collect();
    for (layer, neuron) in [(0, 0), (7, 100), (header.layers - 1, header.neurons - 1)] {
        let at = header.offset(layer, neuron);
        bytes.extend([0, payload / 3, payload / 2, payload - 1].map(|byte| at + byte));
        bytes.extend([payload, stride - 65].map(|byte| at + byte));
        bytes.extend((stride - 64..stride).map(|byte| at + byte));
    }
    bytes.push(header.offset(1, 0) - 1);
    let bits = bytes.iter().enumerate().map(|(index, byte)| byte * 8 + index as u64 % 8);
    bits.filter(|bit| bit / 8 < header.file_bytes()).collect()
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Damage {
    Empty,
    Cut,
    Flip,
    Swap,
    Missing,
}

/// Of a manifest and a directory that do not belong together, either may be the foreign one.
fn names_the_file(line: &str, file: &Path, damage: Damage) -> bool {
    let name = file.file_name().expect("a file has a name").to_string_lossy();
    line.contains(&*name) || (damage == Damage::Swap && name == "manifest.json")
}

/// What is absent was perhaps never made: sidecars come one by one, and traces may be deleted. The recipe of the
/// traces only says whether a later collection may go on with them; one that says anything else begins anew.
fn verify_notices(file: &Path, damage: Damage) -> bool {
    let sidecar = ["centroids.safetensors", "predictor.safetensors"].iter().any(|name| file.ends_with(name));
    if file.ends_with("traces/recipe.json") {
        return false;
    }
    let optional = sidecar || file.starts_with("traces");
    damage != Damage::Missing || !optional
}

/// Traces are for training alone.
fn generate_notices(file: &Path) -> bool {
    !file.starts_with("traces")
}

/// Training reads what collection and clustering noted about tokens.
fn train_notices(file: &Path) -> bool {
    ["features", "labels"].iter().any(|name| file.ends_with(format!("traces/{name}.safetensors")))
}

fn train(artifact: &Path) -> Command {
    let mut command = program("np-train");
    command.arg("predictor").arg(artifact).args(["--epochs", "1"]);
    command
}

fn generate(artifact: &Path) -> Command {
    let mut command = program("np-run");
    command.arg("generate").arg(artifact).args(["--prompt", "the sea", "--max-tokens", "2", "--verify"]);
    command.args(["--selector", "mixture", "--k-fraction", "0.5", "--dense-layers", "1"]);
    command
}

/// Two whole artifact directories of the same geometry, and room for damaged copies.
struct Models {
    folder: tempfile::TempDir,
}

impl Models {
    fn new() -> Self {
        let models = Self { folder: tempfile::tempdir().expect("a folder can be made") };
        for (name, seed) in [("whole", 1), ("other", 2)] {
            let checkpoint = models.path(&format!("{name}-checkpoint"));
            Tiny::new(seed).write(&checkpoint);
            let words = models.path(&format!("{name}.txt"));
            fs::write(&words, text(seed, 3_000)).expect("the text can be written");
            let artifact = models.path(&format!("{name}.np"));
            let all = ["--tokens", "1024", "--sequence", "128", "--centroids", "8"];
            succeed(program("np-prep").arg("all").args([&checkpoint, &artifact]).arg("--text").arg(&words).args(all));
            succeed(&mut train(&artifact));
            succeed(&mut generate(&artifact));
        }
        models
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A copy of the whole directory with one file damaged.
    fn damaged(&self, file: &Path, damage: Damage) -> PathBuf {
        let artifact = self.path("damaged.np");
        if artifact.exists() {
            fs::remove_dir_all(&artifact).expect("the copy can be removed");
        }
        copy_folder(&self.path("whole.np"), &artifact);
        let path = artifact.join(file);
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        match damage {
            Damage::Empty => bytes.clear(),
            Damage::Cut => bytes.truncate(middle),
            Damage::Flip => bytes[middle] ^= 4,
            // Both models have some small files in common; those are swapped with something else.
            Damage::Swap => match fs::read(self.path("other.np").join(file)).unwrap() {
                other if other != bytes => bytes = other,
                _ => bytes = b"{}".to_vec(),
            },
            Damage::Missing => return fs::remove_file(&path).map(|()| artifact).unwrap(),
        }
        fs::write(&path, bytes).unwrap();
        artifact
    }
}
