//! A file opened so that reads bypass the page cache, if its drive lets them.
//!
//! What alignment that takes is asked of the kernel and then tried: neither answer is trusted alone.

use np_formats::{Error, Result};
use rustix::fs::{AtFlags, OFlags, StatxFlags};
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Asked for when the system's own answer does not work: the largest block that drives have.
const BLOCK_BYTES_MAX: usize = 4096;
/// `f_type` of tmpfs.
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// `f_type` of ramfs.
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// Whether to bypass the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectMode {
    /// If it works.
    Auto,
    /// Or fail.
    Always,
    /// Read through the page cache, and drop from it what was read.
    Never,
}

/// What addresses, offsets and lengths must be multiples of. All 1 when the file is not direct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// For addresses, in bytes.
    pub memory_bytes: usize,
    /// For offsets and lengths, in bytes.
    pub offset_bytes: usize,
}

/// An open file, and what reads of it must look like.
#[derive(Debug)]
pub struct DirectFile {
    /// The file, open for reading.
    pub file: File,
    /// Whether reads bypass the page cache.
    pub direct: bool,
    /// What reads must be aligned to.
    pub align: Alignment,
    /// Why it is not as asked, one sentence each.
    pub notes: Vec<String>,
}

impl DirectFile {
    /// Opens `path` for reading.
    ///
    /// # Errors
    /// When the file can't be opened, or with [`DirectMode::Always`] when its drive does not take direct reads.
    pub fn open(path: &Path, mode: DirectMode) -> Result<Self> {
        let failed = |action| move |source| Error::Io { path: path.into(), action, source };
        let buffered = File::open(path).map_err(failed("open"))?;
        if mode == DirectMode::Never {
            return Ok(Self::buffered(buffered, Vec::new()));
        }
        let refusal = match open_direct(path, &buffered) {
            Ok((file, align)) => return Ok(Self { file, direct: true, align, notes: Vec::new() }),
            Err(refusal) => refusal,
        };
        if mode == DirectMode::Always {
            let problem = format!("{refusal}; move it to a local drive or allow buffered reads");
            return Err(failed("open for direct reads")(io::Error::new(io::ErrorKind::Unsupported, problem)));
        }
        let note = format!("{}: reads go through the page cache: {refusal}", path.display());
        Ok(Self::buffered(buffered, vec![note]))
    }

    /// A file that is read through the page cache.
    fn buffered(file: File, notes: Vec<String>) -> Self {
        Self { file, direct: false, align: Alignment { memory_bytes: 1, offset_bytes: 1 }, notes }
    }

    /// Drops a range that was read from the page cache, so that a model larger than memory does not push out
    /// everything else. A direct file left nothing there.
    pub(super) fn forget(&self, offset: u64, bytes: usize) {
        if let (false, Some(bytes)) = (self.direct, NonZeroU64::new(bytes as u64)) {
            // It is advice: a system that does not take it only keeps the pages longer.
            let _ = rustix::fs::fadvise(&self.file, offset, Some(bytes), rustix::fs::Advice::DontNeed);
        }
    }
}

/// Opens the file once more, past the page cache, and finds an alignment that works. Else says why none does.
fn open_direct(path: &Path, buffered: &File) -> std::result::Result<(File, Alignment), String> {
    if in_memory(buffered) {
        return Err("it lies on a file system in memory, which counts against what the model may use".into());
    }
    let file = File::options()
        .read(true)
        .custom_flags(OFlags::DIRECT.bits().cast_signed())
        .open(path)
        .map_err(|source| format!("its file system does not take O_DIRECT ({source})"))?;
    let asked = asked_alignment(&file);
    let careful = Alignment { memory_bytes: BLOCK_BYTES_MAX, offset_bytes: BLOCK_BYTES_MAX };
    let mut refusal = io::Error::from(io::ErrorKind::Unsupported);
    for align in asked.into_iter().chain([careful]) {
        match trial_read(&file, align) {
            Ok(()) => return Ok((file, align)),
            Err(source) => refusal = source,
        }
    }
    Err(format!("a trial of a direct read failed ({refusal})"))
}

/// Whether the file lies in memory anyway.
fn in_memory(file: &File) -> bool {
    rustix::fs::fstatfs(file)
        .is_ok_and(|system| matches!(system.f_type as u64 & 0xffff_ffff, TMPFS_MAGIC | RAMFS_MAGIC))
}

/// What the system says that direct reads must be aligned to: the file's own answer, else its block device's.
fn asked_alignment(file: &File) -> Option<Alignment> {
    file_alignment(file).or_else(|| {
        let block_bytes = logical_block_bytes(file.metadata().ok()?.dev())?;
        Some(Alignment { memory_bytes: block_bytes, offset_bytes: block_bytes })
    })
}

/// The answer of `statx`, which kernels before 6.1 and some file systems do not give.
fn file_alignment(file: &File) -> Option<Alignment> {
    let answer = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    if answer.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return None;
    }
    let memory_bytes = usable(answer.stx_dio_mem_align as usize)?;
    let offset_bytes = usable(answer.stx_dio_offset_align as usize)?;
    Some(Alignment { memory_bytes, offset_bytes })
}

/// The logical block of the device that holds the file.
fn logical_block_bytes(device: u64) -> Option<usize> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let entry = format!("/sys/dev/block/{major}:{minor}");
    // A partition's queue is its disk's, one folder up.
    ["queue", "../queue"].iter().find_map(|queue| {
        let text = std::fs::read_to_string(format!("{entry}/{queue}/logical_block_size")).ok()?;
        usable(text.trim().parse().ok()?)
    })
}

/// An alignment that can be one.
fn usable(bytes: usize) -> Option<usize> {
    (bytes.is_power_of_two() && bytes <= BLOCK_BYTES_MAX).then_some(bytes)
}

/// Reads one aligned block, at the least aligned place that `align` allows.
fn trial_read(file: &File, align: Alignment) -> io::Result<()> {
    let Alignment { memory_bytes, offset_bytes } = align;
    let mut memory = vec![0_u8; 2 * BLOCK_BYTES_MAX + offset_bytes];
    let page = memory.as_ptr().align_offset(BLOCK_BYTES_MAX);
    let block = &mut memory[page + memory_bytes % BLOCK_BYTES_MAX..][..offset_bytes];
    let offset = if file.metadata()?.len() < 2 * offset_bytes as u64 { 0 } else { offset_bytes as u64 };
    file.read_at(block, offset)?;
    Ok(())
}
