//! How much a neuron matters at a token.

use half::{bf16, f16};
use np_formats::{Dtype, RecordLayout};

/// `|silu(gate)·up|·‖down‖`: the length of what the neuron adds to the residual stream, where `gate` and `up` are its
/// rows times the MLP's input.
pub fn importance(gate: f32, up: f32, down_norm: f32) -> f32 {
    (gate / (1.0 + (-gate).exp()) * up).abs() * down_norm
}

/// The length of the down^T row of a record.
pub fn down_norm(layout: RecordLayout, record: &[u8]) -> f32 {
    let down = &record[2 * layout.row_bytes()..3 * layout.row_bytes()];
    let widen = |bytes: &[u8]| match layout.dtype() {
        Dtype::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        Dtype::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        Dtype::F32 => f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
    };
    let squares: f64 = down.chunks_exact(layout.dtype().bytes()).map(|bytes| widen(bytes).powi(2)).sum();
    squares.sqrt() as f32
}
