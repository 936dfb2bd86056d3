//! From single precision to 16 bits.

use crate::error::{Error, Result};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use np_formats::Dtype;
use std::path::Path;

/// Where values come from, for messages.
#[derive(Clone, Copy)]
pub struct Origin<'a> {
    /// The file.
    pub path: &'a Path,
    /// The tensor.
    pub tensor: &'a str,
    /// Place in the tensor of the first value.
    pub first: usize,
}

/// Rounds `values` to the nearest (ties to even) values of a 16-bit `dtype`, as bytes. A finite value that would become
/// infinite, and any value that is not finite, is refused.
pub fn narrow(origin: Origin, values: &[f32], dtype: Dtype, bytes: &mut [u8]) -> Result<()> {
    assert_eq!(bytes.len(), 2 * values.len());
    let mut piece = [0u16; PIECE];
    for (index, (values, bytes)) in values.chunks(PIECE).zip(bytes.chunks_mut(2 * PIECE)).enumerate() {
        let piece = &mut piece[..values.len()];
        let overflow = match dtype {
            Dtype::F16 => {
                let piece: &mut [f16] = bytemuck::cast_slice_mut(piece);
                piece.convert_from_f32_slice(values);
                piece.iter().position(|value| !value.is_finite())
            }
            Dtype::Bf16 => {
                let piece: &mut [bf16] = bytemuck::cast_slice_mut(piece);
                piece.convert_from_f32_slice(values);
                piece.iter().position(|value| !value.is_finite())
            }
            Dtype::F32 => panic!("F32 is not narrower than F32"),
        };
        if let Some(at) = overflow {
            let (path, tensor) = (origin.path.into(), origin.tensor.into());
            return Err(Error::Overflow {
                path,
                tensor,
                index: origin.first + index * PIECE + at,
                value: values[at],
                dtype,
            });
        }
        bytes.copy_from_slice(bytemuck::cast_slice(piece));
    }
    Ok(())
}

/// Values converted at once: they stay in the first-level cache.
const PIECE: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn narrowed(values: &[f32], dtype: Dtype) -> Result<Vec<u16>> {
        let origin = Origin { path: Path::new("m.safetensors"), tensor: "t", first: 10 };
        let mut bytes = vec![0; 2 * values.len()];
        narrow(origin, values, dtype, &mut bytes)?;
        Ok(bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect())
    }

    #[test]
    fn ties_go_to_even() {
        let half_step = 2f32.powi(-11);
        let values = [1.0, 1.0 + half_step, 1.0 + 3.0 * half_step, -0.0, 65_504.0, 65_519.0, 2f32.powi(-24)];
        assert_eq!(narrowed(&values, Dtype::F16).unwrap(), [0x3c00, 0x3c00, 0x3c02, 0x8000, 0x7bff, 0x7bff, 1]);
        let half_step = 2f32.powi(-8);
        assert_eq!(narrowed(&[1.0 + half_step, 1.0 + 3.0 * half_step], Dtype::Bf16).unwrap(), [0x3f80, 0x3f82]);
    }

    #[test]
    fn overflow_names_the_tensor_and_the_remedy() {
        let mut values = vec![0.0; PIECE + 5];
        values[PIECE + 3] = 70_000.0;
        let message = narrowed(&values, Dtype::F16).unwrap_err().to_string();
        for word in ["m.safetensors", "tensor t", "value 4109", "70000", "--dtype bf16"] {
            assert!(message.contains(word), "{message}");
        }
        assert!(narrowed(&values, Dtype::Bf16).is_ok());
        assert!(narrowed(&[f32::NAN], Dtype::Bf16).unwrap_err().to_string().contains("damaged"));
    }
}
