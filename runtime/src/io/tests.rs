//! One suite for every reader.

use super::{
    Alignment, Completion, DirectFile, DirectMode, Part, PreadReader, QUEUE_DEPTH, Read, RecordReader, UringReader,
};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Not a multiple of any block, so that the last read of a direct file is short.
const FILE_BYTES: usize = (1 << 20) + 777;
/// Reads of the random test.
const READS: usize = 600;

type Make<'a> = &'a dyn Fn(DirectFile) -> Box<dyn RecordReader>;

#[test]
fn uring_passes() {
    if kernel_lacks_uring() {
        return eprintln!("skipped: this system has no io_uring");
    }
    suite(&|file| Box::new(UringReader::new(file).unwrap()));
}

#[test]
fn pread_passes() {
    suite(&|file| Box::new(PreadReader::new(file, 16).unwrap()));
    suite(&|file| Box::new(PreadReader::new(file, 1).unwrap()));
}

/// What every reader must do, direct and buffered.
fn suite(make: Make) {
    let (_folder, path, content) = fixture();
    for mode in [DirectMode::Auto, DirectMode::Never] {
        let open = || DirectFile::open(&path, mode).unwrap();
        reads_the_file(make(open()), open().align, &content);
        stops_at_the_end(make(open()), open().align, &content);
        waits_for_nothing(make(open()));
        refuses_too_many(make(open()), open().align);
        moves_between_threads(make(open()), open().align, &content);
        drains_when_dropped(make, &open);
    }
    reports_errors(make, &path);
}

/// Vectored reads at random places and full depth bring the file's bytes, each under its own id.
fn reads_the_file(mut reader: Box<dyn RecordReader>, align: Alignment, content: &[u8]) {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
    let block = align.offset_bytes.max(64);
    let mut ids: Vec<u64> = (0..READS as u64).map(|index| index << 40 | index).collect();
    ids.shuffle(&mut random);
    let mut waiting: Vec<(u64, Lent)> = ids
        .iter()
        .map(|&id| {
            let sizes: Vec<usize> = (0..random.gen_range(1..6)).map(|_| block * random.gen_range(1..9)).collect();
            (id, Lent::new(random.gen_range(0..content.len() / block) * block, &sizes, align))
        })
        .collect();
    let mut flying: Vec<(u64, Lent)> = Vec::new();
    let mut completions = Vec::with_capacity(reader.depth());
    while !waiting.is_empty() || !flying.is_empty() {
        while reader.in_flight() < reader.depth() {
            let Some((id, lent)) = waiting.pop() else { break };
            lent.submit(&mut *reader, id);
            flying.push((id, lent));
        }
        reader.wait(&mut completions).unwrap();
        assert!(!completions.is_empty());
        for Completion { id, outcome } in completions.drain(..) {
            let index = flying.iter().position(|(flying, _)| *flying == id).expect("an id completes once");
            let (_, lent) = flying.swap_remove(index);
            lent.check(outcome.unwrap(), content);
        }
        assert_eq!(reader.in_flight(), flying.len());
    }
}

/// A read across the end is short, one from beyond it brings 0 bytes.
fn stops_at_the_end(mut reader: Box<dyn RecordReader>, align: Alignment, content: &[u8]) {
    let block = align.offset_bytes.max(512);
    let tail = content.len() / block * block;
    let tail_bytes = content.len() - tail;
    assert!(tail_bytes > 0);
    for (offset, expected) in [(tail, tail_bytes), (tail - block, block + tail_bytes), (tail + 4 * block, 0)] {
        let lent = Lent::new(offset, &[block, block, block], align);
        assert_eq!(lent.read(&mut *reader), Ok(expected), "offset {offset}");
        lent.check(expected, content);
    }
}

fn waits_for_nothing(mut reader: Box<dyn RecordReader>) {
    let mut completions = Vec::new();
    reader.wait(&mut completions).unwrap();
    assert!(completions.is_empty());
}

/// One read more than the depth is a bug of the caller, and a vector takes no more than its capacity.
fn refuses_too_many(mut reader: Box<dyn RecordReader>, align: Alignment) {
    let block = align.offset_bytes.max(64);
    let lent = Lent::new(0, &[block], align);
    let others: Vec<Lent> = (0..reader.depth()).map(|_| Lent::new(0, &[block], align)).collect();
    for (id, other) in others.iter().enumerate() {
        other.submit(&mut *reader, id as u64);
    }
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| lent.submit(&mut *reader, 999)));
    assert!(panicked.is_err());
    let mut seen = 0;
    let mut completions = Vec::with_capacity(3);
    while reader.in_flight() > 0 {
        reader.wait(&mut completions).unwrap();
        assert!((1..=3).contains(&completions.len()) && completions.capacity() == 3);
        seen += completions.drain(..).len();
    }
    assert_eq!(seen, others.len());
}

/// A read outlives the thread that submitted it.
fn moves_between_threads(mut reader: Box<dyn RecordReader>, align: Alignment, content: &[u8]) {
    let block = align.offset_bytes.max(64);
    let lent: Vec<Lent> = (0..64).map(|index| Lent::new(index * block, &[block * 4], align)).collect();
    let mut completions = Vec::with_capacity(64);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (id, lent) in lent.iter().enumerate() {
                lent.submit(&mut *reader, id as u64);
            }
            reader.wait(&mut completions).unwrap();
        });
    });
    while reader.in_flight() > 0 {
        reader.wait(&mut completions).unwrap();
    }
    for Completion { id, outcome } in completions {
        lent[id as usize].check(outcome.unwrap(), content);
    }
}

/// After the drop nothing writes to the memory any more, whether or not the reads had been started.
fn drains_when_dropped(make: Make, open: &dyn Fn() -> DirectFile) {
    for wait_first in [false, true] {
        let align = open().align;
        let mut reader = make(open());
        let mut lent: Vec<Lent> = (0..QUEUE_DEPTH).map(|_| Lent::new(0, &[65536], align)).collect();
        for (id, lent) in lent.iter().enumerate() {
            lent.submit(&mut *reader, id as u64);
        }
        if wait_first {
            reader.wait(&mut Vec::with_capacity(1)).unwrap();
        }
        drop(reader);
        for lent in &mut lent {
            lent.memory.fill(0xEE);
        }
        std::thread::sleep(Duration::from_millis(20));
        assert!(lent.iter().all(|lent| lent.memory.iter().all(|&byte| byte == 0xEE)));
    }
}

/// The system's errno comes back as it is, and the reader reads on.
fn reports_errors(make: Make, path: &Path) {
    let align = Alignment { memory_bytes: 1, offset_bytes: 1 };
    let made = |file| make(DirectFile { file, direct: false, align, notes: Vec::new() });
    let mut reader = made(File::options().append(true).open(path).unwrap());
    for _ in 0..3 {
        assert_eq!(Lent::new(0, &[64, 64], align).read(&mut *reader), Err(libc::EBADF));
    }
    let mut reader = made(File::open(path.parent().unwrap()).unwrap());
    assert_eq!(Lent::new(0, &[64], align).read(&mut *reader), Err(libc::EISDIR));
    let mut reader = made(File::open(path).unwrap());
    let nowhere = [Part::new(std::ptr::without_provenance_mut(8), 4096)];
    // SAFETY: the kernel refuses to write to the first page, which no process may map here.
    unsafe { reader.submit(&Read { id: 5, offset: 0, parts: &raw const nowhere[..] }) }.unwrap();
    let mut completions = Vec::with_capacity(1);
    reader.wait(&mut completions).unwrap();
    assert_eq!(completions[0].id, 5);
    assert_eq!(completions[0].outcome.as_ref().unwrap_err().raw_os_error(), Some(libc::EFAULT));
    Lent::new(0, &[64], align).read(&mut *reader).unwrap();
}

#[test]
fn a_direct_file_bypasses_the_page_cache() {
    let (_folder, path, _) = fixture();
    for mode in [DirectMode::Auto, DirectMode::Never] {
        let DirectFile { file, direct, align, notes } = DirectFile::open(&path, mode).unwrap();
        let flags = rustix::fs::fcntl_getfl(&file).unwrap();
        assert_eq!(flags.contains(rustix::fs::OFlags::DIRECT), direct);
        assert_eq!(direct, mode == DirectMode::Auto && notes.is_empty(), "{notes:?}");
        assert!(align.memory_bytes.is_power_of_two() && align.offset_bytes.is_power_of_two(), "{align:?}");
    }
}

#[test]
fn a_file_in_memory_is_read_through_the_page_cache() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        return eprintln!("skipped: this system has no /dev/shm");
    };
    let path = folder.path().join("file");
    fs::write(&path, [1_u8; 4096]).unwrap();
    let file = DirectFile::open(&path, DirectMode::Auto).unwrap();
    assert_eq!((file.direct, file.align.offset_bytes, file.notes.len()), (false, 1, 1));
    assert!(file.notes[0].contains("in memory"), "{}", file.notes[0]);
    let message = DirectFile::open(&path, DirectMode::Always).unwrap_err().to_string();
    assert!(message.contains("local drive"), "{message}");
}

/// A file of random bytes on a file system that is, where possible, no tmpfs.
fn fixture() -> (tempfile::TempDir, PathBuf, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let mut content = vec![0_u8; FILE_BYTES];
    Xoshiro256PlusPlus::seed_from_u64(0).fill(&mut content[..]);
    fs::write(&path, &content).unwrap();
    (folder, path, content)
}

/// Memory lent to one read: parts in reverse order with gaps between, so that order counts.
struct Lent {
    offset: usize,
    memory: Vec<u8>,
    parts: Vec<Part>,
}

/// Fills what no read should touch.
const UNTOUCHED: u8 = 0xA5;

impl Lent {
    fn new(offset: usize, sizes: &[usize], align: Alignment) -> Self {
        let step = align.memory_bytes.max(64);
        let room: usize = sizes.iter().map(|bytes| bytes.next_multiple_of(step) + step).sum();
        let mut memory = vec![UNTOUCHED; room + step];
        let mut end = memory.as_ptr().align_offset(step) + room;
        let start = memory.as_mut_ptr();
        let parts = sizes.iter().map(|&bytes| {
            end -= bytes.next_multiple_of(step) + step;
            Part::new(start.wrapping_add(end), bytes)
        });
        let parts = parts.collect();
        Self { offset, memory, parts }
    }

    fn submit(&self, reader: &mut dyn RecordReader, id: u64) {
        let read = Read { id, offset: self.offset as u64, parts: &raw const self.parts[..] };
        // SAFETY: the tests keep `self` until the completion came or the reader was dropped.
        unsafe { reader.submit(&read) }.unwrap();
    }

    /// Reads alone: the bytes that came, or the errno.
    fn read(&self, reader: &mut dyn RecordReader) -> Result<usize, i32> {
        let mut completions = Vec::with_capacity(1);
        self.submit(reader, 77);
        reader.wait(&mut completions).unwrap();
        let Completion { id, outcome } = completions.pop().unwrap();
        assert_eq!((id, reader.in_flight()), (77, 0));
        outcome.map_err(|error| error.raw_os_error().unwrap())
    }

    /// The first `read` bytes stand in the parts, in order, and nothing outside the parts was touched.
    #[track_caller]
    fn check(&self, read: usize, content: &[u8]) {
        let asked: usize = self.parts.iter().map(|part| part.bytes()).sum();
        let there = &content[self.offset.min(content.len())..];
        assert_eq!(read, asked.min(there.len()));
        let mut expected = vec![UNTOUCHED; self.memory.len()];
        let mut rest = &there[..read];
        for part in &self.parts {
            let (now, later) = rest.split_at(part.bytes().min(rest.len()));
            let start = part.address().addr() - self.memory.as_ptr().addr();
            // What lies behind the end of the file is the reader's to overwrite.
            let part_bytes = start..start + part.bytes();
            expected[part_bytes.clone()].copy_from_slice(&self.memory[part_bytes]);
            expected[start..][..now.len()].copy_from_slice(now);
            rest = later;
        }
        assert!(self.memory == expected, "offset {}, {read} bytes", self.offset);
    }
}

/// Whether this system gives no ring to anybody.
pub(super) fn kernel_lacks_uring() -> bool {
    io_uring::IoUring::new(2).is_err()
}

/// Runs `test` on a thread whose `io_uring_setup` fails with `errno`, as under a container's seccomp profile.
pub(super) fn without_ring(errno: i32, test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(move || {
        if forbid_ring(errno) {
            test();
        } else {
            eprintln!("skipped: this system takes no seccomp filter");
        }
    });
    thread.join().expect("the test under a seccomp filter");
}

fn forbid_ring(errno: i32) -> bool {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
    let mut filter = [
        step(LOAD, 0, 0),
        libc::sock_filter { jf: 1, ..step(JUMP_IF_EQUAL, 0, libc::SYS_io_uring_setup as u32) },
        step(RETURN, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        step(RETURN, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: it only lowers what this thread may do.
    let lowered = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } == 0;
    // SAFETY: `program` points to `filter`, which outlives the call; the filter holds for this thread only.
    let filtered = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) } == 0;
    lowered && filtered
}
