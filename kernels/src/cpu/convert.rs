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
