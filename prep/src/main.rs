//! np-prep: from a checkpoint to an artifact directory.

use anyhow::{Context, Result, anyhow};
use clap::{Args, Parser, Subcommand, ValueEnum};
use np_formats::{Dtype, Projection};
use np_prep::{BuildOptions, Checkpoint, CollectOptions, HubSettings, Progress, source_of};
use np_runtime::budget::parse_size;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Prepares models for np-run. Every step can be run again: it reuses what is whole and goes on where it was killed.
#[derive(Parser)]
#[command(name = "np-prep", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Fetches a model from the hub and prints where its checkpoint directory is.
    Download {
        /// Repository, as OWNER/NAME.
        repo: String,
        /// Branch, tag or commit.
        #[arg(long, default_value = "main")]
        revision: String,
        /// Directory of your own for the files, beside the hub's cache.
        #[arg(long)]
        dir: Option<PathBuf>,
    },
    /// Makes a checkpoint directory of a GGUF file or of another checkpoint directory.
    Import {
        /// A .gguf file, or a Hugging Face directory.
        source: PathBuf,
        /// The checkpoint directory to write.
        directory: PathBuf,
        #[command(flatten)]
        narrow: Narrow,
    },
    /// Makes an artifact directory of a checkpoint directory.
    Repack {
        /// The checkpoint directory.
        directory: PathBuf,
        /// The artifact directory to write, by custom NAME.np.
        out: PathBuf,
        #[command(flatten)]
        narrow: Narrow,
    },
    /// Runs a text through the model and keeps traces of its activations.
    Collect {
        /// The artifact directory.
        model: PathBuf,
        #[command(flatten)]
        collect: CollectFlags,
    },
    /// Makes the vocabulary of masks from the traces.
    BuildCentroids {
        /// The artifact directory.
        model: PathBuf,
        #[command(flatten)]
        build: BuildFlags,
    },
    /// All of the above, from a model in any form to an artifact directory.
    All {
        /// A .gguf file, a Hugging Face directory, or a repository of the hub as OWNER/NAME.
        source: String,
        /// The artifact directory to write, by custom NAME.np.
        out: PathBuf,
        /// Branch, tag or commit of a repository.
        #[arg(long, default_value = "main")]
        revision: String,
        #[command(flatten)]
        narrow: Narrow,
        #[command(flatten)]
        collect: CollectFlags,
        #[command(flatten)]
        build: BuildFlags,
    },
    /// Checks every bit of an artifact directory.
    Verify {
        /// The artifact directory.
        model: PathBuf,
    },
    /// Says what an artifact directory holds.
    Inspect {
        /// The artifact directory.
        model: PathBuf,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args)]
struct Narrow {
    /// What F32 matrices and GGUF tensors become [default: f16].
    #[arg(long, value_enum)]
    dtype: Option<NarrowDtype>,
}

#[derive(Clone, Copy, ValueEnum)]
enum NarrowDtype {
    F16,
    Bf16,
}

#[derive(Args)]
struct CollectFlags {
    /// The text, as UTF-8.
    #[arg(long)]
    text: PathBuf,
    /// Most tokens of the text [default: all].
    #[arg(long)]
    tokens: Option<usize>,
    /// Tokens of a sequence, each with an empty context.
    #[arg(long, default_value_t = 256)]
    sequence: usize,
    /// Share of neurons in the masks.
    #[arg(long, default_value_t = 0.5)]
    k_fraction: f64,
    /// Memory for rows and activations, like 4GiB [default: 4GiB].
    #[arg(long, value_parser = parse_size)]
    memory: Option<u64>,
}

#[derive(Args)]
struct BuildFlags {
    /// The masks to cluster.
    #[arg(long, value_enum, default_value = "both")]
    projection: ProjectionChoice,
    /// Centroids per layer and projection.
    #[arg(long, default_value_t = 64)]
    centroids: usize,
    /// Same seed, same bytes.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum ProjectionChoice {
    Joint,
    Separate,
    Both,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Download { repo, revision, dir } => {
            say(&download(&repo, &revision, dir.as_deref())?.display().to_string())
        }
        Command::Import { source, directory, narrow } => import(&source, &directory, narrow.dtype()),
        Command::Repack { directory, out, narrow } => repack(&directory, &out, narrow.dtype()),
        Command::Collect { model, collect } => run_collect(&model, collect),
        Command::BuildCentroids { model, build } => run_build(&model, &build),
        Command::All { source, out, revision, narrow, collect, build } => {
            let (directory, narrow_to) = checkpoint_of(&source, &revision, &out, narrow.dtype())?;
            repack(&directory, &out, narrow_to)?;
            run_collect(&out, collect)?;
            run_build(&out, &build)
        }
        Command::Verify { model } => verify(&model),
        Command::Inspect { model, json } => {
            let inspection = np_prep::inspect(&model)?;
            say(&if json { format!("{:#}", inspection.to_json()) } else { inspection.to_text() })
        }
    }
}

/// The checkpoint directory of a model in any form, and what its F32 matrices still have to become.
fn checkpoint_of(source: &str, revision: &str, out: &Path, dtype: Option<Dtype>) -> Result<(PathBuf, Option<Dtype>)> {
    let path = Path::new(source);
    if path.is_dir() {
        return Ok((path.into(), dtype));
    }
    if path.is_file() {
        let directory = out.with_extension("checkpoint");
        import(path, &directory, dtype)?;
        return Ok((directory, None));
    }
    let parts: Vec<&str> = source.split('/').collect();
    match parts.as_slice() {
        [owner, name] if !owner.is_empty() && !owner.starts_with('.') && !name.is_empty() => {
            Ok((download(source, revision, None)?, dtype))
        }
        _ => Err(anyhow!("{source}: no such file or directory, and not a repository as OWNER/NAME")),
    }
}

fn download(repo: &str, revision: &str, directory: Option<&Path>) -> Result<PathBuf> {
    Ok(np_prep::download(repo, revision, directory, &HubSettings::from_env(), Progress::Terminal)?)
}

fn import(source: &Path, directory: &Path, dtype: Option<Dtype>) -> Result<()> {
    let imported = np_prep::import(source, directory, dtype, Progress::Terminal)?;
    warn(&imported.warnings);
    say(&format!("{}: checkpoint of {}", directory.display(), imported.source.name))
}

fn repack(directory: &Path, out: &Path, dtype: Option<Dtype>) -> Result<()> {
    let checkpoint = Checkpoint::open(directory, dtype)?;
    warn(checkpoint.warnings());
    let source = source_of(&checkpoint, Progress::Terminal)?;
    let manifest = np_prep::repack(&checkpoint, &source, out, Progress::Terminal)?;
    let (layers, neurons) = (manifest.geometry.layers, manifest.geometry.intermediate);
    say(&format!("{}: {layers} layers of {neurons} neurons, {}", out.display(), manifest.dtype.name()))
}

fn run_collect(model: &Path, flags: CollectFlags) -> Result<()> {
    let CollectFlags { text, tokens, sequence, k_fraction, memory } = flags;
    let options = CollectOptions { text, tokens, sequence, k_fraction, memory_bytes: memory };
    let made = np_prep::collect(model, &options, Progress::Terminal)?;
    say(&format!("{}: traces {}", model.display(), outcome(made)))
}

fn run_build(model: &Path, flags: &BuildFlags) -> Result<()> {
    let projection = match flags.projection {
        ProjectionChoice::Joint => Some(Projection::Joint),
        ProjectionChoice::Separate => Some(Projection::Separate),
        ProjectionChoice::Both => None,
    };
    let options = BuildOptions { projection, centroids: flags.centroids, seed: flags.seed };
    let bar = Progress::Terminal.count("build centroids", 0);
    let made = np_prep::build(model, &options, &mut |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();
    say(&format!("{}: centroids {}", model.display(), outcome(made)))
}

fn verify(model: &Path) -> Result<()> {
    let verified = np_prep::verify(model, Progress::Terminal)?;
    for name in &verified.unknown {
        eprintln!("warning: {}: not part of an artifact directory, not checked", model.join(name).display());
    }
    say(&format!("{}: {} files are whole", model.display(), verified.whole.len()))
}

/// Prints a result. A reader that has seen enough and closed the pipe is no failure.
fn say(text: &str) -> Result<()> {
    match writeln!(io::stdout(), "{}", text.trim_end()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error).context("standard output"),
        _ => Ok(()),
    }
}

fn warn(warnings: &[String]) {
    warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
}

fn outcome(made: bool) -> &'static str {
    if made { "written" } else { "are up to date" }
}

impl Narrow {
    fn dtype(&self) -> Option<Dtype> {
        self.dtype.map(|dtype| match dtype {
            NarrowDtype::F16 => Dtype::F16,
            NarrowDtype::Bf16 => Dtype::Bf16,
        })
    }
}
