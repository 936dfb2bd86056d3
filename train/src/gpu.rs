//! Whether CUDA can be used. burn panics where it can't, so this is asked before its first call.

use crate::{Error, Result};
use std::path::Path;

/// Refuses with what is missing: the driver, a device, the compiler for kernels, or the headers that it includes.
pub fn check() -> Result<()> {
    // SAFETY: this loads the driver's library by its well-known name and lets go of it; its initialisers are those of
    // the driver that the user installed.
    let driver = unsafe { cudarc::driver::sys::is_culib_present() };
    if !driver {
        return Err(Error::NoCuda("the driver's library libcuda was not found"));
    }
    let devices = cudarc::driver::CudaContext::device_count().unwrap_or(0);
    if devices < 1 {
        return Err(Error::NoCuda("the driver knows no device"));
    }
    // SAFETY: as above, for the compiler's library.
    let compiler = unsafe { cudarc::nvrtc::sys::is_culib_present() };
    if !compiler {
        return Err(Error::NoCuda("the compiler's library libnvrtc was not found"));
    }
    let toolkit = std::env::var("CUDA_PATH").unwrap_or_else(|_| "/usr/local/cuda".into());
    if !Path::new(&toolkit).join("include/cuda_fp16.h").exists() {
        return Err(Error::NoCuda("CUDA_PATH, or else /usr/local/cuda, has no include/cuda_fp16.h"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_cuda_is_told_what_is_missing() {
        // SAFETY: see `check`.
        if unsafe { cudarc::driver::sys::is_culib_present() } {
            println!("skipped: this machine has a CUDA driver");
            return;
        }
        let message = check().unwrap_err().to_string();
        assert!(message.contains("libcuda") && message.contains("--backend cpu"), "{message}");
    }
}
