//! The thread that reads while the engine computes.
//!
//! Rows in flight are lent away: the plan and the slots being filled go to the prefetcher, which gives each layer's
//! slots back, in layer order, when its last record is in place. Code cannot compute on rows in flight because it does
//! not have them.

use crate::read_plan::ReadPlan;
use crate::transfer::{ReadFault, Transfer};
use np_kernels::Rows;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

/// A plan, and the slots that its records go to.
#[derive(Default)]
pub struct Job {
    /// What to read.
    pub plan: ReadPlan,
    /// Slots of each of the plan's layers, in its order.
    pub rows: Vec<Option<Rows>>,
}

/// What comes back.
pub enum Filled {
    /// A layer's slots: all its records are in place, or the read failed and the slots' content is undefined.
    Layer {
        /// The slots.
        rows: Rows,
        /// Whether the records are in place.
        outcome: Result<(), ReadFault>,
    },
    /// The emptied job, after all its layers, to be used again.
    Job(Job),
}

/// Handle of the prefetch thread. Jobs are done one after the other, in the order in which they were sent.
pub struct Prefetcher {
    jobs: Option<SyncSender<Job>>,
    filled: Receiver<Filled>,
    thread: Option<JoinHandle<()>>,
}

impl Prefetcher {
    /// Starts the thread. `results_max` bounds how many results wait to be received.
    pub fn start(mut transfer: Transfer, results_max: usize) -> std::io::Result<Self> {
        let (jobs, job_queue) = sync_channel::<Job>(2);
        let (results, filled) = sync_channel(results_max);
        let thread = thread::Builder::new().name("np-prefetch".into()).spawn(move || {
            while let Ok(mut job) = job_queue.recv() {
                // A closed channel means that the engine is gone; reads in flight are still waited for.
                transfer.run(&job.plan, &mut job.rows, |rows, outcome| {
                    let _ = results.send(Filled::Layer { rows, outcome });
                });
                job.rows.clear();
                let _ = results.send(Filled::Job(job));
            }
        })?;
        Ok(Self { jobs: Some(jobs), filled, thread: Some(thread) })
    }

    /// Starts a job.
    pub fn send(&self, job: Job) {
        assert_eq!(job.plan.layers().len(), job.rows.len());
        self.jobs.as_ref().expect("open until dropped").send(job).expect("the prefetch thread lives until dropped");
    }

    /// Waits for the next result.
    pub fn receive(&self) -> Filled {
        self.filled.recv().expect("the prefetch thread lives until dropped")
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.jobs = None;
        // The thread may wait for room in the channel.
        while self.filled.recv().is_ok() {}
        if let Some(thread) = self.thread.take() {
            // A panic there has already been printed.
            let _ = thread.join();
        }
    }
}
