//! SmolLM2-135M-Instruct as an artifact directory without a vocabulary, made once for all tests.

use crate::programs::{gguf, program, succeed};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The directory. Both steps reuse what an earlier run of the tests left.
pub fn artifact() -> &'static Path {
    static ARTIFACT: OnceLock<PathBuf> = OnceLock::new();
    ARTIFACT.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let (checkpoint, artifact) = (folder.join("smollm2"), folder.join("smollm2.np"));
        succeed(program("np-prep").arg("import").args([&gguf(), &checkpoint]));
        succeed(program("np-prep").arg("repack").args([&checkpoint, &artifact]));
        artifact
    })
}
