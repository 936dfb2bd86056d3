//! A hub on this machine, for tests: one repository, answers as the real one gives them.

use crate::provenance::hex;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// The only repository.
pub const REPO: &str = "some/model";
/// What its branch `main` stands for.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What the hub serves, and what it was asked.
#[derive(Default)]
pub struct State {
    /// The files and their content.
    pub files: BTreeMap<String, Vec<u8>>,
    /// What is sent in place of a file's content.
    pub replaced: BTreeMap<String, Vec<u8>>,
    /// Answers to all requests without this token: 401.
    pub token: Option<String>,
    /// Whether answers that refuse carry the hub's own codes.
    pub codes: bool,
    /// Bodies of large files are cut off when this many more have been sent whole.
    pub bodies_until_cut: Option<usize>,
    /// One line per request: method, path and range.
    pub requests: Vec<String>,
}

/// A running hub. It stops with the process.
pub struct TestHub {
    /// Its address.
    pub endpoint: String,
    state: Arc<Mutex<State>>,
}

impl TestHub {
    /// Starts a hub that serves `files`.
    pub fn start(files: BTreeMap<String, Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State { files, codes: true, ..State::default() }));
        let served = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let served = Arc::clone(&served);
                std::thread::spawn(move || serve(stream, &served));
            }
        });
        Self { endpoint, state }
    }

    /// Changes what it serves.
    pub fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
    }

    /// The requests since the last call.
    pub fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }
}

/// A tensor file is a large one; all else is small.
fn is_large(name: &str) -> bool {
    name.ends_with(".safetensors")
}

fn serve(stream: TcpStream, state: &Mutex<State>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let Some(Ok(first)) = lines.next() else { return };
    let (mut range, mut token) = (None, None);
    for line in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
        let (key, value) = line.split_once(": ").unwrap();
        match key.to_ascii_lowercase().as_str() {
            "range" => range = Some(value.to_string()),
            "authorization" => token = Some(value.to_string()),
            _ => {}
        }
    }
    let mut words = first.split(' ');
    let (method, path) = (words.next().unwrap().to_string(), words.next().unwrap().to_string());
    let mut state = state.lock().unwrap();
    state.requests.push(
        [Some(method.clone()), Some(path.clone()), range.clone()].into_iter().flatten().collect::<Vec<_>>().join(" "),
    );
    let wanted = state.token.as_ref().map(|token| format!("Bearer {token}"));
    let answer = if wanted.is_some() && token != wanted {
        Answer::refusal(401, "GatedRepo", "Access to this model is restricted.", state.codes)
    } else {
        answer(&path, range.as_deref(), &state)
    };
    let cut = method == "GET" && answer.large && state.bodies_until_cut == Some(0);
    if let (true, true, Some(left)) = (method == "GET", answer.large, state.bodies_until_cut) {
        state.bodies_until_cut = left.checked_sub(1);
    }
    drop(state);
    answer.send(stream, method == "HEAD", cut);
}

struct Answer {
    status: u16,
    headers: String,
    body: Vec<u8>,
    large: bool,
}

impl Answer {
    fn refusal(status: u16, code: &str, message: &str, codes: bool) -> Self {
        let headers =
            if codes { format!("X-Error-Code: {code}\r\nX-Error-Message: {message}\r\n") } else { String::new() };
        Self { status, headers, body: Vec::new(), large: false }
    }

    fn json(value: serde_json::Value) -> Self {
        let headers = "Content-Type: application/json\r\n".into();
        Self { status: 200, headers, body: value.to_string().into_bytes(), large: false }
    }

    fn send(self, mut stream: TcpStream, head: bool, cut: bool) {
        let start = format!(
            "HTTP/1.1 {} Answer\r\nContent-Length: {}\r\nConnection: close\r\n{}\r\n",
            self.status,
            self.body.len(),
            self.headers
        );
        let body = match (head, cut) {
            (true, _) => &[],
            (false, true) => &self.body[..self.body.len() / 2],
            (false, false) => self.body.as_slice(),
        };
        // The other side may have gone, which is its affair.
        let _ = stream.write_all(start.as_bytes()).and_then(|()| stream.write_all(body));
    }
}

fn answer(path: &str, range: Option<&str>, state: &State) -> Answer {
    let api = format!("/api/models/{REPO}");
    let no_repo = || Answer::refusal(404, "RepoNotFound", "Repository not found", state.codes);
    let no_revision = || Answer::refusal(404, "RevisionNotFound", "Invalid rev id", state.codes);
    if let Some(rest) = path.strip_prefix(&api) {
        let rest = rest.split('?').next().unwrap();
        return match rest.split('/').collect::<Vec<_>>().as_slice() {
            [""] | ["", "revision", "main" | COMMIT] => Answer::json(json!({"id": REPO, "sha": COMMIT})),
            ["", "tree", COMMIT] => Answer::json(tree(state)),
            _ => no_revision(),
        };
    }
    let Some(name) = path.strip_prefix(&format!("/{REPO}/resolve/{COMMIT}/")) else { return no_repo() };
    let Some(content) = state.files.get(name) else {
        return Answer::refusal(404, "EntryNotFound", "Entry not found", state.codes);
    };
    let etag = hex(&Sha256::digest(content));
    let etag = if is_large(name) { &etag } else { &etag[..40] };
    let mut headers = format!("ETag: \"{etag}\"\r\nX-Repo-Commit: {COMMIT}\r\n");
    let mut body = state.replaced.get(name).unwrap_or(content).clone();
    let mut status = 200;
    if let Some((start, end)) = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')) {
        let (start, end): (usize, usize) = (start.parse().unwrap(), end.parse().unwrap());
        headers += &format!("Content-Range: bytes {start}-{end}/{}\r\n", body.len());
        body = body[start..=end].to_vec();
        status = 206;
    }
    Answer { status, headers, body, large: is_large(name) }
}

fn tree(state: &State) -> serde_json::Value {
    let entry = |(name, content): (&String, &Vec<u8>)| {
        let sha256 = hex(&Sha256::digest(content));
        let mut entry = json!({"type": "file", "oid": sha256[..40], "size": content.len(), "path": name});
        if is_large(name) {
            entry["lfs"] = json!({"oid": sha256, "size": content.len(), "pointerSize": 135});
        }
        entry
    };
    let folder = json!({"type": "directory", "oid": "00", "size": 0, "path": "original"});
    state.files.iter().map(entry).chain([folder]).collect()
}
