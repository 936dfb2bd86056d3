//! Rotary positions.

use super::Cpu;
use super::pool::Parts;
use np_formats::RopeScaling;
use std::f64::consts::PI;

/// Cosines and sines of the angle of each position and pair of values, (context, head_dim / 2).
#[derive(Clone, PartialEq, Debug)]
pub struct RopeTable {
    head_dim: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// The angles of positions below `context` for heads of `head_dim` values (even) and base `theta`, computed in f64.
    pub fn new(head_dim: usize, theta: f64, scaling: RopeScaling, context: usize) -> Self {
        assert!(head_dim >= 2 && head_dim.is_multiple_of(2), "head_dim {head_dim} must be even");
        let pairs = head_dim / 2;
        let frequencies: Vec<f64> =
            (0..pairs).map(|pair| scaled(theta.powf(-2.0 * pair as f64 / head_dim as f64), scaling)).collect();
        let angles = (0..context).flat_map(|position| frequencies.iter().map(move |f| position as f64 * f));
        let (mut cos, mut sin) = (Vec::with_capacity(context * pairs), Vec::with_capacity(context * pairs));
        for angle in angles {
            cos.push(angle.cos() as f32);
            sin.push(angle.sin() as f32);
        }
        Self { head_dim, cos, sin }
    }

    /// Values in a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Positions in the table.
    pub fn context(&self) -> usize {
        self.cos.len() / (self.head_dim / 2)
    }

    /// Cosines of `position`, (head_dim / 2).
    pub fn cos(&self, position: usize) -> &[f32] {
        &self.cos[position * self.head_dim / 2..][..self.head_dim / 2]
    }

    /// Sines of `position`, (head_dim / 2).
    pub fn sin(&self, position: usize) -> &[f32] {
        &self.sin[position * self.head_dim / 2..][..self.head_dim / 2]
    }
}

fn scaled(frequency: f64, scaling: RopeScaling) -> f64 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / f64::from(factor),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let (factor, low, high) = (f64::from(factor), f64::from(low_freq_factor), f64::from(high_freq_factor));
            let turns = f64::from(original_context) * frequency / (2.0 * PI);
            if turns < low {
                frequency / factor
            } else if turns > high {
                frequency
            } else {
                let smooth = (turns - low) / (high - low);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
    }
}

/// Rotates x (tokens, heads, head_dim) by positions `first_position` onwards.
pub(super) fn rope(cpu: &mut Cpu, table: &RopeTable, x: &mut [f32], first_position: usize, heads: usize) {
    let width = heads * table.head_dim;
    let tokens = x.len() / width;
    assert!(
        first_position + tokens <= table.context(),
        "positions up to {} of {}",
        first_position + tokens,
        table.context()
    );
    let parts = Parts::new(x);
    cpu.pool.run(tokens, &|token, _| {
        // SAFETY: tokens have ranges of their own.
        let heads = unsafe { parts.part(token * width..(token + 1) * width) };
        let (cos, sin) = (table.cos(first_position + token), table.sin(first_position + token));
        heads.chunks_exact_mut(table.head_dim).for_each(|head| rotate(head, cos, sin));
    });
}

/// Values i and i + head_dim / 2 are a point that turns by angle i.
fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((first, second), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*first, *second) = (*first * cos - *second * sin, *second * cos + *first * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(frequency: f64, scaling: RopeScaling, expected: f64) {
        let found = scaled(frequency, scaling);
        assert!((found - expected).abs() <= 1e-12 * expected, "{found} is not {expected}");
    }

    #[test]
    fn frequencies_are_stretched_as_the_configuration_says() {
        check(0.25, RopeScaling::None, 0.25);
        check(0.25, RopeScaling::Linear { factor: 4.0 }, 0.0625);
        let llama3 =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 };
        let with_wavelength = |wavelength: f64| 2.0 * PI / wavelength;
        // Wavelengths above 8192 / 1 and below 8192 / 4, and halfway between 1 and 4 turns.
        check(with_wavelength(8193.0), llama3, with_wavelength(8193.0) / 8.0);
        check(with_wavelength(2047.0), llama3, with_wavelength(2047.0));
        let halfway = with_wavelength(8192.0 / 2.5);
        check(halfway, llama3, 0.5 * halfway / 8.0 + 0.5 * halfway);
    }

    #[test]
    fn tables_hold_the_angles() {
        let table = RopeTable::new(6, 10_000.0, RopeScaling::None, 10);
        assert_eq!((table.head_dim(), table.context()), (6, 10));
        let angle = 9.0 * 10_000_f64.powf(-4.0 / 6.0);
        assert_eq!((table.cos(9)[2], table.sin(9)[2]), (angle.cos() as f32, angle.sin() as f32));
        assert_eq!((table.cos(0), table.sin(0)), (&[1.0; 3][..], &[0.0; 3][..]));
    }
}
