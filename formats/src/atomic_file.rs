//! Files that appear only when whole.

use crate::error::{Result, io_error};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A file being written under a temporary name beside its own; [`AtomicFile::commit`] gives it its own name.
///
/// A file that is dropped without a commit leaves nothing under the final name.
pub struct AtomicFile {
    path: PathBuf,
    partial: PathBuf,
    file: File,
    committed: bool,
}

impl AtomicFile {
    /// Starts `path` anew.
    pub fn create(path: &Path) -> Result<Self> {
        let partial = partial_path(path);
        let file = OpenOptions::new()
            .create(true)
            .truncate(true)
            .read(true)
            .write(true)
            .open(&partial)
            .map_err(io_error(&partial, "create"))?;
        Ok(Self { path: path.into(), partial, file, committed: false })
    }

    /// The file being written.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Makes the bytes durable and gives the file its name.
    pub fn commit(mut self) -> Result<()> {
        self.file.sync_all().map_err(io_error(&self.partial, "sync"))?;
        rename_durably(&self.partial, &self.path)?;
        self.committed = true;
        Ok(())
    }

    /// Writes `bytes` as the whole of `path`.
    pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
        let mut file = Self::create(path)?;
        file.write_all(bytes).map_err(io_error(&file.partial, "write"))?;
        file.commit()
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.committed {
            // Nothing can be done about a failure here, and a stale partial file is overwritten next time.
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// The temporary sibling of `path`.
pub fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().expect("a file to write has a name").to_os_string();
    name.push(".partial");
    path.with_file_name(name)
}

/// Renames `from` to `to` in the same directory, and makes the new name survive a power cut.
pub fn rename_durably(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(io_error(to, "rename"))?;
    let directory = match to.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    File::open(directory).and_then(|handle| handle.sync_all()).map_err(io_error(directory, "sync"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_appears_only_when_committed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        let mut file = AtomicFile::create(&path).unwrap();
        file.write_all(b"half").unwrap();
        drop(file);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        AtomicFile::write(&path, b"whole").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
