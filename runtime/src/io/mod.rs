//! Vectored reads of one file, many in flight: how bytes leave the drive.
//!
//! [`open_reader`] opens a file, finds out what its drive and the kernel allow by reading from it, and gives the best
//! [`RecordReader`] that works, with the reasons for what does not. [`UringReader`] and [`PreadReader`] do the same
//! thing and pass one suite of tests.
//!
//! Nothing here knows a record: what to read, in which order, what to do about a short read or an error is the
//! caller's. After it is made a reader allocates nothing.

mod direct;
mod pread;
mod probe;
mod uring;

pub use direct::{Alignment, DirectFile, DirectMode};
pub use pread::{PREAD_THREADS, PreadReader};
pub use probe::{Opened, ReaderChoice, open_reader};
pub use uring::UringReader;

use std::fmt;
use std::io;

/// Reads in flight. More adds latency and staging, not bandwidth.
pub const QUEUE_DEPTH: usize = 256;
/// Parts of one read: the kernel's `IOV_MAX`.
pub const PARTS_MAX: usize = 1024;

const _: () = assert!(QUEUE_DEPTH.is_power_of_two());
const _: () = assert!(PARTS_MAX <= libc::UIO_MAXIOV as usize);

/// Where some of a read's bytes go. Laid out as the kernel's `iovec`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Part(libc::iovec);

impl Part {
    /// `bytes` bytes of memory from `address` on.
    pub fn new(address: *mut u8, bytes: usize) -> Self {
        Self(libc::iovec { iov_base: address.cast(), iov_len: bytes })
    }

    /// The first byte.
    pub fn address(self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Bytes from [`Self::address`] on.
    pub fn bytes(self) -> usize {
        self.0.iov_len
    }
}

// SAFETY: a part is an address and a length; whoever writes through it answers for the memory, as
// [`RecordReader::submit`] says.
unsafe impl Send for Part {}
// SAFETY: as above; a shared part can only be looked at.
unsafe impl Sync for Part {}

/// One vectored read: the bytes from `offset` on go to `parts` in order.
#[derive(Clone, Copy)]
pub struct Read {
    /// Comes back in the read's [`Completion`].
    pub id: u64,
    /// First byte in the file.
    pub offset: u64,
    /// Where the bytes go, 1 to [`PARTS_MAX`] parts.
    pub parts: *const [Part],
}

// SAFETY: as for `Part`: `parts` is dereferenced only under the contract of [`RecordReader::submit`], by which the
// array outlives the read whatever thread performs it.
unsafe impl Send for Read {}

/// What became of a read.
#[derive(Debug)]
pub struct Completion {
    /// The [`Read::id`].
    pub id: u64,
    /// Bytes that arrived, from the first part on. Fewer than asked: a short read. 0: the file ends before the offset.
    /// An error carries the system's errno. What the parts hold beyond the bytes that arrived is undefined: a direct
    /// read overwrites whole blocks.
    pub outcome: io::Result<usize>,
}

/// Which reader it is, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReaderKind {
    /// An io_uring.
    Uring {
        /// Whether the kernel keeps the file open for the ring, which saves a look-up per read.
        registered_file: bool,
        /// Whether reads bypass the page cache.
        direct: bool,
    },
    /// A pool of threads, each in a blocking `preadv`.
    Pread {
        /// Threads in the pool.
        threads: usize,
        /// Whether reads bypass the page cache.
        direct: bool,
    },
}

impl fmt::Display for ReaderKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = |direct| if direct { "direct" } else { "buffered" };
        match *self {
            Self::Uring { registered_file, direct } => {
                let file = if registered_file { ", registered file" } else { "" };
                write!(formatter, "io_uring ({}{file})", path(direct))
            }
            Self::Pread { threads, direct } => write!(formatter, "pread ({}, {threads} threads)", path(direct)),
        }
    }
}

/// Reads with many in flight. Completions come in any order.
///
/// Dropping a reader waits until no read is in flight, so memory may be freed after that.
pub trait RecordReader: Send {
    /// Which reader it is.
    fn kind(&self) -> ReaderKind;

    /// Most reads in flight.
    fn depth(&self) -> usize;

    /// Reads submitted whose completion was not yet returned.
    fn in_flight(&self) -> usize;

    /// Queues a read. It starts now or in [`Self::wait`].
    ///
    /// # Safety
    /// The parts' memory and the array of parts stay valid and untouched by anybody else until the read's completion
    /// was returned or the reader was dropped. When the file is direct, offset, addresses and lengths are multiples of
    /// its [`Alignment`], or the completion carries `EINVAL`.
    ///
    /// # Errors
    /// When the system does not take the read; its memory is then free again.
    ///
    /// # Panics
    /// When [`Self::depth`] reads are in flight already, or the read has no part or more than [`PARTS_MAX`].
    unsafe fn submit(&mut self, read: &Read) -> io::Result<()>;

    /// Starts what is queued, waits for at least one completion and appends all that are ready, as far as the vector's
    /// capacity goes: it never grows. Returns at once when nothing is in flight.
    ///
    /// # Errors
    /// When the reader itself is broken; reads may still be in flight then. A failed read is not an error here but in
    /// its [`Completion`].
    ///
    /// # Panics
    /// When the vector is full.
    fn wait(&mut self, completions: &mut Vec<Completion>) -> io::Result<()>;
}

/// Asserts what [`RecordReader::submit`] promises to assert.
fn assert_submittable(read: &Read, in_flight: usize, depth: usize) {
    assert!(in_flight < depth, "{in_flight} reads in flight, depth {depth}");
    let part_count = read.parts.len();
    assert!((1..=PARTS_MAX).contains(&part_count), "{part_count} parts, at most {PARTS_MAX}");
    assert!(i64::try_from(read.offset).is_ok(), "offset {} is beyond any file", read.offset);
}

/// Asserts what [`RecordReader::wait`] promises to assert.
fn assert_room(completions: &Vec<Completion>) {
    assert!(completions.len() < completions.capacity(), "no room for a completion among {}", completions.capacity());
}

#[cfg(test)]
mod tests;
