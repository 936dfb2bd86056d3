//! Reads that go wrong under a running engine.

use crate::trained::{PROMPT, Trained, continue_greedily, options};
use np_formats::{NEURONS_NAME, NeuronFile};
use np_runtime::io::{
    Alignment, Completion, DirectMode, Opened, Read, ReaderChoice, ReaderKind, RecordReader, open_reader,
};
use np_runtime::{Engine, Error};
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

/// No read is to go wrong.
const NEVER: i64 = i64::MAX;

/// What the drive says of the read that goes wrong.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Errno(i32),
    Bytes(usize),
    WrongBytes,
}

/// Counts down the reads until one goes wrong.
struct Script {
    reads_left: AtomicI64,
    fault: Mutex<Fault>,
}

/// A reader that does what its script says, and otherwise what the reader below does.
struct Scripted {
    below: Box<dyn RecordReader>,
    script: Arc<Script>,
    reads: HashMap<u64, Read>,
}

impl RecordReader for Scripted {
    fn kind(&self) -> ReaderKind {
        self.below.kind()
    }

    fn depth(&self) -> usize {
        self.below.depth()
    }

    fn in_flight(&self) -> usize {
        self.below.in_flight()
    }

    unsafe fn submit(&mut self, read: &Read) -> io::Result<()> {
        self.reads.insert(read.id, *read);
        // SAFETY: the caller promises for this reader what it would promise for the one below.
        unsafe { self.below.submit(read) }
    }

    fn wait(&mut self, completions: &mut Vec<Completion>) -> io::Result<()> {
        let before = completions.len();
        self.below.wait(completions)?;
        for completion in &mut completions[before..] {
            let read = self.reads.remove(&completion.id).expect("a completion of a read");
            if self.script.reads_left.fetch_sub(1, Ordering::Relaxed) != 0 {
                continue;
            }
            match *self.script.fault.lock().unwrap() {
                Fault::Errno(errno) => completion.outcome = Err(io::Error::from_raw_os_error(errno)),
                Fault::Bytes(bytes) => completion.outcome = Ok(bytes),
                Fault::WrongBytes => {
                    // SAFETY: the read has completed and was not yet given back, so its parts are still lent to us.
                    let parts = unsafe { &*read.parts };
                    // SAFETY: as above, and each part is as long as it says.
                    unsafe { parts[0].address().write_bytes(0xa5, parts[0].bytes()) };
                }
            }
        }
        Ok(())
    }
}

fn scripted_engine(trained: &Trained) -> (Engine, Arc<Script>) {
    let path = trained.artifact().join(NEURONS_NAME);
    let script = Arc::new(Script { reads_left: NEVER.into(), fault: Mutex::new(Fault::WrongBytes) });
    let below = Arc::clone(&script);
    let reader = |trial_bytes| {
        let opened = open_reader(&path, ReaderChoice::Pread, DirectMode::Auto, trial_bytes)?;
        let reader = Scripted { below: opened.reader, script: below, reads: HashMap::new() };
        Ok(Opened { reader: Box::new(reader), ..opened })
    };
    let engine = Engine::open_with(&trained.artifact(), &options(|_| {}), reader, &mut |_, _| {});
    (engine.unwrap(), script)
}

fn arm(script: &Script, fault: Fault, reads_left: i64) {
    *script.fault.lock().unwrap() = fault;
    script.reads_left.store(reads_left, Ordering::Relaxed);
}

#[test]
fn a_failed_read_fails_its_request_and_not_the_next() {
    let trained = Trained::new();
    let neurons = NeuronFile::open(&trained.artifact().join(NEURONS_NAME)).unwrap();
    let (mut engine, script) = scripted_engine(&trained);
    let expected = continue_greedily(&mut engine, 8);
    for (fault, words) in [
        (Fault::Errno(libc_eio()), "Input/output error"),
        (Fault::Bytes(0), "the file ends there"),
        (Fault::WrongBytes, "tag"),
    ] {
        // During the prompt's streaming, at the first read of a token, and among those in flight.
        for (prompt, reads_left) in [(true, 3), (false, 0), (false, 5)] {
            let error = failure(&mut engine, &script, fault, prompt, reads_left);
            let Error::Read { fault: place, .. } = &error else { panic!("{fault:?}: {error}") };
            let message = error.to_string();
            assert!(message.contains(words) && message.contains("neurons.bin"), "{fault:?}: {message}");
            assert!((1..12).contains(&place.layer), "{message}");
            assert_eq!(place.offset, neurons.header().offset(place.layer, place.neuron), "{message}");
            assert_eq!(engine.position(), 0, "the sequence is over");
            assert!(continue_greedily(&mut engine, 8) == expected, "after {fault:?}");
        }
    }
}

/// Runs until the armed read has failed.
fn failure(engine: &mut Engine, script: &Script, fault: Fault, in_prompt: bool, reads_left: i64) -> Error {
    let prompt: Vec<u32> = PROMPT.iter().map(|&byte| u32::from(byte)).collect();
    engine.restart();
    if in_prompt {
        arm(script, fault, reads_left);
        return engine.prefill(&prompt).map(|_| ()).expect_err("the armed read fails the prompt");
    }
    let mut logits = engine.prefill(&prompt).unwrap().to_vec();
    arm(script, fault, reads_left);
    for _ in 0..64 {
        match engine.decode(np_runtime::sampler::greedy(&logits)) {
            Ok(next) => logits = next.to_vec(),
            Err(error) => return error,
        }
    }
    panic!("no read in 64 tokens");
}

#[test]
fn a_short_read_is_continued() {
    let trained = Trained::new();
    let (mut engine, script) = scripted_engine(&trained);
    let expected = continue_greedily(&mut engine, 8);
    for reads_left in 0..6 {
        arm(&script, Fault::Bytes(512), reads_left);
        // A record is 512 bytes long here, so only reads of several records can be cut short to one.
        assert!(continue_greedily(&mut engine, 8) == expected, "read {reads_left}");
        assert!(script.reads_left.load(Ordering::Relaxed) < 0, "a read was cut short");
    }
}

#[test]
fn drives_of_large_blocks_are_read_through_staging() {
    let trained = Trained::new();
    let path = trained.artifact().join(NEURONS_NAME);
    let expected = continue_greedily(&mut crate::trained::open(&trained.artifact(), &options(|_| {})), 8);
    for staging_bytes in [1, 100_000, 1 << 20] {
        // Reads may begin and end anywhere here; the engine is told that they may not.
        let reader = |trial_bytes| {
            let opened = open_reader(&path, ReaderChoice::Auto, DirectMode::Never, trial_bytes)?;
            Ok(Opened { align: Alignment { memory_bytes: 4096, offset_bytes: 4096 }, ..opened })
        };
        let options = options(|options| options.staging_bytes = staging_bytes);
        let mut engine = Engine::open_with(&trained.artifact(), &options, reader, &mut |_, _| {}).unwrap();
        assert!(continue_greedily(&mut engine, 8) == expected, "staging of {staging_bytes} bytes");
    }
}

fn libc_eio() -> i32 {
    5
}
