//! `cargo xtask check`: all that must hold before a commit, and all that CI runs.

use crate::steps::{Steps, build_binaries, cargo};
use crate::text::CALIBRATION;
use crate::{paths, wheel};
use anyhow::Result;

/// How much to check.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Everything.
    Whole,
    /// What is run: not the CUDA training backend, which is only compiled, and not the docs.
    Fast,
}

/// Runs the checks in order and stops at the first that fails.
pub fn check(scope: Scope) -> Result<()> {
    let mut steps = Steps::default();
    let deny = ["--", "-D", "warnings"];
    steps.run("format", &mut cargo("fmt", &["--all", "--check"]))?;
    steps.run("lints", cargo("clippy", &["--workspace", "--all-targets"]).args(deny))?;
    if scope == Scope::Whole {
        let arguments = ["--package", "np-train", "--features", "train-cuda"];
        steps.run("lints of the CUDA training backend", cargo("clippy", &arguments).args(deny))?;
    }
    build_binaries(&mut steps)?;
    let packages = paths::packages();
    let gguf = steps.time("model", || wheel::gguf(&packages))?;
    let text = steps.time("calibration text", || CALIBRATION.write(&packages, &packages))?;
    // The tests that span crates start the binaries just built, on this model and this text.
    let mut test = cargo("test", &["--workspace"]);
    steps.run("tests", test.env("NP_TEST_GGUF", gguf).env("NP_TEST_TEXT", text))?;
    if scope == Scope::Whole {
        let mut doc = cargo("doc", &["--workspace", "--no-deps"]);
        steps.run("docs", doc.env("RUSTDOCFLAGS", "-D warnings"))?;
    }
    steps.report();
    Ok(())
}
