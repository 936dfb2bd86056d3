use super::*;
use crate::test_checkpoint::{geometry, write_checkpoint, write_sharded_checkpoint};
use crate::test_hub::{COMMIT, REPO, TestHub};
use np_formats::Dtype;
use std::collections::BTreeMap;

const WEIGHTS: &str = "model.safetensors";

struct Setup {
    hub: TestHub,
    cache: tempfile::TempDir,
}

impl Setup {
    fn new(write: impl FnOnce(&Path)) -> Self {
        let model = tempfile::tempdir().unwrap();
        write(model.path());
        let entries = fs::read_dir(model.path()).unwrap().map(|entry| entry.unwrap().path());
        let mut files: BTreeMap<_, _> = entries.map(|path| (own_name(&path), fs::read(&path).unwrap())).collect();
        files.insert("README.md".into(), b"not needed".to_vec());
        files.insert("consolidated.safetensors".into(), b"not needed either".to_vec());
        Self { hub: TestHub::start(files), cache: tempfile::tempdir().unwrap() }
    }

    fn single() -> Self {
        Self::new(|path| write_checkpoint(path, &geometry(), Dtype::F16, 1))
    }

    fn settings(&self) -> HubSettings {
        HubSettings {
            endpoint: Some(self.hub.endpoint.clone()),
            cache: Some(self.cache.path().into()),
            token: Some("from-settings".into()),
            offline: false,
            range_bytes: 50_000,
            attempts: 1,
        }
    }

    fn download(&self) -> Result<PathBuf> {
        download(REPO, "main", None, &self.settings(), Progress::Silent)
    }

    #[track_caller]
    fn check_refused(&self, words: &[&str]) {
        let message = self.download().unwrap_err().to_string();
        check_words(&message, words);
    }

    fn partials(&self) -> usize {
        let blobs = self.cache.path().join("models--some--model/blobs");
        fs::read_dir(blobs)
            .unwrap()
            .filter(|entry| own_name(&entry.as_ref().unwrap().path()).contains("partial"))
            .count()
    }

    fn ranges(&self) -> Vec<String> {
        let requests = self.hub.take_requests().into_iter();
        requests.filter_map(|request| Some(request.split_once("bytes=")?.1.to_string())).collect()
    }
}

#[track_caller]
fn check_words(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
    assert_eq!(message.lines().count(), 1, "{message:?}");
}

#[test]
fn what_is_needed_is_fetched_once() {
    let setup = Setup::single();
    let directory = setup.download().unwrap();
    Checkpoint::open(&directory, None).unwrap();
    let requests = setup.hub.take_requests();
    assert!(!requests.iter().any(|request| request.contains("README") || request.contains("consolidated")));
    let expected = source_of(&Checkpoint::open(&directory, None).unwrap(), Progress::Silent).unwrap();
    assert_eq!((expected.name.as_str(), expected.revision.as_deref()), (REPO, Some(COMMIT)));
    assert_eq!(setup.partials(), 0);

    assert_eq!(setup.download().unwrap(), directory);
    let requests = setup.hub.take_requests();
    assert!(requests.iter().all(|request| request.starts_with("GET /api/")), "{requests:?}");
}

#[test]
fn shards_are_those_that_the_index_names() {
    let setup = Setup::new(|path| write_sharded_checkpoint(path, &geometry(), 1));
    let directory = setup.download().unwrap();
    assert_eq!(Checkpoint::open(&directory, None).unwrap().files().count(), 3);
    assert!(!directory.join("consolidated.safetensors").exists());
    let setup = Setup::new(|path| {
        write_sharded_checkpoint(path, &geometry(), 1);
        fs::remove_file(path.join("model-00002-of-00003.safetensors")).unwrap();
    });
    setup.check_refused(&[REPO, "model-00002-of-00003.safetensors"]);
}

#[test]
fn a_directory_of_ones_own_tells_its_source() {
    let setup = Setup::single();
    let own = setup.cache.path().join("own");
    let directory = download(REPO, "main", Some(&own), &setup.settings(), Progress::Silent).unwrap();
    assert_eq!(directory, own);
    let source = source_of(&Checkpoint::open(&own, None).unwrap(), Progress::Silent).unwrap();
    assert_eq!((source.name.as_str(), source.revision.as_deref()), (REPO, Some(COMMIT)));
    assert!(!fs::symlink_metadata(own.join(WEIGHTS)).unwrap().is_symlink());
    download(REPO, "main", Some(&own), &setup.settings(), Progress::Silent).unwrap();
}

#[test]
fn a_broken_download_goes_on_where_it_stopped() {
    let setup = Setup::single();
    setup.hub.change(|state| state.bodies_until_cut = Some(2));
    setup.check_refused(&[REPO, "try again"]);
    assert_eq!(setup.partials(), 1);
    assert_eq!(setup.ranges(), ["0-49999", "50000-99999", "100000-149999"]);
    let directory = setup.download().unwrap();
    assert_eq!(setup.ranges()[0], "100000-149999");
    Checkpoint::open(&directory, None).unwrap();
}

#[test]
fn what_arrives_damaged_is_removed_and_named() {
    let setup = Setup::single();
    setup.hub.change(|state| {
        let mut damaged = state.files[WEIGHTS].clone();
        *damaged.last_mut().unwrap() ^= 1;
        state.replaced.insert(WEIGHTS.into(), damaged);
    });
    setup.check_refused(&[WEIGHTS, REPO, "sha256", "blobs", "run the same command again"]);
    let snapshot = setup.cache.path().join(format!("models--some--model/snapshots/{COMMIT}"));
    assert!(fs::symlink_metadata(snapshot.join(WEIGHTS)).is_err());
    setup.hub.change(|state| state.replaced.clear());
    Checkpoint::open(&setup.download().unwrap(), None).unwrap();
    setup.hub.change(|state| drop(state.replaced.insert("tokenizer.json".into(), b"short".to_vec())));
    fs::remove_file(snapshot.join("tokenizer.json")).unwrap();
    fs::remove_dir_all(setup.cache.path().join("models--some--model/blobs")).unwrap();
    setup.check_refused(&["tokenizer.json", "5 bytes", "expected 18"]);
}

#[test]
fn a_file_cut_short_in_the_cache_is_fetched_again() {
    let setup = Setup::single();
    let weights = setup.download().unwrap().join(WEIGHTS);
    let whole = fs::read(&weights).unwrap();
    fs::write(&weights, &whole[..1_000]).unwrap();
    setup.download().unwrap();
    assert_eq!(fs::read(&weights).unwrap(), whole);
}

#[test]
fn refusals_say_what_to_do() {
    let setup = Setup::single();
    let asked = |repo: &str, revision: &str| {
        download(repo, revision, None, &setup.settings(), Progress::Silent).unwrap_err().to_string()
    };
    for codes in [true, false] {
        setup.hub.change(|state| state.codes = codes);
        check_words(&asked("some/other", "main"), &["some/other", "not found", "HF_TOKEN", &setup.hub.endpoint]);
        check_words(&asked(REPO, "v9"), &[REPO, "v9", "--revision"]);
    }
    setup.hub.change(|state| (state.codes, state.token) = (true, Some("secret".into())));
    let message = asked(REPO, "main");
    check_words(&message, &[REPO, "Access to this model is restricted", "HF_TOKEN"]);
    assert!(!message.contains("from-settings"), "{message}");
}

#[test]
fn the_token_goes_along() {
    let setup = Setup::single();
    setup.hub.change(|state| state.token = Some("from-settings".into()));
    setup.download().unwrap();
}

#[test]
fn offline_uses_the_cache_alone() {
    let setup = Setup::single();
    let offline = HubSettings { offline: true, ..setup.settings() };
    let download = |settings: &HubSettings| download(REPO, "main", None, settings, Progress::Silent);
    let message = download(&offline).unwrap_err().to_string();
    check_words(&message, &[REPO, "main", "HF_HUB_OFFLINE"]);
    let directory = setup.download().unwrap();
    setup.hub.take_requests();
    assert_eq!(download(&offline).unwrap(), directory);
    assert!(setup.hub.take_requests().is_empty());
}

#[test]
fn a_model_that_is_not_supported_is_refused_before_its_weights_are_fetched() {
    let setup = Setup::single();
    setup.hub.change(|state| drop(state.files.insert("config.json".into(), br#"{"model_type": "gpt2"}"#.to_vec())));
    setup.check_refused(&["config.json", "gpt2"]);
    assert!(!setup.hub.take_requests().iter().any(|request| request.contains(WEIGHTS)));
    let setup = Setup::new(|path| {
        write_checkpoint(path, &geometry(), Dtype::F16, 1);
        fs::rename(path.join(WEIGHTS), path.join("pytorch_model.bin")).unwrap();
    });
    setup.hub.change(|state| drop(state.files.remove("consolidated.safetensors")));
    setup.check_refused(&[REPO, "pytorch_model.bin", "save_pretrained"]);
}

#[test]
fn a_hub_that_is_not_there_is_named() {
    let mut settings = Setup::single().settings();
    settings.endpoint = Some("http://127.0.0.1:1".into());
    let message = download(REPO, "main", None, &settings, Progress::Silent).unwrap_err().to_string();
    check_words(&message, &[REPO, "http://127.0.0.1:1", "try again"]);
}
