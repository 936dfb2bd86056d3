//! What must not change the result does not change it.

use crate::smollm2;
use np_kernels::KvDtype;
use np_runtime::io::ReaderChoice;
use np_runtime::settings::KChoice;
use np_runtime::{Engine, EngineOptions};

/// "Once upon a time, in 1897, a small ship left the harbour of".
const PROMPT: [u32; 19] =
    [6403, 1980, 253, 655, 28, 281, 216, 33, 40, 41, 39, 28, 253, 1165, 5575, 2049, 260, 28899, 282];
const NEXT: [u32; 4] = [31808, 284, 23217, 1699];
/// Larger sums in another order: products of many tokens at once against one at a time.
const CHUNK_TOLERANCE: f32 = 1e-3;

fn engine(change: impl FnOnce(&mut EngineOptions)) -> Engine {
    let mut options =
        EngineOptions { kv: KvDtype::F32, context: Some(64), k: KChoice::Fraction(1.0), ..EngineOptions::default() };
    change(&mut options);
    Engine::open(smollm2::artifact(), &options, &mut |_, _| {}).unwrap()
}

/// Bits of the logits after the prompt and after each further token.
fn bits(mut engine: Engine) -> Vec<Vec<u32>> {
    let to_bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect();
    let mut bits = vec![to_bits(engine.prefill(&PROMPT).unwrap())];
    for token in NEXT {
        bits.push(to_bits(engine.decode(token).unwrap()));
    }
    bits
}

#[test]
fn all_neurons_active_equals_dense_to_the_bit() {
    let dense = bits(engine(|options| options.dense_layers = Some(30)));
    for (dense_layers, reader, threads) in
        [(1, ReaderChoice::Pread, 2), (7, ReaderChoice::Auto, 1), (29, ReaderChoice::Auto, 3)]
    {
        let sparse = bits(engine(|options| {
            options.dense_layers = Some(dense_layers);
            options.reader = reader;
            options.threads = Some(threads);
        }));
        assert!(sparse == dense, "{dense_layers} dense layers, {reader:?}, {threads} threads");
    }
}

#[test]
fn a_prompt_in_chunks_equals_token_by_token() {
    let last = |prefill_tokens| {
        let mut engine = engine(|options| {
            options.dense_layers = Some(20);
            options.prefill_tokens = prefill_tokens;
        });
        engine.prefill(&PROMPT).unwrap().to_vec()
    };
    let by_token = {
        let mut engine = engine(|options| options.dense_layers = Some(20));
        PROMPT.iter().map(|&token| engine.decode(token).unwrap().to_vec()).last().unwrap()
    };
    for prefill_tokens in [1, 7, 512] {
        let chunked = last(prefill_tokens);
        let worst = chunked.iter().zip(&by_token).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < CHUNK_TOLERANCE, "chunks of {prefill_tokens}: {worst}");
    }
}
