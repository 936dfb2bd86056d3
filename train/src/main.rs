//! `np-train`: flags in, a trained predictor out.

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use np_formats::Projection;
use np_train::{Compute, Epoch, Options, Report, train_predictor};
use std::path::PathBuf;
use std::process::ExitCode;

/// Trains the networks that an artifact directory needs.
#[derive(Parser)]
#[command(name = "np-train", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train the predictor of centroids, after `np-prep build-centroids`.
    Predictor(Predictor),
}

#[derive(clap::Args)]
struct Predictor {
    /// The artifact directory.
    artifact: PathBuf,
    /// What computes.
    #[arg(long, value_enum, default_value_t = Backend::Cpu)]
    backend: Backend,
    /// The network to train: for joint centroids, for gate and up centroids apart, or both.
    #[arg(long, value_enum, default_value_t = Projections::Both)]
    projection: Projections,
    /// The same seed gives the same file on the CPU.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Passes over the training tokens at most; training ends early when they no longer help.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    epochs: u16,
    /// One JSON object per epoch instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Backend {
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, ValueEnum)]
enum Projections {
    Joint,
    Separate,
    Both,
}

fn main() -> ExitCode {
    let Command::Predictor(arguments) = Arguments::parse().command;
    match predictor(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn predictor(arguments: &Predictor) -> Result<()> {
    let options = Options {
        projection: match arguments.projection {
            Projections::Joint => Some(Projection::Joint),
            Projections::Separate => Some(Projection::Separate),
            Projections::Both => None,
        },
        compute: match arguments.backend {
            Backend::Cpu => Compute::Cpu,
            Backend::Cuda => Compute::Cuda,
        },
        seed: arguments.seed,
        epochs: arguments.epochs.into(),
        ..Options::default()
    };
    let mut printer = Printer { json: arguments.json, bar: None, heading: true };
    let path = train_predictor(&arguments.artifact, &options, &mut printer)?;
    if !arguments.json {
        println!("wrote {}", path.display());
    }
    Ok(())
}

/// Prints epochs on standard output and shows steps on a terminal.
struct Printer {
    json: bool,
    bar: Option<(Projection, ProgressBar)>,
    heading: bool,
}

impl Report for Printer {
    fn step(&mut self, projection: Projection, done: usize, total: usize) {
        if self.bar.as_ref().is_none_or(|(shown, _)| *shown != projection) {
            // A bar on standard error draws nothing when that is not a terminal.
            let style = ProgressStyle::with_template("{prefix:<24} {bar:30} {pos}/{len} {eta}");
            let bar = ProgressBar::new(total as u64).with_prefix(format!("train {}", projection.name()));
            self.bar = Some((projection, bar.with_style(style.expect("the template is right"))));
        }
        if let Some((_, bar)) = &self.bar {
            bar.set_position(done as u64);
        }
    }

    fn epoch(&mut self, epoch: &Epoch) {
        let print = || {
            if self.json {
                println!("{}", json(epoch));
                return;
            }
            if self.heading {
                println!(
                    "{:<9} {:>5} {:>10} {:>10} {:>9} {:>9} {:>8} {:>8}",
                    "network", "epoch", "loss", "held out", "accuracy", "majority", "recall", "static"
                );
            }
            println!("{}", row(epoch));
        };
        match &self.bar {
            Some((_, bar)) => bar.suspend(print),
            None => print(),
        }
        self.heading = false;
    }
}

/// One line of the table. A star marks the best epoch so far.
fn row(epoch: &Epoch) -> String {
    format!(
        "{:<9} {:>4}{} {:>10.4} {:>10.4} {:>7.2} % {:>7.2} % {:>8.4} {:>8.4}",
        epoch.projection.name(),
        epoch.epoch,
        if epoch.kept { '*' } else { ' ' },
        epoch.train_loss,
        epoch.held_out_loss,
        100.0 * epoch.accuracy,
        100.0 * epoch.majority_accuracy,
        epoch.recall,
        epoch.static_recall,
    )
}

fn json(epoch: &Epoch) -> serde_json::Value {
    serde_json::json!({
        "projection": epoch.projection.name(),
        "epoch": epoch.epoch,
        "train_loss": epoch.train_loss,
        "held_out_loss": epoch.held_out_loss,
        "accuracy": epoch.accuracy,
        "majority_accuracy": epoch.majority_accuracy,
        "recall": epoch.recall,
        "static_recall": epoch.static_recall,
        "kept": epoch.kept,
    })
}
