//! Reads by a pool of threads, each in a blocking `preadv`: works wherever files do.

use super::{Completion, DirectFile, Part, QUEUE_DEPTH, Read, ReaderKind, RecordReader};
use super::{assert_room, assert_submittable};
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Threads of the pool: what a drive needs to see at once to be busy.
pub const PREAD_THREADS: usize = 16;

/// A [`RecordReader`] on a pool of threads.
pub struct PreadReader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    in_flight: usize,
}

/// What the pool's threads and the reader share.
struct Shared {
    file: DirectFile,
    queues: Mutex<Queues>,
    /// There is a read to take, or the pool closes.
    queued: Condvar,
    /// There is a completion to take.
    completed: Condvar,
}

/// Room for [`QUEUE_DEPTH`] each from the start, so that neither ever grows.
struct Queues {
    queued: VecDeque<Read>,
    completed: VecDeque<Completion>,
    closing: bool,
}

impl PreadReader {
    /// Starts `thread_count` threads that read `file`.
    ///
    /// # Errors
    /// When the system does not give a single thread; fewer than asked are made do with.
    pub fn new(file: DirectFile, thread_count: usize) -> io::Result<Self> {
        assert!(thread_count > 0, "a pool needs a thread");
        let queue = Queues {
            queued: VecDeque::with_capacity(QUEUE_DEPTH),
            completed: VecDeque::with_capacity(QUEUE_DEPTH),
            closing: false,
        };
        let shared = Shared { file, queues: Mutex::new(queue), queued: Condvar::new(), completed: Condvar::new() };
        let mut reader = Self { shared: Arc::new(shared), threads: Vec::new(), in_flight: 0 };
        for index in 0..thread_count {
            let shared = Arc::clone(&reader.shared);
            match std::thread::Builder::new().name(format!("np-pread-{index}")).spawn(move || shared.work()) {
                Ok(thread) => reader.threads.push(thread),
                Err(error) if reader.threads.is_empty() => return Err(error),
                Err(_) => break,
            }
        }
        Ok(reader)
    }
}

impl RecordReader for PreadReader {
    fn kind(&self) -> ReaderKind {
        ReaderKind::Pread { threads: self.threads.len(), direct: self.shared.file.direct }
    }

    fn depth(&self) -> usize {
        QUEUE_DEPTH
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    unsafe fn submit(&mut self, read: &Read) -> io::Result<()> {
        assert_submittable(read, self.in_flight, QUEUE_DEPTH);
        self.shared.lock().queued.push_back(*read);
        self.in_flight += 1;
        self.shared.queued.notify_one();
        Ok(())
    }

    fn wait(&mut self, completions: &mut Vec<Completion>) -> io::Result<()> {
        if self.in_flight == 0 {
            return Ok(());
        }
        assert_room(completions);
        let mut queues = self.shared.lock();
        while queues.completed.is_empty() {
            queues = self.shared.completed.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
        let count = queues.completed.len().min(completions.capacity() - completions.len());
        completions.extend(queues.completed.drain(..count));
        self.in_flight -= count;
        Ok(())
    }
}

impl Drop for PreadReader {
    /// Forgets the reads that no thread took yet and waits for the others.
    fn drop(&mut self) {
        {
            let mut queues = self.shared.lock();
            queues.queued.clear();
            queues.closing = true;
        }
        self.shared.queued.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked reads no more, which is all that matters here.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// One thread of the pool.
    fn work(&self) {
        while let Some(read) = self.next() {
            let outcome = self.perform(&read);
            if let Ok(bytes) = outcome {
                self.file.forget(read.offset, bytes);
            }
            self.lock().completed.push_back(Completion { id: read.id, outcome });
            self.completed.notify_one();
        }
    }

    /// The next read, or nothing when the pool closes.
    fn next(&self) -> Option<Read> {
        let mut queues = self.lock();
        loop {
            if queues.closing {
                return None;
            }
            if let Some(read) = queues.queued.pop_front() {
                return Some(read);
            }
            queues = self.queued.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Performs a read on this thread.
    fn perform(&self, read: &Read) -> io::Result<usize> {
        let (descriptor, parts) = (self.file.file.as_raw_fd(), read.parts.cast::<Part>().cast::<libc::iovec>());
        let (count, offset) = (read.parts.len() as libc::c_int, read.offset.cast_signed());
        loop {
            // SAFETY: by the contract of `submit` the parts and their memory stay valid and untouched until the
            // completion was returned or the reader dropped, and `Drop` joins this thread.
            let result = unsafe { libc::preadv(descriptor, parts, count, offset) };
            if let Ok(bytes) = usize::try_from(result) {
                return Ok(bytes);
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queues> {
        // The queues are whole between any two statements, so a panic elsewhere does not spoil them.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
