//! Opens a file with the best reader that works here, found out by reading.

use super::{Alignment, DirectFile, DirectMode, PREAD_THREADS, Part, PreadReader, Read, ReaderKind};
use super::{RecordReader, UringReader};
use np_formats::{Error, Result};
use std::fs;
use std::io;
use std::path::Path;
use std::str::FromStr;

/// Where the switch that turns io_uring off stands.
const DISABLED_PATH: &str = "/proc/sys/kernel/io_uring_disabled";
/// Alignment of the trial's memory in bytes: more than any drive asks for.
const TRIAL_ALIGN_BYTES: usize = 4096;

/// Which reader is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReaderChoice {
    /// The ring if it works, else the pool.
    Auto,
    /// The ring or nothing.
    Uring,
    /// The pool.
    Pread,
}

impl FromStr for ReaderChoice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "uring" => Ok(Self::Uring),
            "pread" => Ok(Self::Pread),
            _ => Err(format!("`{text}` is no reader; take auto, uring or pread")),
        }
    }
}

/// A reader that has read, and what was found out on the way.
pub struct Opened {
    /// The reader, with nothing in flight.
    pub reader: Box<dyn RecordReader>,
    /// Which it is.
    pub kind: ReaderKind,
    /// What its reads must be aligned to.
    pub align: Alignment,
    /// What is not as it could be, why, and what to do about it: one sentence each, to be shown once.
    pub notes: Vec<String>,
}

/// Opens `path` and reads its first `trial_bytes` bytes (or what there is) with the reader that is given back.
///
/// # Errors
/// When the file can't be opened or read, or a ring or direct reads are insisted on and not to be had.
pub fn open_reader(path: &Path, choice: ReaderChoice, mode: DirectMode, trial_bytes: usize) -> Result<Opened> {
    let mut notes = Vec::new();
    if choice != ReaderChoice::Pread {
        match open_uring(path, mode, trial_bytes)? {
            Ok(opened) => return Ok(opened),
            Err(refusal) => {
                let cause = ring_refusal(&refusal, fs::read_to_string(DISABLED_PATH).ok().as_deref());
                if choice == ReaderChoice::Uring {
                    let source = io::Error::new(refusal.kind(), cause);
                    return Err(Error::Io { path: path.into(), action: "read through io_uring", source });
                }
                notes.push(format!("{cause}; reading with threads instead"));
            }
        }
    }
    let file = DirectFile::open(path, mode)?;
    notes.extend(file.notes.iter().cloned());
    let align = file.align;
    let failed = |action| move |source| Error::Io { path: path.into(), action, source };
    let pool = PreadReader::new(file, PREAD_THREADS).map_err(failed("start threads that read"))?;
    let reader = trial(Box::new(pool), path, align, trial_bytes).map_err(failed("read"))?;
    Ok(Opened { kind: reader.kind(), reader, align, notes })
}

/// A ring that has read. The inner error is the ring's, the outer one the file's.
fn open_uring(path: &Path, mode: DirectMode, trial_bytes: usize) -> Result<io::Result<Opened>> {
    let file = DirectFile::open(path, mode)?;
    let (align, notes) = (file.align, file.notes.clone());
    let opened = UringReader::new(file)
        .and_then(|ring| trial(Box::new(ring), path, align, trial_bytes))
        .map(|reader| Opened { kind: reader.kind(), reader, align, notes });
    Ok(opened)
}

/// Reads the first bytes of the file, checks that as many came as there are and gives the reader back.
fn trial(
    reader: Box<dyn RecordReader>,
    path: &Path,
    align: Alignment,
    trial_bytes: usize,
) -> io::Result<Box<dyn RecordReader>> {
    let bytes = trial_bytes.max(1).next_multiple_of(align.offset_bytes);
    let expected = usize::try_from(fs::metadata(path)?.len()).unwrap_or(usize::MAX).min(bytes);
    let mut memory = vec![0_u8; bytes + TRIAL_ALIGN_BYTES];
    let start = memory.as_ptr().align_offset(TRIAL_ALIGN_BYTES);
    let parts = [Part::new(memory[start..][..bytes].as_mut_ptr(), bytes)];
    let mut completions = Vec::with_capacity(1);
    // Declared last and so dropped first, whatever happens: a reader must not outlive what it reads into.
    let mut reader = reader;
    // SAFETY: `parts` and `memory` outlive `reader`, or the only read's completion was returned.
    unsafe { reader.submit(&Read { id: 0, offset: 0, parts: &raw const parts[..] }) }?;
    reader.wait(&mut completions)?;
    match completions.pop().expect("wait returns at least one completion").outcome? {
        read if read == expected => Ok(reader),
        read => Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{read} bytes came instead of {expected}"))),
    }
}

/// Why there is no ring, and what to do. `disabled` is the text of the kernel's switch, where it has one.
fn ring_refusal(error: &io::Error, disabled: Option<&str>) -> String {
    let switch = disabled.map_or("", str::trim);
    let cause = match error.raw_os_error() {
        Some(libc::EPERM) if matches!(switch, "1" | "2") => {
            format!("the sysctl kernel.io_uring_disabled is {switch}; set it to 0, or take --reader pread")
        }
        Some(libc::EPERM | libc::EACCES) => "likely cause: the seccomp profile of a container or service; \
             allow io_uring_setup, io_uring_enter and io_uring_register there, or take --reader pread"
            .into(),
        Some(libc::ENOSYS) => "likely cause: a kernel before 5.1 or built without it, or the seccomp profile of a \
             container that hides it; take --reader pread"
            .into(),
        Some(libc::EINVAL | libc::EOPNOTSUPP) => {
            "this kernel or drive lacks what the ring needs; take --reader pread".into()
        }
        Some(libc::ENOMEM) => "likely cause: the limit on locked memory, which kernels before 5.12 count the ring \
             against; raise `ulimit -l` to 1024 or more, or take --reader pread"
            .into(),
        _ => String::from("take --reader pread"),
    };
    format!("io_uring is not available ({error}): {cause}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::tests::{kernel_lacks_uring, without_ring};

    #[track_caller]
    fn check_refusal(errno: i32, disabled: Option<&str>, expected: &str) {
        let text = ring_refusal(&io::Error::from_raw_os_error(errno), disabled);
        assert!(text.contains(expected) && text.contains("--reader pread") && !text.contains('\n'), "{text}");
    }

    #[test]
    fn a_refusal_names_cause_and_remedy() {
        check_refusal(libc::EPERM, Some("2\n"), "sysctl kernel.io_uring_disabled is 2");
        check_refusal(libc::EPERM, Some("1\n"), "sysctl kernel.io_uring_disabled is 1");
        check_refusal(libc::EPERM, Some("0\n"), "seccomp");
        check_refusal(libc::EPERM, None, "seccomp");
        check_refusal(libc::ENOSYS, None, "before 5.1");
        check_refusal(libc::ENOMEM, None, "ulimit -l");
        check_refusal(libc::EINVAL, None, "lacks");
        check_refusal(libc::EIO, None, "Input/output error");
    }

    #[test]
    fn opens_and_reports() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, [7_u8; 5000]).unwrap();
        let pool = open_reader(&path, ReaderChoice::Pread, DirectMode::Never, 4096).unwrap();
        assert_eq!(pool.kind, ReaderKind::Pread { threads: PREAD_THREADS, direct: false });
        assert_eq!((pool.reader.in_flight(), pool.align.offset_bytes, pool.notes.len()), (0, 1, 0));
        for (choice, trial_bytes) in [(ReaderChoice::Auto, 0), (ReaderChoice::Auto, 1 << 20)] {
            let opened = open_reader(&path, choice, DirectMode::Auto, trial_bytes).unwrap();
            if kernel_lacks_uring() {
                assert!(matches!(opened.kind, ReaderKind::Pread { .. }) && opened.notes[0].contains("io_uring"));
            } else {
                assert!(matches!(opened.kind, ReaderKind::Uring { .. }), "{}", opened.kind);
            }
        }
        fs::write(&path, []).unwrap();
        open_reader(&path, ReaderChoice::Auto, DirectMode::Auto, 4096).unwrap();
        let missing = open_reader(&folder.path().join("none"), ReaderChoice::Auto, DirectMode::Auto, 4096);
        let message = missing.err().expect("there is no such file").to_string();
        assert!(message.contains("none: open"), "{message}");
        // A file whose length is not what the system says: 0 here.
        let strange = open_reader(Path::new("/proc/self/status"), ReaderChoice::Pread, DirectMode::Auto, 4096);
        let message = strange.err().expect("more comes than there is").to_string();
        assert!(message.contains("came instead of 0"), "{message}");
    }

    #[test]
    fn a_refused_ring_falls_back_or_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, [7_u8; 5000]).unwrap();
        for errno in [libc::EPERM, libc::ENOSYS] {
            let path = path.clone();
            without_ring(errno, move || {
                let auto = open_reader(&path, ReaderChoice::Auto, DirectMode::Auto, 4096).unwrap();
                assert!(matches!(auto.kind, ReaderKind::Pread { .. }), "{}", auto.kind);
                assert!(auto.notes[0].contains("seccomp") && auto.notes[0].contains("threads"), "{:?}", auto.notes);
                let insisted = open_reader(&path, ReaderChoice::Uring, DirectMode::Auto, 4096);
                let message = insisted.err().expect("no ring").to_string();
                assert!(message.contains("file: read through io_uring") && message.contains("seccomp"), "{message}");
            });
        }
    }

    #[test]
    fn choices_parse() {
        assert_eq!("auto".parse(), Ok(ReaderChoice::Auto));
        assert_eq!("uring".parse(), Ok(ReaderChoice::Uring));
        assert_eq!("pread".parse(), Ok(ReaderChoice::Pread));
        assert!("ring".parse::<ReaderChoice>().is_err_and(|message| message.contains("auto, uring or pread")));
    }
}
