//! A tiny model with vocabulary and predictor, and engines that run it.

use crate::programs::{program, succeed};
use crate::tiny::{Tiny, text};
use np_formats::Mask;
use np_kernels::KvDtype;
use np_runtime::settings::KChoice;
use np_runtime::{Engine, EngineOptions};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Text that the tests continue, as the tiny tokenizer has it: bytes.
pub const PROMPT: &[u8] = b"the wind turns north, the ship";

/// A prepared and trained tiny model.
pub struct Trained {
    folder: tempfile::TempDir,
}

impl Trained {
    /// Prepares and trains.
    pub fn new() -> Self {
        let trained = Self { folder: tempfile::tempdir().expect("a folder can be made") };
        Tiny::new(3).write(&trained.checkpoint());
        let words = trained.folder.path().join("text.txt");
        fs::write(&words, text(3, 3_000)).expect("the text can be written");
        let all = ["--tokens", "1024", "--sequence", "128", "--centroids", "8"];
        let inputs = [&trained.checkpoint(), &trained.artifact()];
        succeed(program("np-prep").arg("all").args(inputs).arg("--text").arg(&words).args(all));
        succeed(program("np-train").arg("predictor").arg(trained.artifact()).args(["--epochs", "2"]));
        trained
    }

    /// Where the checkpoint lies.
    pub fn checkpoint(&self) -> PathBuf {
        self.folder.path().join("checkpoint")
    }

    /// Where the artifact directory lies.
    pub fn artifact(&self) -> PathBuf {
        self.folder.path().join("model.np")
    }
}

/// One dense layer, half of the neurons active, and whatever `change` makes of that.
pub fn options(change: impl FnOnce(&mut EngineOptions)) -> EngineOptions {
    let mut options = EngineOptions {
        k: KChoice::Fraction(0.5),
        dense_layers: Some(1),
        kv: KvDtype::F32,
        context: Some(128),
        ..EngineOptions::default()
    };
    change(&mut options);
    options
}

/// Opens an engine.
pub fn open(artifact: &Path, options: &EngineOptions) -> Engine {
    Engine::open(artifact, options, &mut |_, _| {}).expect("the engine opens")
}

/// A set that was named for a layer at a position.
pub struct Named {
    /// Position of the token.
    pub position: usize,
    /// The layer.
    pub layer: usize,
    /// Its active set.
    pub active: Mask,
    /// Whether the set was computed, and not only kept for the next token.
    pub computed: bool,
}

/// Lets the engine note all sets that are named.
pub fn record(engine: &mut Engine) -> Arc<Mutex<Vec<Named>>> {
    let named = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&named);
    engine.watch(Some(Box::new(move |view| {
        let (position, layer, computed) = (view.position, view.layer, view.computed);
        notes.lock().unwrap().push(Named { position, layer, active: view.active.clone(), computed });
    })));
    named
}

/// Logits after the prompt and after each of `count` further tokens, the likeliest each time.
pub fn continue_greedily(engine: &mut Engine, count: usize) -> Vec<Vec<f32>> {
    let prompt: Vec<u32> = PROMPT.iter().map(|&byte| u32::from(byte)).collect();
    engine.restart();
    let mut all = vec![engine.prefill(&prompt).expect("the prompt runs").to_vec()];
    for _ in 0..count {
        let token = np_runtime::sampler::greedy(all.last().expect("there are logits"));
        all.push(engine.decode(token).expect("the token runs").to_vec());
    }
    all
}
