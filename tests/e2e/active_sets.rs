//! What is computed and what is read are the active sets, no more and no less.

use crate::reference::Reference;
use crate::trained::{Named, PROMPT, Trained, continue_greedily, open, options, record};
use np_formats::Mask;
use np_runtime::select::SelectorKind;
use np_runtime::settings::{EngineOptions, Mode};
use np_runtime::{Engine, TokenStats};
use std::collections::BTreeMap;
use std::path::Path;

const TOKENS: usize = 24;
/// f32 sums of the engine against f64 sums of the reference, through twelve layers.
const REFERENCE_TOLERANCE: f64 = 1e-3;

#[test]
fn the_output_is_that_of_a_masked_dense_model() {
    let trained = Trained::new();
    for selector in SelectorKind::ALL {
        let mut engine = open(&trained.artifact(), &options(|options| options.selector = selector));
        let named = record(&mut engine);
        let logits = continue_greedily(&mut engine, TOKENS);
        let mut masks = BTreeMap::new();
        for Named { position, layer, active, .. } in named.lock().unwrap().iter().filter(|named| named.computed) {
            masks.insert((*position, *layer), active.clone());
        }
        assert_eq!(masks.len(), TOKENS * 11, "eleven sparse layers for each decoded token");
        let mut tokens: Vec<u32> = PROMPT.iter().map(|&byte| u32::from(byte)).collect();
        tokens.extend(logits[..TOKENS].iter().map(|logits| np_runtime::sampler::greedy(logits)));
        let expected = Reference::read(&trained.checkpoint()).logits(&tokens, &masks);
        for (index, logits) in logits.iter().enumerate() {
            let expected = &expected[PROMPT.len() - 1 + index];
            let pairs = logits.iter().zip(expected);
            let worst = pairs.map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
            assert!(worst < REFERENCE_TOLERANCE, "{selector:?}, token {index}: {worst}");
        }
    }
}

#[test]
fn the_rows_read_are_those_that_were_not_active_before() {
    let trained = Trained::new();
    let mut churn = 0;
    for selector in SelectorKind::ALL {
        let mut engine = open(&trained.artifact(), &options(|options| options.selector = selector));
        let named = record(&mut engine);
        let incoming = incoming_rows(&mut engine);
        let named = named.lock().unwrap();
        let sets: BTreeMap<(usize, usize), &Mask> =
            named.iter().map(|named| ((named.position, named.layer), &named.active)).collect();
        for (index, stats) in incoming.iter().enumerate() {
            let position = PROMPT.len() + index;
            let missing = |layer| sets[&(position, layer)].and_not(sets[&(position - 1, layer)]).count() as u64;
            let expected: u64 = (1..12).map(missing).sum();
            assert_eq!(stats.incoming_rows, expected, "{selector:?}, token {index}");
            assert_eq!((stats.active_rows, stats.resident_rows), (11 * 96, 11 * 96));
            assert_eq!(stats.read_bytes, expected * 512, "no record is read in vain");
            churn += expected * u64::from(selector == SelectorKind::Mixture);
            assert!(selector != SelectorKind::Static || expected == 0, "a fixed set is never read twice");
        }
    }
    assert!(churn > 0, "the test has seen reads");
}

fn incoming_rows(engine: &mut Engine) -> Vec<TokenStats> {
    let prompt: Vec<u32> = PROMPT.iter().map(|&byte| u32::from(byte)).collect();
    let mut logits = engine.prefill(&prompt).unwrap().to_vec();
    let mut incoming = Vec::new();
    for _ in 0..TOKENS {
        logits = engine.decode(np_runtime::sampler::greedy(&logits)).unwrap().to_vec();
        incoming.push(*engine.token_stats());
    }
    incoming
}

/// Whatever only moves bytes about leaves every logit as it is, to the bit.
#[test]
fn how_rows_are_read_and_kept_changes_nothing() {
    let trained = Trained::new();
    let artifact = trained.artifact();
    let expected = run(&artifact, &options(|_| {}), Mode::Delta);
    type Change = fn(&mut EngineOptions);
    let changes: [(&str, Change); 7] = [
        ("staging of one byte", |options| options.staging_bytes = 1),
        ("staging of three records", |options| options.staging_bytes = 3 * 512),
        ("gaps bridged", |options| options.bridge_records = 3),
        ("slack slots", |options| options.capacity = Some(130)),
        ("a slot for every neuron", |options| options.capacity = Some(192)),
        ("pread through the page cache", |options| {
            options.reader = np_runtime::io::ReaderChoice::Pread;
            options.direct = np_runtime::io::DirectMode::Never;
        }),
        ("hashes checked", |options| options.verify = true),
    ];
    for (name, change) in changes {
        assert!(run(&artifact, &options(change), Mode::Delta) == expected, "{name}");
    }
    let roomy = open(&artifact, &options(|_| {})).settings().footprint.total();
    let tight = options(|options| options.memory_bytes = Some(roomy - 1));
    assert!(run(&artifact, &tight, Mode::Streamed) == expected, "shared slots");
}

fn run(artifact: &Path, options: &EngineOptions, mode: Mode) -> Vec<Vec<f32>> {
    let mut engine = open(artifact, options);
    assert_eq!(engine.settings().mode, mode);
    let logits = continue_greedily(&mut engine, TOKENS);
    // The same engine again, with whatever the first sequence left in the slots.
    assert!(continue_greedily(&mut engine, TOKENS) == logits, "a second sequence differs from the first");
    logits
}
