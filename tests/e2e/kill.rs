//! A long step is killed at many moments; the next run finishes it, and the result is that of an undisturbed run.

use crate::programs::{copy_folder, files_below, program, succeed};
use crate::tiny::{Tiny, text};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Kills come after this many changes to the files, until one run ends before its kill.
const CHANGES: [usize; 10] = [1, 2, 3, 4, 6, 9, 13, 18, 24, 40];
const STEP_TIME_MAX: Duration = Duration::from_secs(120);

#[test]
fn repack() {
    let work = Work::new(Tiny { seed: 1, hidden: 128, neurons: 512, layers: 12 });
    let checkpoint = work.path("checkpoint");
    work.check("before", |artifact| {
        let mut command = program("np-prep");
        command.arg("repack").arg(&checkpoint).arg(artifact);
        command
    });
}

#[test]
fn collect() {
    let work = Work::new(Tiny::new(2));
    let artifact = work.path("before");
    succeed(program("np-prep").arg("repack").arg(work.path("checkpoint")).arg(&artifact));
    work.check("before", |artifact| collect_into(&work, artifact));
}

#[test]
fn build_centroids() {
    let work = Work::new(Tiny::new(3));
    let artifact = work.path("before");
    succeed(program("np-prep").arg("repack").arg(work.path("checkpoint")).arg(&artifact));
    succeed(&mut collect_into(&work, &artifact));
    work.check("before", |artifact| {
        let mut command = program("np-prep");
        command.arg("build-centroids").arg(artifact).args(["--centroids", "8"]);
        command
    });
}

fn collect_into(work: &Work, artifact: &Path) -> Command {
    let mut command = program("np-prep");
    command.arg("collect").arg(artifact).arg("--text").arg(work.path("text"));
    command.args(["--tokens", "1536", "--sequence", "128"]);
    command
}

/// A folder with a checkpoint, a text and room for results.
struct Work {
    folder: tempfile::TempDir,
}

impl Work {
    fn new(tiny: Tiny) -> Self {
        let folder = tempfile::tempdir().expect("a folder can be made");
        tiny.write(&folder.path().join("checkpoint"));
        fs::write(folder.path().join("text"), text(tiny.seed, 4_000)).expect("the text can be written");
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs `step` on copies of `before` (which may be absent): once undisturbed, then killed at each moment and run
    /// again.
    fn check(&self, before: &str, step: impl Fn(&Path) -> Command) {
        let begin = |name: &str| {
            let artifact = self.path(name);
            if self.path(before).exists() {
                copy_folder(&self.path(before), &artifact);
            }
            artifact
        };
        let undisturbed = begin("undisturbed.np");
        succeed(&mut step(&undisturbed));
        let mut kills = 0;
        for changes in CHANGES {
            let artifact = begin(&format!("killed-{changes}.np"));
            let killed = kill_after(&mut step(&artifact), &artifact, changes);
            kills += usize::from(killed);
            succeed(&mut step(&artifact));
            same(&undisturbed, &artifact, changes);
            if !killed {
                break;
            }
        }
        assert!(kills >= 3, "only {kills} runs were killed in the middle");
    }
}

/// Starts `command` and kills it when the files of `artifact` have changed `changes` times. Returns whether it was
/// still running then.
fn kill_after(command: &mut Command, artifact: &Path, changes: usize) -> bool {
    let start = Instant::now();
    let mut seen = listing(artifact);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the program starts");
    let mut count = 0;
    while child.try_wait().expect("the program can be waited for").is_none() {
        assert!(start.elapsed() < STEP_TIME_MAX, "{command:?} does not end");
        let now = listing(artifact);
        count += usize::from(now != seen);
        seen = now;
        if count >= changes {
            child.kill().expect("the program can be killed");
            let status = child.wait().expect("the program can be waited for");
            return !status.success();
        }
    }
    false
}

/// Names and lengths of all files below `folder`.
fn listing(folder: &Path) -> BTreeSet<(PathBuf, u64)> {
    let length = |file: &PathBuf| fs::metadata(folder.join(file)).map_or(0, |data| data.len());
    files_below(folder).into_iter().map(|file| (file.clone(), length(&file))).collect()
}

#[track_caller]
fn same(expected: &Path, found: &Path, changes: usize) {
    let files = files_below(expected);
    assert_eq!(files_below(found), files, "files after a kill at change {changes}");
    for file in files {
        let equal = fs::read(expected.join(&file)).unwrap() == fs::read(found.join(&file)).unwrap();
        assert!(equal, "{} differs after a kill at change {changes}", file.display());
    }
}
