//! Anonymous memory on huge pages.
//!
//! Slots are read into by the kernel and walked once per token: with 4 KiB pages both spend their time on page tables
//! (measured: 2 MiB pages give 1.4 to 1.5 times the read rate).

use crate::{Error, Result};
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;

/// Memory is aligned to this.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Memory is asked for in multiples of this, the largest ordinary page of any machine. Whole huge pages would waste
/// most of one on each small matrix.
const PAGE_BYTES_MAX: usize = 64 << 10;
const _: () = assert!(HUGE_PAGE_BYTES.is_multiple_of(PAGE_BYTES_MAX));

/// Zeroed memory of its own, aligned to [`HUGE_PAGE_BYTES`], freed on drop.
#[derive(Debug)]
pub struct Pages {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: `Pages` owns its mapping alone, like a boxed slice of bytes.
unsafe impl Send for Pages {}
// SAFETY: shared access gives only `&[u8]`.
unsafe impl Sync for Pages {}

impl Pages {
    /// Zeroed memory of `bytes`, which may be 0. Fails with [`Error::OutOfMemory`].
    pub fn new(bytes: usize) -> Result<Self> {
        let mapped = Self::mapped_bytes(bytes);
        if mapped == 0 {
            return Ok(Self { start: NonNull::dangling(), bytes });
        }
        let out_of_memory = || Error::OutOfMemory { bytes };
        let asked = mapped.checked_add(HUGE_PAGE_BYTES).ok_or_else(out_of_memory)?;
        // SAFETY: a new anonymous mapping touches no memory that exists.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                asked,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(out_of_memory());
        }
        let address = address.cast::<u8>();
        let before = address.align_offset(HUGE_PAGE_BYTES);
        unmap(address, before);
        let start = address.wrapping_add(before);
        unmap(start.wrapping_add(mapped), HUGE_PAGE_BYTES - before);
        // SAFETY: the range is the mapping made above. A kernel without huge pages refuses, which costs only speed.
        unsafe { libc::madvise(start.cast(), mapped, libc::MADV_HUGEPAGE) };
        Ok(Self { start: NonNull::new(start).ok_or_else(out_of_memory)?, bytes })
    }

    /// Bytes that memory of `bytes` takes once all of it is touched.
    pub const fn mapped_bytes(bytes: usize) -> usize {
        bytes.div_ceil(PAGE_BYTES_MAX).saturating_mul(PAGE_BYTES_MAX)
    }

    /// The first byte, for readers that let the kernel write.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `new` mapped at least `bytes` bytes at `start`, and they live as long as `self`.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` is the only access.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        unmap(self.start.as_ptr(), Self::mapped_bytes(self.bytes));
    }
}

fn unmap(start: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the callers pass parts of a mapping that they own and no longer use.
        let result = unsafe { libc::munmap(start.cast(), bytes) };
        assert_eq!(result, 0, "munmap of {bytes} bytes");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_zeroed_and_writable() {
        for bytes in [1, 4096, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1] {
            let mut pages = Pages::new(bytes).unwrap();
            assert_eq!(pages.as_mut_ptr().addr() % HUGE_PAGE_BYTES, 0);
            assert_eq!(pages.len(), bytes);
            assert!(pages.iter().all(|&byte| byte == 0));
            pages[bytes - 1] = 7;
            assert_eq!(pages[bytes - 1], 7);
        }
    }

    #[test]
    fn no_bytes_is_an_empty_slice() {
        assert!(Pages::new(0).unwrap().is_empty());
    }

    #[test]
    fn too_much_is_an_error() {
        let bytes = usize::MAX / 2;
        assert!(matches!(Pages::new(bytes), Err(Error::OutOfMemory { bytes: asked }) if asked == bytes));
        assert!(matches!(Pages::new(usize::MAX), Err(Error::OutOfMemory { .. })));
    }
}
