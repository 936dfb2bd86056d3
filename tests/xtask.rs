//! The one door: `cargo xtask demo` shows the main job, `cargo xtask check` proves it.
//!
//! Everything here drives other programs (cargo, pip and our own three binaries) and decides nothing about models.

use anyhow::{Result, bail};
use std::process::ExitCode;

#[path = "xtask/check.rs"]
mod check;
#[path = "xtask/demo.rs"]
mod demo;
#[path = "xtask/paths.rs"]
mod paths;
#[path = "xtask/steps.rs"]
mod steps;
#[path = "xtask/text.rs"]
mod text;
#[path = "xtask/wheel.rs"]
mod wheel;

const USAGE: &str = "usage: cargo xtask demo            prepare, train and run a small model
       cargo xtask check [--fast]  format, lints, tests and docs; --fast leaves out what is only compiled, not run";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["demo"] => demo::demo(),
        ["check"] => check::check(check::Scope::Whole),
        ["check", "--fast"] => check::check(check::Scope::Fast),
        _ => bail!("unknown command\n{USAGE}"),
    }
}
