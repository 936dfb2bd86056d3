//! Reads through an io_uring: one system call starts many and waits for some.

use super::{Completion, DirectFile, Part, QUEUE_DEPTH, Read, ReaderKind, RecordReader};
use super::{assert_room, assert_submittable};
use io_uring::{IoUring, opcode, squeue, types};
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// Times that a read is started anew after a transient error before the error is returned.
const RESTARTS_MAX: u32 = 16;
/// Wait before asking a kernel again that had no memory for a request.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
/// Times to ask it again with nothing in flight that could free some.
const BUSY_PAUSES_MAX: u32 = 1000;

/// A [`RecordReader`] on an io_uring.
pub struct UringReader {
    ring: IoUring,
    file: DirectFile,
    registered_file: bool,
    /// What the kernel works on, by the index that travels as an entry's user data.
    in_flight: Vec<Option<InFlight>>,
    free: Vec<usize>,
}

/// A read that the kernel may be performing.
#[derive(Clone, Copy)]
struct InFlight {
    read: Read,
    restarts: u32,
}

impl UringReader {
    /// Sets up a ring of [`QUEUE_DEPTH`] entries for `file`.
    ///
    /// # Errors
    /// When the kernel has no ring for us.
    pub fn new(file: DirectFile) -> io::Result<Self> {
        let ring = ring()?;
        let registered_file = ring.submitter().register_files(&[file.file.as_raw_fd()]).is_ok();
        let in_flight = vec![None; QUEUE_DEPTH];
        Ok(Self { ring, file, registered_file, in_flight, free: (0..QUEUE_DEPTH).rev().collect() })
    }

    /// The kernel's form of a read.
    fn entry(&self, index: usize, read: &Read) -> squeue::Entry {
        let (parts, count) = (read.parts.cast::<Part>().cast::<libc::iovec>(), read.parts.len() as u32);
        let entry = if self.registered_file {
            opcode::Readv::new(types::Fixed(0), parts, count).offset(read.offset).build()
        } else {
            opcode::Readv::new(types::Fd(self.file.file.as_raw_fd()), parts, count).offset(read.offset).build()
        };
        entry.user_data(index as u64)
    }

    /// Queues the read that stands at `index`.
    fn push(&mut self, index: usize) {
        let in_flight = self.in_flight[index].as_ref().expect("a read is entered before it is pushed");
        let entry = self.entry(index, &in_flight.read);
        // SAFETY: by the contract of `submit` the parts and their memory stay valid until the completion was returned
        // or the reader dropped, and `Drop` waits for every completion.
        unsafe { self.ring.submission().push(&entry) }.expect("the queue is as long as reads may be in flight");
    }

    /// Starts what is queued and waits until at least one completion stands in the ring.
    fn enter(&mut self) -> io::Result<()> {
        let mut pauses = 0;
        while self.ring.completion().is_empty() {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // The kernel lacks memory for a request at the moment.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM)) => {
                    pauses += 1;
                    if pauses == BUSY_PAUSES_MAX {
                        return Err(error);
                    }
                    std::thread::sleep(BUSY_PAUSE);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Takes the read at `index` out, or starts it anew when `result` says that it may succeed then.
    fn settle(&mut self, index: usize, result: i32) -> Option<Completion> {
        let mut in_flight = self.in_flight[index].take().expect("a completion belongs to a read in flight");
        if transient(result) && in_flight.restarts < RESTARTS_MAX {
            in_flight.restarts += 1;
            self.in_flight[index] = Some(in_flight);
            self.push(index);
            return None;
        }
        self.free.push(index);
        let outcome = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        if let Ok(bytes) = outcome {
            self.file.forget(in_flight.read.offset, bytes);
        }
        Some(Completion { id: in_flight.read.id, outcome })
    }
}

impl RecordReader for UringReader {
    fn kind(&self) -> ReaderKind {
        ReaderKind::Uring { registered_file: self.registered_file, direct: self.file.direct }
    }

    fn depth(&self) -> usize {
        QUEUE_DEPTH
    }

    fn in_flight(&self) -> usize {
        QUEUE_DEPTH - self.free.len()
    }

    unsafe fn submit(&mut self, read: &Read) -> io::Result<()> {
        assert_submittable(read, self.in_flight(), QUEUE_DEPTH);
        let index = self.free.pop().expect("fewer reads in flight than the depth");
        self.in_flight[index] = Some(InFlight { read: *read, restarts: 0 });
        self.push(index);
        Ok(())
    }

    fn wait(&mut self, completions: &mut Vec<Completion>) -> io::Result<()> {
        if self.in_flight() == 0 {
            return Ok(());
        }
        assert_room(completions);
        let before = completions.len();
        while completions.len() == before {
            self.enter()?;
            while completions.len() < completions.capacity() {
                let Some(entry) = self.ring.completion().next() else { break };
                let index = usize::try_from(entry.user_data()).expect("user data is an index of ours");
                completions.extend(self.settle(index, entry.result()));
            }
        }
        Ok(())
    }
}

impl Drop for UringReader {
    fn drop(&mut self) {
        while self.in_flight() > 0 {
            if let Err(error) = self.enter() {
                // The kernel may still write to memory that is freed next: nothing can be trusted after that.
                eprintln!("io_uring: {error} while {} reads are in flight", self.in_flight());
                std::process::abort();
            }
            while let Some(entry) = self.ring.completion().next() {
                let index = usize::try_from(entry.user_data()).expect("user data is an index of ours");
                self.in_flight[index] = None;
                self.free.push(index);
            }
        }
    }
}

/// Whether a read that ended so may succeed when it is started anew. Nothing here cancels: the kernel does so when the
/// thread that started a read ends.
fn transient(result: i32) -> bool {
    matches!(-result, libc::EAGAIN | libc::EINTR | libc::ECANCELED)
}

/// A ring with the best flags that the kernel knows.
///
/// `SINGLE_ISSUER` and `DEFER_TASKRUN` are not among them: they tie a ring to one thread, while a reader is made and
/// probed by one thread and used by another.
fn ring() -> io::Result<IoUring> {
    let entries = QUEUE_DEPTH as u32;
    let attempts: [fn(&mut io_uring::Builder); 3] = [
        // Linux 5.19: completions do not interrupt a thread that computes.
        |builder| _ = builder.setup_coop_taskrun().setup_submit_all(),
        // Linux 5.18: a refused request does not hold up those behind it.
        |builder| _ = builder.setup_submit_all(),
        |_| {},
    ];
    let mut refusal = io::Error::from_raw_os_error(libc::EINVAL);
    for attempt in attempts {
        let mut builder = IoUring::builder();
        attempt(&mut builder);
        match builder.build(entries) {
            Ok(ring) => return Ok(ring),
            Err(error) => refusal = error,
        }
        // Only an unknown flag is worth another try.
        if refusal.raw_os_error() != Some(libc::EINVAL) {
            break;
        }
    }
    Err(refusal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_transient_errors_are_started_anew() {
        assert!(transient(-libc::EAGAIN) && transient(-libc::EINTR) && transient(-libc::ECANCELED));
        assert!(!transient(-libc::EIO) && !transient(-libc::EBADF) && !transient(0) && !transient(512));
    }
}
