//! After start-up a token allocates nothing. A binary of its own, since an allocator is a program's.

#[path = "e2e/programs.rs"]
#[expect(dead_code, reason = "shared with the other tests, which use the rest")]
mod programs;
#[path = "e2e/tiny.rs"]
mod tiny;
#[path = "e2e/trained.rs"]
#[expect(dead_code, reason = "shared with the other tests, which use the rest")]
mod trained;

use np_runtime::Mode;
use np_runtime::io::ReaderChoice;
use np_runtime::sampler::{Sampler, SamplerOptions};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use trained::{PROMPT, Trained, open, options};

/// Counts what every thread of the program asks for.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is handed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller promises what the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above; `memory` came from the system's allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_token_allocates_nothing() {
    let trained = Trained::new();
    for reader in [ReaderChoice::Auto, ReaderChoice::Pread] {
        let roomy = options(|options| options.reader = reader);
        let footprint = open(&trained.artifact(), &roomy).settings().footprint.total();
        let shared = options(|options| {
            options.reader = reader;
            options.memory_bytes = Some(footprint - 1);
        });
        for (options, mode) in [(roomy, Mode::Delta), (shared, Mode::Streamed)] {
            let mut engine = open(&trained.artifact(), &options);
            assert_eq!(engine.settings().mode, mode);
            let sampling = SamplerOptions { temperature: 1.0, top_k: 20, ..SamplerOptions::default() };
            let mut sampler = Sampler::new(sampling, engine.geometry().vocab);
            let prompt: Vec<u32> = PROMPT.iter().map(|&byte| u32::from(byte)).collect();
            let mut logits = engine.prefill(&prompt).unwrap().to_vec();
            let mut read_rows = 0;
            let mut before = 0;
            for token in 0..48 {
                // The first tokens grow what is kept: scratch, channels' waiting lists.
                if token == 8 {
                    before = ALLOCATIONS.load(Ordering::Relaxed);
                    read_rows = 0;
                }
                let next = sampler.sample(&mut logits, &[]);
                logits.copy_from_slice(engine.decode(next).unwrap());
                read_rows += engine.token_stats().incoming_rows;
            }
            let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
            assert!(read_rows > 0, "the test has seen reads");
            assert_eq!(allocations, 0, "{mode} mode, {}", engine.reader());
        }
    }
}
