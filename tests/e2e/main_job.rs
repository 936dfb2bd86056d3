//! The main job on SmolLM2, with little text: from a GGUF file to generated text and its perplexity.

use crate::programs::{calibration_text, fixture, gguf, program, succeed};
use serde_json::Value;
use std::path::Path;

const ENGINE: [&str; 6] = ["--dense-layers", "1", "--selector", "mixture", "--k-fraction", "0.688"];

#[test]
fn from_gguf_to_text() {
    let folder = tempfile::tempdir().unwrap();
    let artifact = folder.path().join("model.np");
    let little = ["--tokens", "4096", "--centroids", "16"];
    succeed(
        program("np-prep").arg("all").arg(gguf()).arg(&artifact).arg("--text").arg(calibration_text()).args(little),
    );
    succeed(program("np-train").arg("predictor").arg(&artifact).args(["--epochs", "2"]));
    succeed(program("np-prep").arg("verify").arg(&artifact));
    reads_the_right_number_of_neurons(&artifact);
    costs_little_quality(&artifact);
    generates_the_same_text_from_both_readers(&artifact);
}

fn generates_the_same_text_from_both_readers(artifact: &Path) {
    let generate = |reader: &str| {
        let words = ["--chat", "--prompt", "Name three things a sailor needs.", "--max-tokens", "16"];
        let mut command = program("np-run");
        succeed(command.arg("generate").arg(artifact).args(ENGINE).args(words).args(["--reader", reader]))
    };
    let text = generate("pread");
    assert!(text.split_whitespace().count() >= 5, "{text:?}");
    assert_eq!(generate("auto"), text);
}

fn reads_the_right_number_of_neurons(artifact: &Path) {
    let report = evaluate(artifact, &["--dense-layers", "1", "--selector", "static", "--k-fraction", "0.5"]);
    assert_eq!(report["k"], 768, "half of 1,536 neurons");
    assert_eq!(report["rows_per_token"], 0.0, "static reads nothing once it has started");
}

/// Loose: with so little text the tables are rough. What must not happen is a model that no longer speaks.
fn costs_little_quality(artifact: &Path) {
    let report = evaluate(artifact, &ENGINE);
    let (dense, sparse) = (report["dense_perplexity"].as_f64().unwrap(), report["perplexity"].as_f64().unwrap());
    assert!(dense > 10.0 && dense < 100.0, "dense perplexity {dense}");
    assert!(sparse < 2.0 * dense, "perplexity {sparse}, dense {dense}");
    let read = report["delta_ratio"].as_f64().unwrap();
    assert!(read > 0.0 && read < 0.5, "{read} of the active neurons are read per token");
}

fn evaluate(artifact: &Path, settings: &[&str]) -> Value {
    let mut command = program("np-run");
    command.arg("eval").arg(artifact).arg("--text").arg(fixture("ppl_text.txt")).args(["--tokens", "384"]);
    let report = succeed(command.args(settings).arg("--json"));
    serde_json::from_str(&report).unwrap_or_else(|error| panic!("{error}: {report}"))
}
