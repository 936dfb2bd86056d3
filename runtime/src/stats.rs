//! What a token cost.

use serde::Serialize;
use std::ops::AddAssign;

/// Rows and time of one token, or sums over several.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize)]
pub struct TokenStats {
    /// Neurons that the sparse layers computed.
    pub active_rows: u64,
    /// Rows in the sparse layers' slots before the token, idle ones included.
    pub resident_rows: u64,
    /// Rows that had to be read: active and not resident.
    pub incoming_rows: u64,
    /// Requests that the reads took.
    pub ranges: u64,
    /// Bytes read, records between wanted ones included.
    pub read_bytes: u64,
    /// Time that computing stood still for reads.
    pub io_wait_ns: u64,
    /// Time in layers and head.
    pub compute_ns: u64,
    /// Time in the selector.
    pub predictor_ns: u64,
    /// Time in slot maps and plans.
    pub other_ns: u64,
}

impl TokenStats {
    /// All of the token's time.
    pub fn elapsed_ns(&self) -> u64 {
        self.io_wait_ns + self.compute_ns + self.predictor_ns + self.other_ns
    }
}

impl AddAssign for TokenStats {
    fn add_assign(&mut self, other: Self) {
        self.active_rows += other.active_rows;
        self.resident_rows += other.resident_rows;
        self.incoming_rows += other.incoming_rows;
        self.ranges += other.ranges;
        self.read_bytes += other.read_bytes;
        self.io_wait_ns += other.io_wait_ns;
        self.compute_ns += other.compute_ns;
        self.predictor_ns += other.predictor_ns;
        self.other_ns += other.other_ns;
    }
}

/// Bytes and time of a prompt.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize)]
pub struct PrefillStats {
    /// Prompt tokens.
    pub tokens: u64,
    /// Bytes streamed through the block buffers.
    pub streamed_bytes: u64,
    /// All of the prompt's time.
    pub elapsed_ns: u64,
}
