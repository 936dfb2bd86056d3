//! The house rules, as tests. Each rule is a function from files to complaints, and each is seen to complain.

mod source;

use source::code_only;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Folders in the order in which they stand on each other, with those that each may use.
const EDGES: &[(&str, &[&str])] = &[
    ("formats", &[]),
    ("kernels", &["formats"]),
    ("runtime", &["formats", "kernels"]),
    ("prep", &["formats", "kernels", "runtime"]),
    ("train", &["formats", "runtime"]),
    ("tests", &[]),
];
/// Dependencies that only one folder may have.
const HOMES: &[(&str, &str)] = &[
    ("hf-hub", "prep"),
    ("candle-core", "prep"),
    ("linfa", "prep"),
    ("linfa-clustering", "prep"),
    ("burn", "train"),
    ("burn-flex", "train"),
    ("io-uring", "runtime"),
    ("gemm", "kernels"),
];
/// Where `unsafe` may stand, and what it is for there.
const UNSAFE: &[(&str, &str)] = &[
    ("kernels/src/cpu/", "vector instructions"),
    ("kernels/src/pages.rs", "memory from mmap"),
    ("runtime/src/io/", "memory lent to the kernel"),
    ("runtime/src/transfer.rs", "memory lent to a reader"),
    ("train/src/gpu.rs", "asks whether a CUDA driver is there"),
    ("tests/e2e/faults.rs", "a reader that fails by script"),
    ("tests/allocations.rs", "an allocator that counts"),
];
/// Files that may be longer than [`LINES_MAX`], each with its reason.
const LONG: &[(&str, &str)] = &[];
const LINES_MAX: usize = 500;
/// Words that say nothing about what a file holds.
const EMPTY_NAMES: &[&str] = &["util", "common", "helper", "misc", "manager", "stuff"];
/// Geometry is data: code is never named after a model.
const MODELS: &[&str] = &["llama", "mistral", "qwen", "smollm", "phi3", "gemma"];
/// Paths of one machine, and hosts that only a package manager should know. Bars keep the list from finding itself.
const PLACES: &[&str] =
    &["/ro|ot/", "/ho|me/", "/wo|rk/", "pypi|.org", "pythonhosted|.org", "//crates|.io", "debian|.org", "npmjs|.org"];
/// Code that is not finished, not run, or not explained.
const UNFINISHED: &[&str] = &["#[ignore", "todo!", "unimplemented!", "dbg!", "#[allow(", "#![allow("];

/// All text files of the repository by path, as a checkout has them.
type Tree = BTreeMap<String, String>;

#[test]
fn crate_edges() {
    check(edges, &[]);
    let formats = ("formats/Cargo.toml", "[dependencies]\nnp-kernels.workspace = true\n[lints]\nworkspace = true");
    check_on(&[formats], edges, &["formats/Cargo.toml: may not depend on np-kernels"]);
    let runtime = ("runtime/Cargo.toml", "[dev-dependencies]\nhf-hub = \"1\"\n[lints]\nworkspace = true");
    check_on(&[runtime], edges, &["runtime/Cargo.toml: hf-hub belongs to prep alone"]);
    let xtask = ("tests/Cargo.toml", "[dependencies]\nnp-prep.workspace = true\n[lints]\nworkspace = true");
    check_on(&[xtask], edges, &["tests/Cargo.toml: may not depend on np-prep"]);
    check_on(
        &[("prep/Cargo.toml", "[dependencies]")],
        edges,
        &["prep/Cargo.toml: does not take the workspace's lints"],
    );
    let elsewhere = ("Cargo.lock", "source = \"git+https://example.org/x\"");
    check_on(&[elsewhere], edges, &["Cargo.lock: a dependency comes from a git repository"]);
}

#[test]
fn unsafe_code_has_its_places() {
    check(unsafe_places, &[]);
    let block = "fn f() { unsafe { g() } }";
    check_on(
        &[("prep/src/repack.rs", block)],
        unsafe_places,
        &["prep/src/repack.rs: unsafe code does not belong here"],
    );
    check_on(&[("runtime/src/io/uring.rs", block), ("a.rs", "// unsafe {}")], unsafe_places, &[]);
}

#[test]
fn files_are_short() {
    check(lengths, &[]);
    let long = "\n".repeat(501);
    check_on(&[("prep/src/all.rs", &long)], lengths, &["prep/src/all.rs: 501 lines, at most 500"]);
}

#[test]
fn names_say_what_a_file_holds() {
    check(names, &[]);
    check_on(&[("prep/src/utils.rs", "")], names, &["prep/src/utils.rs: \"util\" says nothing"]);
    check_on(&[("runtime/src/qwen2.rs", "")], names, &["runtime/src/qwen2.rs: named after a model (qwen)"]);
    check_on(&[("prep/tests/a.rs", "")], names, &["prep/tests/a.rs: tests that span crates live in tests/e2e"]);
}

#[test]
fn text_knows_no_machine() {
    check(places, &[]);
    let text = format!("in {}x", PLACES[0].replace('|', ""));
    check_on(&[("README.md", &text)], places, &[&format!("README.md: mentions {}", PLACES[0].replace('|', ""))]);
}

#[test]
fn code_is_finished() {
    check(unfinished, &[]);
    check_on(&[("a.rs", "fn f() {\n    todo!()\n}")], unfinished, &["a.rs: line 2: todo!"]);
    check_on(&[("a.rs", "#[ignore = \"slow\"]")], unfinished, &["a.rs: line 1: #[ignore"]);
    check_on(&[("a.rs", "// todo!() is forbidden\nlet x = \"dbg!\";")], unfinished, &[]);
}

#[test]
fn front_pages_come_first() {
    check(front_pages, &[]);
    let late = ("formats/src/lib.rs", "mod mask;\n//! Masks.");
    check_on(&[late], front_pages, &["formats/src/lib.rs: does not begin with a sentence in //!"]);
}

#[test]
fn the_readme_shows_the_tree() {
    check(readme_tree, &[]);
    let readme = ("README.md", "## The tree\n```text\nformats/src/  bytes\nnowhere/      nothing\n```\n");
    let files = [readme, ("formats/src/lib.rs", ""), ("prep/src/lib.rs", "")];
    check_on(&files, readme_tree, &["README.md: no folder nowhere/", "README.md: prep/src/ is not in the tree"]);
    check_on(&[("README.md", "# x")], readme_tree, &["README.md: no tree"]);
}

fn edges(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (folder, allowed) in EDGES {
        let path = format!("{folder}/Cargo.toml");
        let Some(text) = tree.get(&path) else { continue };
        for (section, name) in dependencies(text) {
            // Tests may use all crates, but xtask must not wait for them to be built.
            let anything = *folder == "tests" && section == "dev-dependencies";
            if let Some(used) = name.strip_prefix("np-").filter(|used| !anything && !allowed.contains(used)) {
                complaints.push(format!("{path}: may not depend on np-{used}"));
            }
            if let Some((_, home)) = HOMES.iter().find(|(dependency, home)| *dependency == name && home != folder) {
                complaints.push(format!("{path}: {name} belongs to {home} alone"));
            }
        }
        if !text.contains("[lints]\nworkspace = true") {
            complaints.push(format!("{path}: does not take the workspace's lints"));
        }
    }
    if tree.get("Cargo.lock").is_some_and(|lock| lock.contains("source = \"git+")) {
        complaints.push("Cargo.lock: a dependency comes from a git repository".into());
    }
    complaints
}

/// Section and name of each dependency in a manifest.
fn dependencies(manifest: &str) -> Vec<(&str, &str)> {
    let mut section = "";
    let mut found = Vec::new();
    for line in manifest.lines() {
        if let Some(header) = line.strip_prefix('[') {
            section = header.trim_end_matches(']');
        } else if section.ends_with("dependencies") && !line.starts_with('#') {
            let name = line.split(['.', '=', ' ']).next().unwrap_or_default();
            found.extend(Some((section, name)).filter(|_| !name.is_empty()));
        }
    }
    found
}

fn unsafe_places(tree: &Tree) -> Vec<String> {
    let has_unsafe = |text: &str| {
        let code = code_only(text);
        let mut words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
        words.any(|word| word == "unsafe")
    };
    rust_files(tree)
        .filter(|(path, text)| !UNSAFE.iter().any(|(place, _)| path.starts_with(place)) && has_unsafe(text))
        .map(|(path, _)| format!("{path}: unsafe code does not belong here"))
        .collect()
}

fn lengths(tree: &Tree) -> Vec<String> {
    let listed = |path: &str| LONG.iter().any(|(long, _)| *long == path);
    tree.iter()
        .map(|(path, text)| (path, text.lines().count()))
        .filter(|(path, lines)| is_code(path) && *lines > LINES_MAX && !listed(path))
        .map(|(path, lines)| format!("{path}: {lines} lines, at most {LINES_MAX}"))
        .collect()
}

fn names(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for path in tree.keys().filter(|path| is_code(path)) {
        let name = path.to_lowercase();
        if let Some(word) = EMPTY_NAMES.iter().find(|&&word| name.contains(word) && !name.ends_with("common.cuh")) {
            complaints.push(format!("{path}: {word:?} says nothing"));
        }
        // A test may be about one model: golden values hold for nothing else.
        let model = MODELS.iter().find(|&&model| name.contains(model));
        if let Some(model) = model.filter(|_| !path.starts_with("tests/")) {
            complaints.push(format!("{path}: named after a model ({model})"));
        }
        if path.contains("/tests/") {
            complaints.push(format!("{path}: tests that span crates live in tests/e2e"));
        }
    }
    complaints
}

fn places(tree: &Tree) -> Vec<String> {
    let places = PLACES.iter().map(|place| place.replace('|', ""));
    // The lock file names the registry.
    let texts = || tree.iter().filter(|(path, _)| *path != "Cargo.lock");
    places
        .flat_map(|place| {
            let found = texts().filter(|(_, text)| text.contains(&place));
            found.map(|(path, _)| format!("{path}: mentions {place}")).collect::<Vec<_>>()
        })
        .collect()
}

fn unfinished(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in rust_files(tree) {
        for (index, line) in code_only(text).lines().enumerate() {
            let found = UNFINISHED.iter().filter(|word| line.contains(**word));
            complaints.extend(found.map(|word| format!("{path}: line {}: {word}", index + 1)));
        }
    }
    complaints
}

fn front_pages(tree: &Tree) -> Vec<String> {
    rust_files(tree)
        .filter(|(path, _)| path.ends_with("/lib.rs") || path.ends_with("/main.rs") || *path == "tests/xtask.rs")
        .filter(|(_, text)| !text.lines().next().is_some_and(|line| line.starts_with("//! ") && line.len() > 20))
        .map(|(path, _)| format!("{path}: does not begin with a sentence in //!"))
        .collect()
}

fn readme_tree(tree: &Tree) -> Vec<String> {
    let readme = tree.get("README.md").map_or("", String::as_str);
    let Some((_, after)) = readme.split_once("## The tree\n") else { return vec!["README.md: no tree".into()] };
    let block = after.split("```").nth(1).unwrap_or_default();
    let shown: BTreeSet<&str> = block.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    let real: BTreeSet<&str> = tree.keys().filter_map(|path| path.rfind('/').map(|at| &path[..=at])).collect();
    // A folder that holds nothing but folders may be shown or not.
    let exists = |folder: &str| tree.keys().any(|path| path.starts_with(folder));
    let missing = shown.iter().filter(|folder| !exists(folder)).map(|folder| format!("README.md: no folder {folder}"));
    let manifest_only =
        |folder: &str| folder.matches('/').count() == 1 && tree.contains_key(&format!("{folder}Cargo.toml"));
    let forgotten = real.difference(&shown).filter(|folder| !manifest_only(folder));
    missing.chain(forgotten.map(|folder| format!("README.md: {folder} is not in the tree"))).collect()
}

fn rust_files(tree: &Tree) -> impl Iterator<Item = (&str, &str)> {
    tree.iter().filter(|(path, _)| path.ends_with(".rs")).map(|(path, text)| (path.as_str(), text.as_str()))
}

fn is_code(path: &str) -> bool {
    [".rs", ".cu", ".cuh", ".sh", ".py"].iter().any(|ending| path.ends_with(ending))
}

/// Runs `rule` on the repository.
#[track_caller]
fn check(rule: fn(&Tree) -> Vec<String>, expected: &[&str]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package lies in the workspace");
    let mut tree = Tree::new();
    read(root, root, &mut tree);
    assert!(tree.contains_key("Cargo.toml"), "{} is not the repository", root.display());
    assert_eq!(rule(&tree), expected);
}

/// Runs `rule` on files given here.
#[track_caller]
fn check_on(files: &[(&str, &str)], rule: fn(&Tree) -> Vec<String>, expected: &[&str]) {
    let tree = files.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect();
    assert_eq!(rule(&tree), expected);
}

fn read(root: &Path, folder: &Path, tree: &mut Tree) {
    for entry in fs::read_dir(folder).expect("the folder is readable") {
        let path = entry.expect("the entry is readable").path();
        let name = path.file_name().expect("an entry has a name").to_string_lossy().into_owned();
        // As in .gitignore.
        if ["target", ".git", ".venv", "shared"].contains(&name.as_str()) || name.ends_with(".np") {
            continue;
        }
        if path.is_dir() {
            read(root, &path, tree);
        } else if let Ok(text) = fs::read_to_string(&path) {
            let path = path.strip_prefix(root).expect("the entry lies in the root");
            tree.insert(path.to_string_lossy().into_owned(), text);
        }
    }
}
