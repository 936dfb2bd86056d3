//! The residual stream of all tokens between two layers, on disk.

use crate::error::{Error, Result, io_error};
use np_formats::{AtomicFile, Error as FormatError};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// (tokens, hidden) f32 values without a header: it never outlives the step that wrote it.
pub struct ResidualFile {
    path: PathBuf,
    hidden: usize,
    stage: Stage,
}

enum Stage {
    Written(AtomicFile),
    Read(File),
}

impl ResidualFile {
    /// Starts a file that appears when [`ResidualFile::finish`] is called.
    pub fn create(path: &Path, hidden: usize) -> Result<Self> {
        Ok(Self { path: path.into(), hidden, stage: Stage::Written(AtomicFile::create(path)?) })
    }

    /// Opens a finished file of `tokens` tokens.
    pub fn open(path: &Path, hidden: usize, tokens: usize) -> Result<Self> {
        let file = File::open(path).map_err(io_error(path, "open"))?;
        let actual = file.metadata().map_err(io_error(path, "stat"))?.len();
        let expected = (tokens * hidden * size_of::<f32>()) as u64;
        if actual != expected {
            let remedy = "remove the traces and collect again";
            return Err(Error::Format(FormatError::Length { path: path.into(), actual, expected, remedy }));
        }
        Ok(Self { path: path.into(), hidden, stage: Stage::Read(file) })
    }

    /// Adds whole tokens.
    pub fn append(&mut self, values: &[f32]) -> Result<()> {
        assert_eq!(values.len() % self.hidden, 0);
        match &mut self.stage {
            Stage::Written(file) => file.write_all(bytemuck::cast_slice(values)).map_err(io_error(&self.path, "write")),
            Stage::Read(_) => unreachable!("a file that is read is not added to"),
        }
    }

    /// Reads the next tokens.
    pub fn read(&mut self, values: &mut [f32]) -> Result<()> {
        match &mut self.stage {
            Stage::Read(file) => {
                file.read_exact(bytemuck::cast_slice_mut(values)).map_err(io_error(&self.path, "read"))
            }
            Stage::Written(_) => unreachable!("a file that is written is not read; see reread"),
        }
    }

    /// Reads what was written so far from its beginning, before it is finished.
    pub fn reread(&self) -> Result<Self> {
        let partial = np_formats::partial_path(&self.path);
        let file = File::open(&partial).map_err(io_error(&partial, "open"))?;
        Ok(Self { path: partial, hidden: self.hidden, stage: Stage::Read(file) })
    }

    /// Gives a written file its name.
    pub fn finish(self) -> Result<()> {
        match self.stage {
            Stage::Written(file) => Ok(file.commit()?),
            Stage::Read(_) => Ok(()),
        }
    }
}
