//! Fetches the files of a model from a hub into the cache that all hub programs share.
//!
//! The client library keeps the cache and speaks to the hub. What it lacks is added here: large files go on where a
//! broken connection left them, and what arrives is compared with the length and sha256 that the hub announced.

use crate::checkpoint::{CONFIG_NAME, COPIED_NAMES, Checkpoint};
use crate::error::{Error, Result, io_error};
use crate::locate::{INDEX_NAME, TENSORS_NAME, explain_absence, parse_index};
use crate::progress::Progress;
use crate::provenance::{Provenance, own_name, sha256_of, source_of, weights_sha256};
use hf_hub::repository::{RepoTreeEntry, RepoTypeModel};
use hf_hub::{HFClient, HFClientSync, HFError, HFRepositorySync, split_id};
use indicatif::ProgressBar;
use np_formats::{AtomicFile, Geometry};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Component, Path, PathBuf};

/// Bytes of one request for a part of a large file: what a broken connection costs at most.
const RANGE_BYTES: u64 = 32 << 20;
/// Tries of a request that the hub does not answer.
const ATTEMPTS: usize = 5;

/// How to reach the hub.
#[derive(Clone, Debug)]
pub struct HubSettings {
    /// Its address; by default `HF_ENDPOINT`, else the public hub.
    pub endpoint: Option<String>,
    /// The cache; by default `HF_HUB_CACHE`, else `HF_HOME/hub`, else `~/.cache/huggingface/hub`.
    pub cache: Option<PathBuf>,
    /// By default `HF_TOKEN`, else the token that the hub's own login left.
    pub token: Option<String>,
    /// Whether to use only what is in the cache.
    pub offline: bool,
    /// Bytes of one request for a part of a large file.
    pub range_bytes: u64,
    /// Tries of a request that the hub does not answer.
    pub attempts: usize,
}

impl HubSettings {
    /// Settings as the environment says: `HF_ENDPOINT`, `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`.
    pub fn from_env() -> Self {
        let offline = std::env::var("HF_HUB_OFFLINE").is_ok_and(|value| is_yes(&value));
        let (range_bytes, attempts) = (RANGE_BYTES, ATTEMPTS);
        Self { endpoint: None, cache: None, token: None, offline, range_bytes, attempts }
    }
}

/// Fetches what is needed of `repo` (`OWNER/NAME`) at `revision` and returns the checkpoint directory: the snapshot in
/// the cache or, if it is given, `directory`, which then has its own names for the same files.
///
/// What is whole in the cache is not fetched again. The config is looked at first, so that a model that is not
/// supported is refused before gigabytes of it are fetched.
pub fn download(
    repo: &str,
    revision: &str,
    directory: Option<&Path>,
    settings: &HubSettings,
    progress: Progress,
) -> Result<PathBuf> {
    let hub = Hub::new(repo, revision, settings)?;
    let snapshot = if settings.offline { hub.offline_snapshot()? } else { hub.fetch_snapshot(progress)? };
    match directory {
        None => Ok(snapshot),
        Some(directory) => give_own_names(&snapshot, directory, progress),
    }
}

/// One repository at one revision.
struct Hub<'a> {
    repo: &'a str,
    revision: &'a str,
    endpoint: String,
    /// The repository's folder in the cache.
    folder: PathBuf,
    client: HFRepositorySync<RepoTypeModel>,
    range_bytes: u64,
}

/// A file of the repository.
#[derive(Clone, Debug)]
struct RemoteFile {
    name: String,
    bytes: u64,
    /// Git's id of the file, or of the pointer that stands for a large one.
    git_id: String,
    large: bool,
    sha256: Option<String>,
}

impl<'a> Hub<'a> {
    fn new(repo: &'a str, revision: &'a str, settings: &HubSettings) -> Result<Self> {
        let mut builder = HFClient::builder().retry_max_attempts(settings.attempts.saturating_sub(1));
        if let Some(endpoint) = &settings.endpoint {
            builder = builder.endpoint(endpoint);
        }
        if let Some(cache) = &settings.cache {
            builder = builder.cache_dir(cache);
        }
        if let Some(token) = &settings.token {
            builder = builder.token(token);
        }
        let unreachable = |error: HFError| {
            let endpoint = settings.endpoint.clone().unwrap_or_else(|| "the hub".into());
            Error::Hub { repo: repo.into(), endpoint, problem: cause(&error) }
        };
        let client = builder.build().map_err(unreachable)?;
        let (endpoint, cache) = (client.endpoint().to_string(), client.cache_dir().to_path_buf());
        let (owner, name) = split_id(repo);
        let folder = cache.join(format!("models--{}", repo.replace('/', "--")));
        let client = HFClientSync::from_inner(client).map_err(unreachable)?.model(owner, name);
        Ok(Self { repo, revision, endpoint, folder, client, range_bytes: settings.range_bytes })
    }

    fn offline_snapshot(&self) -> Result<PathBuf> {
        let lacking = |file: &str| Error::Offline {
            repo: self.repo.into(),
            file: file.into(),
            cache: self.folder.parent().unwrap_or(&self.folder).into(),
        };
        let found = self.client.snapshot_download().revision(self.revision).local_files_only(true).send();
        let snapshot = found.map_err(|_| lacking(&format!("revision {:?}", self.revision)))?;
        if snapshot.join(CONFIG_NAME).is_file() { Ok(snapshot) } else { Err(lacking(CONFIG_NAME)) }
    }

    fn fetch_snapshot(&self, progress: Progress) -> Result<PathBuf> {
        let info = self.client.info().revision(self.revision).send().map_err(|error| self.explain(error))?;
        let commit = info.sha.ok_or_else(|| self.odd_answer("names no commit for this revision"))?;
        if commit.is_empty() || !commit.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(self.odd_answer("names something else than a commit"));
        }
        let files = self.list(&commit)?;
        let snapshot = self.folder.join("snapshots").join(&commit);
        let (small, mut wanted) = (small_files(&files), Vec::new());
        let total = small.iter().map(|file| file.bytes).sum();
        let bar = progress.bytes("download", total);
        for file in &small {
            self.fetch(&snapshot, &commit, file, &bar)?;
        }
        let config_path = snapshot.join(CONFIG_NAME);
        let config = fs::read_to_string(&config_path).map_err(io_error(&config_path, "read"))?;
        Geometry::from_config(&config_path, &config)?;
        for name in self.weights(&snapshot, &files)? {
            wanted.push(self.find(&files, &name)?);
        }
        bar.inc_length(wanted.iter().map(|file| file.bytes).sum());
        for file in &wanted {
            self.fetch(&snapshot, &commit, file, &bar)?;
        }
        bar.finish_and_clear();
        self.note_revision(&commit)?;
        Ok(snapshot)
    }

    /// The files at the top of the repository. Folders hold other formats.
    fn list(&self, commit: &str) -> Result<Vec<RemoteFile>> {
        let entries = self.client.list_tree().revision(commit).send().map_err(|error| self.explain(error))?;
        let file = |entry| match entry {
            RepoTreeEntry::File { oid, size, path, lfs, .. } if !path.contains(['/', '\\']) && is_id(&oid) => {
                let (large, sha256) = (lfs.is_some(), lfs.and_then(|lfs| lfs.sha256));
                let bytes = size;
                Some(RemoteFile { name: path, bytes, git_id: oid, large, sha256 })
            }
            _ => None,
        };
        let files: Vec<_> = entries.into_iter().filter_map(file).collect();
        if files.iter().any(|file| file.name == CONFIG_NAME) {
            return Ok(files);
        }
        let problem = format!("{CONFIG_NAME} is not there; this is not a model in the form of transformers");
        Err(Error::Source { path: self.repo.into(), problem })
    }

    /// Names of the files that hold tensors.
    fn weights(&self, snapshot: &Path, files: &[RemoteFile]) -> Result<Vec<String>> {
        let has = |name: &str| files.iter().any(|file| file.name == name);
        if has(TENSORS_NAME) {
            return Ok(vec![TENSORS_NAME.into()]);
        }
        if !has(INDEX_NAME) {
            let names: Vec<_> = files.iter().map(|file| file.name.clone()).collect();
            return Err(Error::Source { path: self.repo.into(), problem: explain_absence(&names) });
        }
        let index = snapshot.join(INDEX_NAME);
        let text = fs::read_to_string(&index).map_err(io_error(&index, "read"))?;
        Ok(parse_index(&index, &text)?.0)
    }

    fn find(&self, files: &[RemoteFile], name: &str) -> Result<RemoteFile> {
        let found = files.iter().find(|file| file.name == name);
        found.cloned().ok_or_else(|| self.odd_answer(&format!("has no {name}, which the index names")))
    }

    /// Makes sure that `file` is whole in the snapshot.
    fn fetch(&self, snapshot: &Path, commit: &str, file: &RemoteFile, bar: &ProgressBar) -> Result<()> {
        let path = snapshot.join(&file.name);
        if fs::metadata(&path).is_ok_and(|found| found.len() == file.bytes) {
            bar.inc(file.bytes);
            return Ok(());
        }
        remove_with_target(&path);
        let fetched_sha256 = if file.large { Some(self.fetch_parts(commit, file, bar)?) } else { None };
        // The library finds a large file's bytes in the cache already, and gives them their name.
        let request = self.client.download_file().filename(&file.name).revision(commit);
        let path = request.send().map_err(|error| self.explain(error))?;
        if !file.large {
            bar.inc(file.bytes);
        }
        self.check(&path, file, fetched_sha256)
    }

    /// Fetches a large file part by part, from where an earlier run stopped. Returns the sha256 of what arrived, which
    /// is its name in the cache.
    fn fetch_parts(&self, commit: &str, file: &RemoteFile, bar: &ProgressBar) -> Result<String> {
        let blobs = self.folder.join("blobs");
        fs::create_dir_all(&blobs).map_err(io_error(&blobs, "create"))?;
        let partial = blobs.join(format!("{}.np-partial", file.git_id));
        let mut writer =
            OpenOptions::new().create(true).append(true).open(&partial).map_err(io_error(&partial, "create"))?;
        let mut at = writer.metadata().map_err(io_error(&partial, "stat"))?.len();
        if at > file.bytes {
            writer.set_len(0).map_err(io_error(&partial, "resize"))?;
            at = 0;
        }
        bar.inc(at);
        while at < file.bytes {
            let range = at..file.bytes.min(at + self.range_bytes);
            let request = self.client.download_file_to_bytes().filename(&file.name).revision(commit);
            let part = request.range(range.clone()).send().map_err(|error| self.explain(error))?;
            if part.len() as u64 != range.end - range.start {
                let problem = format!(
                    "sent {} bytes of {} where {} were asked for",
                    part.len(),
                    file.name,
                    range.end - range.start
                );
                return Err(self.odd_answer(&problem));
            }
            writer.write_all(&part).map_err(io_error(&partial, "write"))?;
            bar.inc(part.len() as u64);
            at = range.end;
        }
        writer.sync_all().map_err(io_error(&partial, "sync"))?;
        let sha256 = sha256_of(&partial, &ProgressBar::hidden())?;
        if file.sha256.as_ref().is_some_and(|announced| *announced != sha256) {
            return Err(self.damaged(&partial, file, "its sha256 is not the one announced"));
        }
        let blob = blobs.join(&sha256);
        fs::rename(&partial, &blob).map_err(io_error(&blob, "rename"))?;
        Ok(sha256)
    }

    /// Compares what lies in the cache with what the hub announced: the length, and the sha256 that names large files.
    fn check(&self, path: &Path, file: &RemoteFile, fetched_sha256: Option<String>) -> Result<()> {
        let length = fs::metadata(path).map_err(io_error(path, "stat"))?.len();
        if length != file.bytes {
            return Err(self.damaged(path, file, &format!("{length} bytes, expected {}", file.bytes)));
        }
        let announced = fs::read_link(path).ok().map(|blob| own_name(&blob)).filter(|name| name.len() == 64);
        if announced.is_none() || announced == fetched_sha256 {
            return Ok(());
        }
        // The parts did not make up the announced file, so the library has fetched it once more.
        if let Some(fetched) = fetched_sha256 {
            remove_with_target(&self.folder.join("blobs").join(fetched));
        }
        if announced != Some(sha256_of(path, &ProgressBar::hidden())?) {
            return Err(self.damaged(path, file, "its sha256 is not the one announced"));
        }
        Ok(())
    }

    /// Notes which commit the revision stands for, in the way of the cache, so that it is found offline.
    fn note_revision(&self, commit: &str) -> Result<()> {
        let plain = Path::new(self.revision).components().all(|part| matches!(part, Component::Normal(_)));
        if self.revision == commit || !plain {
            return Ok(());
        }
        let path = self.folder.join("refs").join(self.revision);
        let parent = path.parent().expect("a path below the folder has a parent");
        fs::create_dir_all(parent).map_err(io_error(parent, "create"))?;
        Ok(AtomicFile::write(&path, commit.as_bytes())?)
    }

    fn damaged(&self, path: &Path, file: &RemoteFile, problem: &str) -> Error {
        let removed = fs::canonicalize(path).unwrap_or_else(|_| path.into());
        remove_with_target(path);
        let (file, repo, problem) = (file.name.clone(), self.repo.into(), problem.into());
        Error::DamagedDownload { path: removed, file, repo, problem }
    }

    fn odd_answer(&self, problem: &str) -> Error {
        Error::Hub { repo: self.repo.into(), endpoint: self.endpoint.clone(), problem: problem.into() }
    }

    /// Says what an answer of the hub means here.
    fn explain(&self, error: HFError) -> Error {
        let repo = self.repo.to_string();
        let not_found = || Error::RepoNotFound { repo: repo.clone(), endpoint: self.endpoint.clone() };
        let no_revision = || Error::RevisionNotFound { repo: repo.clone(), revision: self.revision.into() };
        let context = match &error {
            HFError::AuthRequired { context } | HFError::Forbidden { context } | HFError::Http { context } => {
                Some(context)
            }
            HFError::RepoNotFound { context, .. } | HFError::RevisionNotFound { context, .. } => context.as_ref(),
            _ => None,
        };
        match (context.and_then(|context| context.error_code.as_deref()), &error) {
            (Some("RepoNotFound"), _) | (_, HFError::RepoNotFound { .. }) => not_found(),
            (Some("RevisionNotFound"), _) => no_revision(),
            // Without a code of the hub's own the answer does not tell which of the two is missing.
            (_, HFError::RevisionNotFound { .. }) => match self.client.exists().send() {
                Ok(false) => not_found(),
                _ => no_revision(),
            },
            (_, HFError::AuthRequired { .. } | HFError::Forbidden { .. }) => {
                let said = context.and_then(|context| context.server_message.as_deref());
                let answer = one_line(said.filter(|said| !said.is_empty()).unwrap_or("a token is needed"));
                Error::AccessRefused { repo, answer }
            }
            _ => self.odd_answer(&cause(&error)),
        }
    }
}

/// Files other than tensors, and the index.
fn small_files(files: &[RemoteFile]) -> Vec<RemoteFile> {
    let wanted = |file: &&RemoteFile| COPIED_NAMES.contains(&file.name.as_str()) || file.name == INDEX_NAME;
    files.iter().filter(wanted).cloned().collect()
}

/// Gives the files of a snapshot their own names in `directory`: a second name for the same bytes where the file system
/// can do that, else a copy.
fn give_own_names(snapshot: &Path, directory: &Path, progress: Progress) -> Result<PathBuf> {
    let checkpoint = Checkpoint::open(snapshot, None)?;
    let source = source_of(&checkpoint, progress)?;
    fs::create_dir_all(directory).map_err(io_error(directory, "create"))?;
    let small = COPIED_NAMES.iter().chain(&[INDEX_NAME]).map(|name| snapshot.join(name));
    for from in small.filter(|path| path.is_file()).chain(checkpoint.files().map(Path::to_path_buf)) {
        let to = directory.join(own_name(&from));
        let target = fs::canonicalize(&from).map_err(io_error(&from, "open"))?;
        let _ = fs::remove_file(&to);
        if fs::hard_link(&target, &to).is_err() {
            fs::copy(&target, &to).map_err(io_error(&to, "copy"))?;
        }
    }
    File::open(directory).and_then(|handle| handle.sync_all()).map_err(io_error(directory, "sync"))?;
    let weights_sha256 = weights_sha256(&Checkpoint::open(directory, None)?, progress)?;
    Provenance { source, weights_sha256 }.write(directory)?;
    Ok(directory.into())
}

/// Removes a file of the cache and, if it is a link, what it leads to.
fn remove_with_target(path: &Path) {
    // What can't be removed shows up when it is fetched again.
    if let Ok(target) = fs::canonicalize(path) {
        let _ = fs::remove_file(target);
    }
    let _ = fs::remove_file(path);
}

fn is_id(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

fn is_yes(value: &str) -> bool {
    ["1", "true", "yes", "on"].contains(&value.to_ascii_lowercase().as_str())
}

/// An error and what lies under it, in one line.
fn cause(error: &HFError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        if !text.contains(&error.to_string()) {
            text += &format!(": {error}");
        }
        source = error.source();
    }
    one_line(&text)
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
#[path = "hub_tests.rs"]
mod tests;
