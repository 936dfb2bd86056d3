//! Steps with a name, a wall time and, when they fail, the command that repeats them.

use crate::paths;
use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// The steps taken so far.
#[derive(Default)]
pub struct Steps {
    taken: Vec<(String, Duration)>,
}

impl Steps {
    /// Runs `command` with its output on the terminal.
    pub fn run(&mut self, name: &str, command: &mut Command) -> Result<()> {
        self.time(name, || run(command))
    }

    /// Does `work` under the name `name`.
    pub fn time<T>(&mut self, name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        println!("\n==> {name}");
        let start = Instant::now();
        let result = work().with_context(|| name.to_string())?;
        self.taken.push((name.into(), start.elapsed()));
        Ok(result)
    }

    /// Says that a step is left out because its result is there.
    pub fn reuse(&self, name: &str, result: &Path) {
        println!("\n==> {name}: already there in {}", result.display());
    }

    /// Prints the wall time of each step.
    pub fn report(&self) {
        println!("\nwall time");
        let total = self.taken.iter().map(|(_, time)| *time).sum();
        for (name, time) in self.taken.iter().map(|(name, time)| (name.as_str(), *time)).chain([("together", total)]) {
            println!("  {:>8.1} s  {name}", time.as_secs_f64());
        }
    }
}

/// Runs `command` in the repository; an error names the command that repeats it.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.current_dir(paths::root()).status().with_context(|| reproduce(command))?;
    if status.success() { Ok(()) } else { bail!("{status}; {}", reproduce(command)) }
}

/// A cargo command that keeps to the committed lock file.
pub fn cargo(subcommand: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.arg(subcommand).args(arguments);
    if subcommand != "fmt" {
        command.arg("--locked");
    }
    command
}

/// Builds the three binaries with the profile and the features that the tests use, so that nothing is built twice.
pub fn build_binaries(steps: &mut Steps) -> Result<()> {
    steps.run("build", &mut cargo("build", &["--workspace", "--bins"]))
}

fn reproduce(command: &Command) -> String {
    let variables = command.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let variables = variables.map(|(name, value)| format!("{}={}", quoted(name), quoted(value)));
    let words = std::iter::once(command.get_program()).chain(command.get_args()).map(quoted);
    let words: Vec<String> = variables.chain(words).collect();
    format!("to repeat: cd {} && {}", quoted(paths::root().as_os_str()), words.join(" "))
}

fn quoted(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}
