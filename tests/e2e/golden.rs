//! The engine with every layer dense, beside an independent implementation.

use crate::programs::fixture;
use crate::smollm2;
use np_kernels::KvDtype;
use np_runtime::chat_template::Message;
use np_runtime::eval::negative_log_likelihood;
use np_runtime::text::Text;
use np_runtime::{Engine, EngineOptions};
use serde_json::Value;
use std::fs;

/// Both compute in f32, in another order; logits are up to 35.
const LOGIT_TOLERANCE: f64 = 0.05;
const PERPLEXITY_TOLERANCE: f64 = 0.005;

fn golden() -> Value {
    let text = fs::read_to_string(fixture("smollm2_golden.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn engine(context: usize) -> Engine {
    let options =
        EngineOptions { kv: KvDtype::F32, context: Some(context), dense_layers: Some(30), ..EngineOptions::default() };
    Engine::open(smollm2::artifact(), &options, &mut |_, _| {}).unwrap()
}

#[test]
fn logits_of_the_four_prompts() {
    let text = Text::load(smollm2::artifact()).unwrap();
    let mut engine = engine(256);
    let golden = golden();
    for prompt in golden["prompts"].as_array().unwrap() {
        let name = prompt["name"].as_str().unwrap();
        let expected_text = prompt["prompt"].as_str().unwrap();
        if name == "chat" {
            let content = "Name three things a sailor needs.".to_string();
            let turn = Message { role: "user".into(), content };
            assert_eq!(text.chat(&[turn], true).unwrap(), expected_text);
        }
        let ids = text.encode(expected_text, false).unwrap();
        assert_eq!(serde_json::json!(ids), prompt["prompt_ids"], "{name}");
        engine.restart();
        let logits = engine.prefill(&ids).unwrap();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        for (rank, expected) in prompt["top5_last_prompt"].as_array().unwrap().iter().enumerate() {
            let (id, logit) = (expected[0].as_u64().unwrap() as usize, expected[1].as_f64().unwrap());
            assert_eq!(order[rank], id, "{name}, rank {rank}");
            let difference = f64::from(logits[id]) - logit;
            assert!(difference.abs() < LOGIT_TOLERANCE, "{name}, rank {rank}: {} and {logit}", logits[id]);
        }
    }
}

#[test]
fn perplexity_in_one_window_and_in_many() {
    let text = Text::load(smollm2::artifact()).unwrap();
    let ids = text.encode(&fs::read_to_string(fixture("ppl_text.txt")).unwrap(), false).unwrap();
    let golden = golden();
    let mut engine = engine(ids.len());
    for (name, window) in [("full", ids.len()), ("w512", 512)] {
        let (mut sum, mut scored) = (0.0, 0);
        for window in ids.chunks(window) {
            engine.restart();
            engine
                .prefill_each(window, &mut |position, logits| {
                    if let Some(&next) = window.get(position + 1) {
                        sum += negative_log_likelihood(logits, next);
                        scored += 1;
                    }
                })
                .unwrap();
        }
        let expected = &golden["perplexity"][name];
        assert_eq!(scored, expected["scored"].as_u64().unwrap(), "{name}");
        let (found, expected) = ((sum / scored as f64).exp(), expected["perplexity"].as_f64().unwrap());
        assert!((found / expected - 1.0).abs() < PERPLEXITY_TOLERANCE, "{name}: {found}, expected {expected}");
    }
}
