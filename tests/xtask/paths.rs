//! Where things lie.

use std::env;
use std::path::{Path, PathBuf};

/// The repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package lies in the workspace")
}

/// Cargo's target folder. All that xtask makes or downloads lies in it.
pub fn target() -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => root().join(folder),
        None => root().join("target"),
    }
}

/// One of our binaries, as [`build_binaries`](crate::steps::build_binaries) leaves it.
pub fn binary(name: &str) -> PathBuf {
    target().join("debug").join(name)
}

/// Downloaded and unpacked packages, shared by the demo and the tests.
pub fn packages() -> PathBuf {
    target().join("packages")
}
