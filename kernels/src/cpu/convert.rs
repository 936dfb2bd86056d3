//! Rows of stored values against rows of f32: dot products, sums and widening.
//!
//! 16-bit values are only converted, exactly; products and sums are f32. A dot product has a fixed number of partial
//! sums, so its bits depend on the instructions and the length alone.

use super::simd::{Element, F32, Kernel, Lanes, Path, WIDTH_MAX};
use np_formats::Dtype;

/// Vectors of partial sums in each dot product: enough to hide additions behind each other, few enough that four rows
/// fit into the registers.
const SUMS: usize = 2;

/// Dot products of `rows` with `x`, all rows in one walk. The number of rows does not change a result.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "the same part of every row's sums, side by side")]
pub(crate) fn dots<L: Lanes, E: Element, const R: usize>(lanes: L, rows: [&[u8]; R], x: &[f32]) -> [f32; R] {
    let rows = rows.map(|row| {
        assert_eq!(row.len(), x.len() * E::BYTES);
        row.as_ptr()
    });
    let mut sums = [[lanes.splat(0.0); SUMS]; R];
    let step = SUMS * L::WIDTH;
    let whole = x.len() / step * step;
    let mut index = 0;
    while index < whole {
        for part in 0..SUMS {
            let at = index + part * L::WIDTH;
            // SAFETY: `at + WIDTH <= whole <= x.len()`.
            let factor = unsafe { lanes.load(x.as_ptr().add(at)) };
            for row in 0..R {
                // SAFETY: each row has as many values as `x`.
                let value = unsafe { E::load(lanes, rows[row], at) };
                sums[row][part] = lanes.multiply_add(value, factor, sums[row][part]);
            }
        }
        index += step;
    }
    while index < x.len() {
        let count = L::WIDTH.min(x.len() - index);
        let factor = padded::<L, F32>(lanes, x.as_ptr().cast(), index, count);
        for row in 0..R {
            let value = padded::<L, E>(lanes, rows[row], index, count);
            sums[row][0] = lanes.multiply_add(value, factor, sums[row][0]);
        }
        index += L::WIDTH;
    }
    sums.map(|[first, second]| lanes.sum(lanes.add(first, second)))
}

/// y += the sum of `factors[r] * rows[r]`, added in order: the same bits as one row after the other.
#[inline(always)]
pub(crate) fn add_scaled<L: Lanes, E: Element, const R: usize>(
    lanes: L,
    factors: [f32; R],
    rows: [&[u8]; R],
    y: &mut [f32],
) {
    let rows = rows.map(|row| {
        assert_eq!(row.len(), y.len() * E::BYTES);
        row.as_ptr()
    });
    let factors = factors.map(|factor| lanes.splat(factor));
    let whole = y.len() / L::WIDTH * L::WIDTH;
    let mut index = 0;
    while index < whole {
        // SAFETY: `index + WIDTH <= whole <= y.len()`.
        let to = unsafe { y.as_mut_ptr().add(index) };
        // SAFETY: as above.
        let mut sum = unsafe { lanes.load(to) };
        for row in 0..R {
            // SAFETY: each row has as many values as `y`.
            sum = lanes.multiply_add(unsafe { E::load(lanes, rows[row], index) }, factors[row], sum);
        }
        // SAFETY: as above.
        unsafe { lanes.store(sum, to) };
        index += L::WIDTH;
    }
    if whole < y.len() {
        let rest = &mut y[whole..];
        let mut sum = padded::<L, F32>(lanes, rest.as_ptr().cast(), 0, rest.len());
        for row in 0..R {
            sum = lanes.multiply_add(padded::<L, E>(lanes, rows[row], whole, rest.len()), factors[row], sum);
        }
        store_first(lanes, sum, rest);
    }
}

/// out = row as f32
#[inline(always)]
pub(crate) fn widen<L: Lanes, E: Element>(lanes: L, row: &[u8], out: &mut [f32]) {
    assert_eq!(row.len(), out.len() * E::BYTES);
    let whole = out.len() / L::WIDTH * L::WIDTH;
    for index in (0..whole).step_by(L::WIDTH) {
        let to = out[index..][..L::WIDTH].as_mut_ptr();
        // SAFETY: `index + WIDTH <= out.len()`, and the row has as many values.
        unsafe { lanes.store(E::load(lanes, row.as_ptr(), index), to) };
    }
    if whole < out.len() {
        let rest = &mut out[whole..];
        let value = padded::<L, E>(lanes, row.as_ptr(), whole, rest.len());
        store_first(lanes, value, rest);
    }
}

/// [`widen`] for a type known at run time.
pub(crate) fn widen_row(path: Path, dtype: Dtype, row: &[u8], out: &mut [f32]) {
    path.run(dtype, Widen { row, out });
}

struct Widen<'a> {
    row: &'a [u8],
    out: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes, E: Element>(self, lanes: L) {
        widen::<L, E>(lanes, self.row, self.out);
    }
}

/// The `count` values from `index` on, then zeros, which change no sum.
#[inline(always)]
fn padded<L: Lanes, E: Element>(lanes: L, row: *const u8, index: usize, count: usize) -> L::Vector {
    debug_assert!(count <= L::WIDTH);
    let mut bytes = [0_u8; 4 * WIDTH_MAX];
    // SAFETY: the callers' rows hold `count` values from `index` on, and `bytes` has room for a whole vector.
    unsafe { row.add(index * E::BYTES).copy_to_nonoverlapping(bytes.as_mut_ptr(), count * E::BYTES) };
    // SAFETY: `bytes` holds WIDTH_MAX values of any stored type.
    unsafe { E::load(lanes, bytes.as_ptr(), 0) }
}

#[inline(always)]
fn store_first<L: Lanes>(lanes: L, values: L::Vector, out: &mut [f32]) {
    let mut all = [0.0; WIDTH_MAX];
    // SAFETY: `all` has room for the widest vector.
    unsafe { lanes.store(values, all.as_mut_ptr()) };
    out.copy_from_slice(&all[..out.len()]);
}

/// The bytes of f32 values, as a row of [`F32`].
pub(crate) fn bytes_of(values: &[f32]) -> &[u8] {
    // SAFETY: an f32 has no padding, and any bytes are a `[u8]`.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend_tests::{stored, values};
    use half::{bf16, f16};

    const DTYPES: [Dtype; 3] = [Dtype::F16, Dtype::Bf16, Dtype::F32];

    struct Dots<'a, const R: usize>([&'a [u8]; R], &'a [f32]);
    impl<const R: usize> Kernel for Dots<'_, R> {
        type Output = [f32; R];
        #[inline(always)]
        fn run<L: Lanes, E: Element>(self, lanes: L) -> [f32; R] {
            dots::<L, E, R>(lanes, self.0, self.1)
        }
    }

    struct AddScaled<'a, const R: usize>([f32; R], [&'a [u8]; R], &'a mut [f32]);
    impl<const R: usize> Kernel for AddScaled<'_, R> {
        type Output = ();
        #[inline(always)]
        fn run<L: Lanes, E: Element>(self, lanes: L) {
            add_scaled::<L, E, R>(lanes, self.0, self.1, self.2);
        }
    }

    #[track_caller]
    fn check_dots(path: Path, dtype: Dtype, count: usize) {
        let x = values(count, 1);
        let rows: Vec<_> = (2..6).map(|seed| stored(dtype, &values(count, seed))).collect();
        let together = path.run(dtype, Dots::<4>(std::array::from_fn(|row| &rows[row].0[..]), &x));
        for ((bytes, wide), found) in rows.iter().zip(together) {
            let [alone] = path.run(dtype, Dots::<1>([bytes], &x));
            assert_eq!(alone.to_bits(), found.to_bits(), "{path:?} {dtype:?} {count}: company changes a result");
            let expected: f64 = wide.iter().zip(&x).map(|(a, &b)| a * f64::from(b)).sum();
            // Each of `count` additions rounds a sum whose terms are below 1.
            let tolerance = f64::from(f32::EPSILON) * (count as f64 + 1.0);
            assert!(
                (f64::from(found) - expected).abs() <= tolerance,
                "{path:?} {dtype:?} {count}: {found}, {expected}"
            );
        }
    }

    #[track_caller]
    fn check_add_scaled(path: Path, dtype: Dtype, count: usize) {
        let y = values(count, 1);
        let factors = [0.5, -0.75, 0.1];
        let rows: Vec<_> = (2..5).map(|seed| stored(dtype, &values(count, seed))).collect();
        let mut together = y.clone();
        path.run(dtype, AddScaled::<3>(factors, std::array::from_fn(|row| &rows[row].0[..]), &mut together));
        let mut alone = y.clone();
        for ((bytes, _), factor) in rows.iter().zip(factors) {
            path.run(dtype, AddScaled::<1>([factor], [bytes], &mut alone));
        }
        assert_eq!(alone, together, "{path:?} {dtype:?} {count}: company changes a result");
        for index in 0..count {
            let terms = rows.iter().zip(factors).map(|((_, wide), factor)| wide[index] * f64::from(factor));
            let expected = f64::from(y[index]) + terms.sum::<f64>();
            // Six roundings of values below 2.4.
            let tolerance = 15.0 * f64::from(f32::EPSILON);
            assert!((f64::from(together[index]) - expected).abs() <= tolerance, "{path:?} {dtype:?} {count} {index}");
        }
    }

    #[test]
    fn every_path_agrees_with_the_plain_sum() {
        for path in Path::all() {
            for dtype in DTYPES {
                for count in [0, 1, 7, 8, 16, 31, 32, 33, 72, 100, 576, 4096] {
                    check_dots(path, dtype, count);
                    check_add_scaled(path, dtype, count);
                }
            }
        }
    }

    #[test]
    fn every_16_bit_value_widens_exactly() {
        let bits = 0..=u16::MAX;
        let bytes: Vec<u8> = bits.clone().flat_map(u16::to_le_bytes).collect();
        let mut found = vec![0.0; 1 << 16];
        for path in Path::all() {
            for (dtype, widened) in [
                (Dtype::F16, (|bits| f16::from_bits(bits).to_f32()) as fn(u16) -> f32),
                (Dtype::Bf16, |bits| bf16::from_bits(bits).to_f32()),
            ] {
                widen_row(path, dtype, &bytes, &mut found);
                for (bits, &found) in bits.clone().zip(&found) {
                    let expected = widened(bits);
                    let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
                    assert!(same, "{path:?} {dtype:?} {bits:#06x}: {found}, expected {expected}");
                }
            }
        }
    }
}
