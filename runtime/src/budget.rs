//! How much memory there is, and what the engine takes of it.

use np_formats::{Error, Result};
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Units of a size, each with its bytes. A bare letter is binary, as `ulimit`, Docker and systemd have it.
const UNITS: [(&str, u64); 14] = [
    ("", 1),
    ("b", 1),
    ("k", 1 << 10),
    ("kib", 1 << 10),
    ("kb", 1_000),
    ("m", 1 << 20),
    ("mib", 1 << 20),
    ("mb", 1_000_000),
    ("g", 1 << 30),
    ("gib", 1 << 30),
    ("gb", 1_000_000_000),
    ("t", 1 << 40),
    ("tib", 1 << 40),
    ("tb", 1_000_000_000_000),
];
/// Limits from here on mean that there is none: version 1 of cgroups writes the largest page count.
const UNLIMITED_BYTES: u64 = 1 << 62;

/// Memory that may be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// How much.
    pub bytes: u64,
    /// Who says so.
    pub source: BudgetSource,
}

/// What sets a budget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BudgetSource {
    /// The system's `MemAvailable`.
    System,
    /// The memory limit of a control group, less what its processes use.
    Cgroup(PathBuf),
    /// The user.
    Asked,
}

impl fmt::Display for BudgetSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System => formatter.write_str("available memory"),
            Self::Cgroup(path) => write!(formatter, "memory limit of {}", path.display()),
            Self::Asked => formatter.write_str("--memory"),
        }
    }
}

/// What the engine's allocations take, line by line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Name and bytes of each.
    pub lines: Vec<(String, u64)>,
}

impl Footprint {
    /// Adds a line.
    pub fn add(&mut self, name: impl Into<String>, bytes: u64) {
        self.lines.push((name.into(), bytes));
    }

    /// The sum of all lines, in bytes.
    pub fn total(&self) -> u64 {
        self.lines.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

/// A table with the total at its end, and no line break after it.
impl fmt::Display for Footprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.lines.iter().map(|(name, _)| name.chars().count());
        let width = names.chain(["total".len()]).max().unwrap_or(0);
        for (name, bytes) in &self.lines {
            writeln!(formatter, "{name:width$}  {:>10}", format_size(*bytes))?;
        }
        write!(formatter, "{:width$}  {:>10}", "total", format_size(self.total()))
    }
}

/// Bytes of a size like `11.9GiB`, `512 MB`, `8G` (binary) or `4096`.
///
/// # Errors
/// One line that says what a size looks like.
pub fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let wrong = || format!("`{text}` is no size; write it like 11.9GiB, 512MiB or 4096");
    let trimmed = text.trim();
    let digits = trimmed.find(|character: char| character != '.' && !character.is_ascii_digit());
    let (number, unit) = trimmed.split_at(digits.unwrap_or(trimmed.len()));
    let unit = unit.trim().to_ascii_lowercase();
    let unit_bytes = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?.1;
    let bytes = match number.parse::<u64>() {
        Ok(count) => count.checked_mul(unit_bytes),
        Err(_) => {
            let bytes = number.parse::<f64>().map_err(|_| wrong())? * unit_bytes as f64;
            (bytes < u64::MAX as f64).then_some(bytes as u64)
        }
    };
    bytes.ok_or_else(|| format!("`{text}` is more than any memory"))
}

/// Bytes as people read them: three or four digits and a binary unit.
pub fn format_size(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let (mut size, mut unit) = (bytes as f64 / 1024.0, 0);
    // 1023.95 would be written as 1024.0 of the smaller unit.
    while size >= 1023.95 {
        size /= 1024.0;
        unit += 1;
    }
    format!("{size:.1} {}", units[unit])
}

/// Memory that is free or can be freed now: the least of what the system has available and what the limits of all
/// control groups above this process leave. Page cache counts as free.
///
/// # Errors
/// When the system does not say.
pub fn available_memory() -> Result<Budget> {
    available_under(Path::new("/"))
}

/// As [`available_memory`], with the system's files under `root`.
fn available_under(root: &Path) -> Result<Budget> {
    let path = root.join("proc/meminfo");
    let text = fs::read_to_string(&path).map_err(|source| Error::Io { path: path.clone(), action: "read", source })?;
    let bytes = mem_available(&text).ok_or_else(|| Error::Io {
        path,
        action: "find MemAvailable",
        source: io::Error::new(io::ErrorKind::InvalidData, "not there; pass --memory SIZE"),
    })?;
    let system = Budget { bytes, source: BudgetSource::System };
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let limits = groups.lines().filter_map(CgroupLine::parse).flat_map(|line| line.budgets(root));
    Ok(limits.chain([system]).min_by_key(|budget| budget.bytes).expect("the system's own is among them"))
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn mem_available(meminfo: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A control group of this process that limits memory.
#[derive(Debug, PartialEq, Eq)]
struct CgroupLine<'a> {
    version: CgroupVersion,
    /// Relative to the hierarchy's root.
    path: &'a str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CgroupVersion {
    One,
    Two,
}

impl<'a> CgroupLine<'a> {
    /// A line of `/proc/self/cgroup`: `0::/path` is version 2, `4:memory:/path` version 1.
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.splitn(3, ':');
        let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let version = match (id, controllers) {
            ("0", "") => CgroupVersion::Two,
            _ if controllers.split(',').any(|controller| controller == "memory") => CgroupVersion::One,
            _ => return None,
        };
        Some(Self { version, path: path.trim_start_matches('/') })
    }

    /// What this group and each above it leave. A group that does not exist here (a container sees its host's path) is
    /// passed over.
    fn budgets(&self, root: &Path) -> Vec<Budget> {
        let mount = match self.version {
            CgroupVersion::One => root.join("sys/fs/cgroup/memory"),
            CgroupVersion::Two => root.join("sys/fs/cgroup"),
        };
        let leaf = mount.join(self.path);
        let groups = leaf.ancestors().take_while(|group| group.starts_with(&mount));
        groups
            .filter_map(|group| {
                let bytes = self.version.left(|name| fs::read_to_string(group.join(name)).ok())?;
                Some(Budget { bytes, source: BudgetSource::Cgroup(group.into()) })
            })
            .collect()
    }
}

impl CgroupVersion {
    /// What a group's limit leaves, in bytes, given its files by name; nothing if it has no limit.
    fn left(self, file: impl Fn(&str) -> Option<String>) -> Option<u64> {
        let number = |name: &str| file(name)?.trim().parse::<u64>().ok();
        let (limits, usage, reclaimable): (&[_], _, &[_]) = match self {
            Self::One => {
                (&["memory.limit_in_bytes"], "memory.usage_in_bytes", &["total_inactive_file", "total_active_file"])
            }
            // Above `high` a group is slowed down until it hardly runs.
            Self::Two => (
                &["memory.max", "memory.high"],
                "memory.current",
                &["inactive_file", "active_file", "slab_reclaimable"],
            ),
        };
        let limit = limits.iter().filter_map(|name| number(name)).min()?;
        if limit >= UNLIMITED_BYTES {
            return None;
        }
        let stat = file("memory.stat").unwrap_or_default();
        let cache = stat.lines().filter_map(|line| {
            let (name, value) = line.split_once(' ')?;
            reclaimable.contains(&name).then(|| value.trim().parse::<u64>().ok())?
        });
        let used = number(usage).unwrap_or(0).saturating_sub(cache.sum());
        Some(limit.saturating_sub(used))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MEMINFO: &str = "MemTotal:       32768000 kB\nMemFree:         1000000 kB\nMemAvailable:    8388608 kB\n";

    #[test]
    fn sizes_parse() {
        let check = |text, expected| assert_eq!(parse_size(text), Ok(expected), "{text}");
        check("4096", 4096);
        check("0", 0);
        check("11.9GiB", 12_777_527_705);
        check("512MiB", 512 << 20);
        check(" 1.5 kib ", 1536);
        check("8G", 8 * GIB);
        check("8GB", 8_000_000_000);
        check("2t", 2 << 40);
        check("100 B", 100);
        check("18446744073709551615", u64::MAX);
        for text in ["", "GiB", "-1GiB", "1.2.3G", "1e9", "5 apples", "NaN", "inf", "1 G iB", "."] {
            assert!(parse_size(text).is_err_and(|message| message.contains("11.9GiB")), "{text}");
        }
        for text in ["16777216TiB", "18446744073709551616", "99999999999.5TiB"] {
            assert!(parse_size(text).is_err_and(|message| message.contains("more than any")), "{text}");
        }
    }

    #[test]
    fn sizes_are_written_for_people() {
        let check = |bytes, expected| assert_eq!(format_size(bytes), expected);
        check(0, "0 B");
        check(1023, "1023 B");
        check(25_088, "24.5 KiB");
        check((1 << 20) - 1, "1.0 MiB");
        check(12_777_527_705, "11.9 GiB");
        check(u64::MAX, "16.0 EiB");
    }

    #[test]
    fn a_footprint_is_a_table() {
        let mut footprint = Footprint::default();
        footprint.add("resident", 3 * GIB / 2);
        footprint.add("slots", 512 << 20);
        assert_eq!(footprint.total(), 2 * GIB);
        assert_eq!(footprint.to_string(), "resident     1.5 GiB\nslots      512.0 MiB\ntotal        2.0 GiB");
        footprint.add("everything", u64::MAX);
        assert_eq!(footprint.total(), u64::MAX);
        assert_eq!(Footprint::default().to_string(), "total         0 B");
    }

    #[test]
    fn meminfo_parses() {
        assert_eq!(mem_available(MEMINFO), Some(8 * GIB));
        assert_eq!(mem_available("MemFree: 12 kB\n"), None);
        assert_eq!(mem_available("MemAvailable: much kB\n"), None);
    }

    #[test]
    fn group_lines_parse() {
        let check = |line, expected: Option<(CgroupVersion, &str)>| {
            let parsed = CgroupLine::parse(line);
            assert_eq!(parsed.map(|line| (line.version, line.path)), expected, "{line}");
        };
        check("0::/user.slice/session:1.scope", Some((CgroupVersion::Two, "user.slice/session:1.scope")));
        check("0::/", Some((CgroupVersion::Two, "")));
        check("4:cpuacct,memory:/docker/abc", Some((CgroupVersion::One, "docker/abc")));
        check("5:cpu:/", None);
        check("", None);
    }

    #[track_caller]
    fn check_left(version: CgroupVersion, files: &[(&str, &str)], expected: Option<u64>) {
        let file = |name: &str| files.iter().find(|(file, _)| *file == name).map(|(_, text)| (*text).to_owned());
        assert_eq!(version.left(file), expected);
    }

    #[test]
    fn a_limit_leaves_what_is_not_used() {
        use CgroupVersion::{One, Two};
        let stat = ("memory.stat", "anon 5\ninactive_file 100\nactive_file 20\nslab_reclaimable 3\nfile 999\n");
        check_left(Two, &[("memory.max", "1000\n"), ("memory.current", "400\n"), stat], Some(723));
        check_left(Two, &[("memory.max", "1000\n"), ("memory.high", "900\n"), ("memory.current", "400\n")], Some(500));
        check_left(Two, &[("memory.max", "max\n"), ("memory.high", "900\n")], Some(900));
        check_left(Two, &[("memory.max", "max\n"), ("memory.high", "max\n"), ("memory.current", "4\n")], None);
        check_left(Two, &[("memory.max", "100\n"), ("memory.current", "400\n")], Some(0));
        check_left(Two, &[], None);
        let stat = ("memory.stat", "inactive_file 7\ntotal_inactive_file 100\ntotal_active_file 20\n");
        check_left(One, &[("memory.limit_in_bytes", "1000\n"), ("memory.usage_in_bytes", "400\n"), stat], Some(720));
        check_left(One, &[("memory.limit_in_bytes", "9223372036854771712\n")], None);
    }

    /// The least of everything above the process, whichever it is.
    #[test]
    fn the_tightest_limit_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let check = |bytes, source| {
            assert_eq!(available_under(root.path()).unwrap(), Budget { bytes, source });
        };
        let group = |path: &str| BudgetSource::Cgroup(root.path().join("sys/fs/cgroup").join(path));
        assert!(available_under(root.path()).unwrap_err().to_string().contains("proc/meminfo"));
        write("proc/meminfo", "MemFree: 12 kB\n");
        assert!(available_under(root.path()).unwrap_err().to_string().contains("--memory"));
        write("proc/meminfo", MEMINFO);
        check(8 * GIB, BudgetSource::System);
        write("proc/self/cgroup", "5:cpu:/\n0::/a/gone/b\n");
        check(8 * GIB, BudgetSource::System);
        write("sys/fs/cgroup/a/memory.max", "6442450944\n");
        write("sys/fs/cgroup/a/memory.current", "1073741824\n");
        check(5 * GIB, group("a"));
        write("sys/fs/cgroup/a/gone/b/memory.max", "4294967296\n");
        check(4 * GIB, group("a/gone/b"));
        write("sys/fs/cgroup/memory.max", "3221225472\n");
        check(3 * GIB, group(""));
        write("proc/self/cgroup", "3:memory:/c\n");
        write("sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n");
        check(2 * GIB, group("memory"));
    }

    #[test]
    fn this_system_says() {
        assert!(available_memory().unwrap().bytes > 0);
    }
}
