//! A fixed fork-join pool: no allocation and no lock on the way of a running task.

use crate::{Error, Result};
use std::any::Any;
use std::cell::UnsafeCell;
use std::hint;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};

/// Turns that a thread waits awake before it sleeps: about 10 µs, the usual gap between two operations of a token.
const SPINS: usize = 256;
/// Set in `gate` while workers may join the run; the rest of `gate` counts the workers inside.
const OPEN: usize = 1 << (usize::BITS - 1);

/// A pool of threads that run numbered tasks together with the caller.
///
/// A worker that wakes late finds the run closed and is not waited for, so a busy machine delays nobody.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

type Work<'a> = dyn Fn(usize, usize) + Sync + 'a;

struct Shared {
    /// What to run; read only by workers that have passed the gate.
    job: UnsafeCell<Job>,
    gate: AtomicUsize,
    /// Counts runs, so that a worker joins each at most once on its own account.
    generation: AtomicU64,
    next: AtomicUsize,
    shut: AtomicBool,
    sleepers: AtomicUsize,
    caller_sleeps: AtomicBool,
    lock: Mutex<()>,
    wake_workers: Condvar,
    wake_caller: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Clone, Copy)]
struct Job {
    work: Option<*const Work<'static>>,
    tasks: usize,
}

// SAFETY: `job` is written only while the gate is closed and empty, and read only by those inside it.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is to a `Sync` closure that outlives the run.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `threads` threads, the caller's included.
    pub(crate) fn new(threads: usize) -> Result<Self> {
        assert!(threads >= 1, "a pool needs a thread");
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(Job { work: None, tasks: 0 }),
            gate: AtomicUsize::new(0),
            generation: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            shut: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            lock: Mutex::new(()),
            wake_workers: Condvar::new(),
            wake_caller: Condvar::new(),
            panic: Mutex::new(None),
        });
        let mut pool = Self { shared, workers: Vec::with_capacity(threads - 1) };
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let handle = thread::Builder::new()
                .name(format!("compute-{worker}"))
                .spawn(move || shared.work_until_shut(worker))
                .map_err(|source| Error::Thread { worker, source })?;
            pool.workers.push(handle);
        }
        Ok(pool)
    }

    /// Threads, the caller's included: `worker` is below this.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work(task, worker)` once for each task below `tasks`, in any order, and returns when all are done. A task
    /// that panics makes this panic, after the others have ended. Tasks can't use the pool: it is borrowed.
    pub(crate) fn run(&mut self, tasks: usize, work: &Work<'_>) {
        if tasks <= 1 || self.workers.is_empty() {
            (0..tasks).for_each(|task| work(task, 0));
            return;
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes; this function does not return before the last worker has left the gate.
        let work = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work) };
        // SAFETY: the gate is closed and nobody is inside: the previous run waited for that.
        unsafe { *shared.job.get() = Job { work: Some(work), tasks } };
        shared.next.store(0, Ordering::Relaxed);
        shared.gate.store(OPEN, Ordering::Release);
        shared.generation.fetch_add(1, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            drop(shared.locked());
            shared.wake_workers.notify_all();
        }
        // SAFETY: the gate is open, so `job` stays as it is.
        unsafe { shared.run_tasks(0) };
        shared.gate.fetch_and(!OPEN, Ordering::AcqRel);
        shared.wait_for_workers();
        let panicked = shared.panic.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        if let Some(payload) = panicked {
            panic::resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.shut.store(true, Ordering::SeqCst);
        self.shared.generation.fetch_add(1, Ordering::SeqCst);
        drop(self.shared.locked());
        self.shared.wake_workers.notify_all();
        for worker in self.workers.drain(..) {
            worker.join().expect("workers catch the panics of tasks");
        }
    }
}

impl Shared {
    fn locked(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn work_until_shut(&self, worker: usize) {
        let mut seen = 0;
        loop {
            seen = self.wait_for_run(seen);
            if self.shut.load(Ordering::SeqCst) {
                return;
            }
            if self.enter() {
                // SAFETY: `enter` passed the gate, and the caller waits until it is empty.
                unsafe { self.run_tasks(worker) };
                self.leave();
            }
        }
    }

    /// Waits for a generation after `seen` and returns it.
    fn wait_for_run(&self, seen: u64) -> u64 {
        for _ in 0..SPINS {
            let generation = self.generation.load(Ordering::SeqCst);
            if generation != seen {
                return generation;
            }
            hint::spin_loop();
        }
        let mut guard = self.locked();
        // Announced before the last look: the caller either sees a sleeper or has already counted its run.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let generation = loop {
            let generation = self.generation.load(Ordering::SeqCst);
            if generation != seen {
                break generation;
            }
            guard = self.wake_workers.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner());
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        generation
    }

    fn enter(&self) -> bool {
        let join = |gate: usize| (gate & OPEN != 0).then_some(gate + 1);
        self.gate.fetch_update(Ordering::AcqRel, Ordering::Acquire, join).is_ok()
    }

    fn leave(&self) {
        let before = self.gate.fetch_sub(1, Ordering::SeqCst);
        if before == 1 && self.caller_sleeps.load(Ordering::SeqCst) {
            drop(self.locked());
            self.wake_caller.notify_one();
        }
    }

    fn wait_for_workers(&self) {
        for _ in 0..SPINS {
            if self.gate.load(Ordering::Acquire) == 0 {
                return;
            }
            hint::spin_loop();
        }
        let mut guard = self.locked();
        self.caller_sleeps.store(true, Ordering::SeqCst);
        while self.gate.load(Ordering::SeqCst) != 0 {
            guard = self.wake_caller.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        self.caller_sleeps.store(false, Ordering::SeqCst);
    }

    /// Takes tasks until none is left. The first panic is kept and ends the run early.
    ///
    /// # Safety
    /// The calling thread is inside the gate, or is the one that opened it.
    unsafe fn run_tasks(&self, worker: usize) {
        // SAFETY: nobody writes the job while someone is inside the gate.
        let Job { work, tasks } = unsafe { *self.job.get() };
        // SAFETY: the closure outlives the run, which ends after this thread has left.
        let work = unsafe { &*work.expect("an open gate has a job") };
        let result = panic::catch_unwind(AssertUnwindSafe(|| {
            loop {
                let task = self.next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    return;
                }
                work(task, worker);
            }
        }));
        if let Err(payload) = result {
            self.next.store(tasks, Ordering::Relaxed);
            self.panic.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(payload);
        }
    }
}

/// A slice that tasks write in parts of their own.
pub(crate) struct Parts<'a> {
    start: *mut f32,
    count: usize,
    slice: PhantomData<&'a mut [f32]>,
}

// SAFETY: the parts handed out are disjoint by the contract of `part`, so this is a set of `&mut [f32]`.
unsafe impl Sync for Parts<'_> {}

impl<'a> Parts<'a> {
    pub(crate) fn new(slice: &'a mut [f32]) -> Self {
        Self { start: slice.as_mut_ptr(), count: slice.len(), slice: PhantomData }
    }

    /// The values of `range`.
    ///
    /// # Safety
    /// No two parts that overlap are alive at the same time.
    #[expect(clippy::mut_from_ref, reason = "disjoint parts are this type's purpose")]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [f32] {
        assert!(range.start <= range.end && range.end <= self.count, "{range:?} of {}", self.count);
        // SAFETY: the range is inside the slice, and the caller keeps the parts apart.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// First value at `index`, for strided writes that stay apart like parts do.
    pub(crate) fn at(&self, index: usize) -> *mut f32 {
        assert!(index <= self.count, "{index} of {}", self.count);
        self.start.wrapping_add(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(threads: usize, tasks: usize, runs: usize) {
        let mut pool = Pool::new(threads).unwrap();
        let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..runs {
            pool.run(tasks, &|task, worker| {
                assert!(worker < threads);
                counts[task].fetch_add(1, Ordering::Relaxed);
            });
        }
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == runs));
    }

    #[test]
    fn every_task_runs_once_in_every_run() {
        for threads in [1, 2, 5] {
            check(threads, 0, 3);
            check(threads, 1, 3);
            check(threads, 3, 20_000);
            check(threads, 64, 2_000);
        }
    }

    #[test]
    fn workers_that_sleep_are_woken() {
        let mut pool = Pool::new(2).unwrap();
        for _ in 0..20 {
            thread::sleep(std::time::Duration::from_millis(2));
            let both = std::sync::Barrier::new(2);
            pool.run(2, &|_, _| {
                both.wait();
            });
        }
    }

    #[test]
    fn a_panic_comes_out_and_the_pool_lives_on() {
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(threads).unwrap();
            for bad in 0..8 {
                let run = AssertUnwindSafe(|| pool.run(8, &|task, _| assert_ne!(task, bad, "the bad task")));
                let payload = panic::catch_unwind(run).unwrap_err();
                assert!(payload.downcast_ref::<String>().unwrap().contains("the bad task"));
            }
            let sum = AtomicUsize::new(0);
            pool.run(8, &|task, _| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 28);
        }
    }
}
