//! The vector instructions of this machine, chosen once at run time.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64 as arm;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64 as x86;

use np_formats::Dtype;

/// The widest vectors, in f32 values.
pub(crate) const WIDTH_MAX: usize = 16;

/// Which instructions to use. A value exists only for what [`Path::all`] has detected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Path(Instructions);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Instructions {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Plain,
}

/// A computation that is compiled once for each set of instructions and stored type. `run` must be `#[inline(always)]`, so that it
/// becomes part of a function compiled for them.
pub(crate) trait Kernel {
    type Output;
    fn run<L: Lanes, E: Element>(self, lanes: L) -> Self::Output;
}

/// A vector of f32 values and what is done with it. A value of such a type proves that the instructions are there.
///
/// # Safety
/// The pointers of the `unsafe` methods are valid for [`Lanes::WIDTH`] values; they need no alignment.
pub(crate) trait Lanes: Copy {
    const WIDTH: usize;
    type Vector: Copy;

    fn splat(self, value: f32) -> Self::Vector;
    unsafe fn load(self, from: *const f32) -> Self::Vector;
    unsafe fn load_f16(self, from: *const u16) -> Self::Vector;
    unsafe fn load_bf16(self, from: *const u16) -> Self::Vector;
    unsafe fn store(self, values: Self::Vector, to: *mut f32);
    /// a * b + sum
    fn multiply_add(self, a: Self::Vector, b: Self::Vector, sum: Self::Vector) -> Self::Vector;
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn sum(self, values: Self::Vector) -> f32;
}

impl Path {
    /// The best instructions here.
    pub(crate) fn best() -> Self {
        Self::all()[0]
    }

    /// All instructions that work here, best first; the plain loop is the last.
    pub(crate) fn all() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            if avx2 && is_x86_feature_detected!("avx512f") {
                all.push(Self(Instructions::Avx512));
            }
            if avx2 {
                all.push(Self(Instructions::Avx2));
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            all.push(Self(Instructions::Neon));
        }
        all.push(Self(Instructions::Plain));
        all
    }

    /// Runs `kernel` with these instructions on values stored as `dtype`.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, dtype: Dtype, kernel: K) -> K::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `all` detected these instructions.
            Instructions::Avx512 => unsafe { run_avx512(dtype, kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `all` detected these instructions.
            Instructions::Avx2 => unsafe { run_avx2(dtype, kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: `all` detected these instructions.
            Instructions::Neon => unsafe { run_neon(dtype, kernel) },
            Instructions::Plain => run_stored(Plain(()), dtype, kernel),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn run_avx512<K: Kernel>(dtype: Dtype, kernel: K) -> K::Output {
    run_stored(Avx512(()), dtype, kernel)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(dtype: Dtype, kernel: K) -> K::Output {
    run_stored(Avx2(()), dtype, kernel)
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn run_neon<K: Kernel>(dtype: Dtype, kernel: K) -> K::Output {
    run_stored(Neon(()), dtype, kernel)
}

#[inline(always)]
fn run_stored<L: Lanes, K: Kernel>(lanes: L, dtype: Dtype, kernel: K) -> K::Output {
    match dtype {
        Dtype::F16 => kernel.run::<L, F16>(lanes),
        Dtype::Bf16 => kernel.run::<L, Bf16>(lanes),
        Dtype::F32 => kernel.run::<L, F32>(lanes),
    }
}

/// A stored type.
pub(crate) trait Element {
    const BYTES: usize;
    /// # Safety
    /// `row` is valid for `L::WIDTH` values from value `index` on.
    unsafe fn load<L: Lanes>(lanes: L, row: *const u8, index: usize) -> L::Vector;
}

/// [`Dtype::F16`].
pub(crate) struct F16;
/// [`Dtype::Bf16`].
pub(crate) struct Bf16;
/// [`Dtype::F32`].
pub(crate) struct F32;

impl Element for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(lanes: L, row: *const u8, index: usize) -> L::Vector {
        // SAFETY: the caller vouches for the range.
        unsafe { lanes.load_f16(row.add(2 * index).cast()) }
    }
}

impl Element for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(lanes: L, row: *const u8, index: usize) -> L::Vector {
        // SAFETY: the caller vouches for the range.
        unsafe { lanes.load_bf16(row.add(2 * index).cast()) }
    }
}

impl Element for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<L: Lanes>(lanes: L, row: *const u8, index: usize) -> L::Vector {
        // SAFETY: the caller vouches for the range.
        unsafe { lanes.load(row.add(4 * index).cast()) }
    }
}

/// 16 values: AVX-512F.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

// In all of these impls the value `self` proves that the instructions are there (`Path::run` alone makes one), and the
// callers of loads and stores vouch for the pointers.
#[cfg(target_arch = "x86_64")]
impl Lanes for Avx512 {
    const WIDTH: usize = 16;
    type Vector = x86::__m512;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Vector {
        // SAFETY: `self` proves the instructions.
        unsafe { x86::_mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::Vector {
        // SAFETY: `self` proves the instructions, the caller the pointer.
        unsafe { x86::_mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Self::Vector {
        // SAFETY: `self` proves the instructions, the caller the pointer.
        unsafe { x86::_mm512_cvtph_ps(x86::_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Self::Vector {
        // SAFETY: `self` proves the instructions, the caller the pointer.
        unsafe {
            let wide = x86::_mm512_cvtepu16_epi32(x86::_mm256_loadu_si256(from.cast()));
            x86::_mm512_castsi512_ps(x86::_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store(self, values: Self::Vector, to: *mut f32) {
        // SAFETY: `self` proves the instructions, the caller the pointer.
        unsafe { x86::_mm512_storeu_ps(to, values) }
    }
    #[inline(always)]
    fn multiply_add(self, a: Self::Vector, b: Self::Vector, sum: Self::Vector) -> Self::Vector {
        // SAFETY: `self` proves the instructions.
        unsafe { x86::_mm512_fmadd_ps(a, b, sum) }
    }
    #[inline(always)]
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        // SAFETY: `self` proves the instructions.
        unsafe { x86::_mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sum(self, values: Self::Vector) -> f32 {
        // SAFETY: `self` proves the instructions.
        unsafe { x86::_mm512_reduce_add_ps(values) }
    }
}

/// 8 values: AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

#[cfg(target_arch = "x86_64")]
impl Lanes for Avx2 {
    const WIDTH: usize = 8;
    type Vector = x86::__m256;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Vector {
        // SAFETY: `self` proves the instructions.
        unsafe { x86::_mm256_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::Vector {
        // SAFETY: `self` proves the instructions, the caller the pointer.
        unsafe { x86::_mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Self::Vector {
        // SAFETY: `self` proves the instructions, the caller the pointer.
        unsafe { x86::_mm256_cvtph_ps(x86::_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Self::Vector {
        // SAFETY: `self` proves the instructions, the caller the pointer.
        unsafe {
            let wide = x86::_mm256_cvtepu16_epi32(x86::_mm_loadu_si128(from.cast()));
            x86::_mm256_castsi256_ps(x86::_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store(self, values: Self::Vector, to: *mut f32) {
        // SAFETY: `self` proves the instructions, the caller the pointer.
        unsafe { x86::_mm256_storeu_ps(to, values) }
    }
    #[inline(always)]
    fn multiply_add(self, a: Self::Vector, b: Self::Vector, sum: Self::Vector) -> Self::Vector {
        // SAFETY: `self` proves the instructions.
        unsafe { x86::_mm256_fmadd_ps(a, b, sum) }
    }
    #[inline(always)]
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        // SAFETY: `self` proves the instructions.
        unsafe { x86::_mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sum(self, values: Self::Vector) -> f32 {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let four = x86::_mm_add_ps(x86::_mm256_castps256_ps128(values), x86::_mm256_extractf128_ps::<1>(values));
            let two = x86::_mm_add_ps(four, x86::_mm_movehl_ps(four, four));
            x86::_mm_cvtss_f32(x86::_mm_add_ss(two, x86::_mm_movehdup_ps(two)))
        }
    }
}

/// 4 values: NEON. Halves are widened with integer instructions, which every such machine has.
#[cfg(target_arch = "aarch64")]
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

#[cfg(target_arch = "aarch64")]
impl Lanes for Neon {
    const WIDTH: usize = 4;
    type Vector = arm::float32x4_t;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Vector {
        // SAFETY: `self` proves the instructions.
        unsafe { arm::vdupq_n_f32(value) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::Vector {
        // SAFETY: `self` proves the instructions, the caller the pointer.
        unsafe { arm::vld1q_f32(from) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Self::Vector {
        // SAFETY: `self` proves the instructions, the caller the pointer.
        unsafe {
            let wide = arm::vmovl_u16(arm::vld1_u16(from));
            let sign = arm::vshlq_n_u32::<16>(arm::vandq_u32(wide, arm::vdupq_n_u32(0x8000)));
            let magnitude = arm::vshlq_n_u32::<13>(arm::vandq_u32(wide, arm::vdupq_n_u32(0x7fff)));
            // The exponent's bias grows by 112; the multiplication also makes subnormal halves normal.
            let scale = arm::vdupq_n_f32(f32::from_bits((127 + 112) << 23));
            let scaled = arm::vreinterpretq_u32_f32(arm::vmulq_f32(arm::vreinterpretq_f32_u32(magnitude), scale));
            let infinite = arm::vcgeq_u32(magnitude, arm::vdupq_n_u32(0x0f80_0000));
            let exponent = arm::vandq_u32(infinite, arm::vdupq_n_u32(0x7f80_0000));
            arm::vreinterpretq_f32_u32(arm::vorrq_u32(arm::vorrq_u32(scaled, exponent), sign))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Self::Vector {
        // SAFETY: `self` proves the instructions, the caller the pointer.
        unsafe { arm::vreinterpretq_f32_u32(arm::vshll_n_u16::<16>(arm::vld1_u16(from))) }
    }
    #[inline(always)]
    unsafe fn store(self, values: Self::Vector, to: *mut f32) {
        // SAFETY: `self` proves the instructions, the caller the pointer.
        unsafe { arm::vst1q_f32(to, values) }
    }
    #[inline(always)]
    fn multiply_add(self, a: Self::Vector, b: Self::Vector, sum: Self::Vector) -> Self::Vector {
        // SAFETY: `self` proves the instructions.
        unsafe { arm::vfmaq_f32(sum, a, b) }
    }
    #[inline(always)]
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        // SAFETY: `self` proves the instructions.
        unsafe { arm::vaddq_f32(a, b) }
    }
    #[inline(always)]
    fn sum(self, values: Self::Vector) -> f32 {
        // SAFETY: `self` proves the instructions.
        unsafe { arm::vaddvq_f32(values) }
    }
}

/// The plain loop: what every machine can do, and what the others are compared with.
#[derive(Clone, Copy)]
pub(crate) struct Plain(());

impl Lanes for Plain {
    const WIDTH: usize = 8;
    type Vector = [f32; 8];

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Vector {
        [value; 8]
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::Vector {
        // SAFETY: the caller vouches for the pointer.
        unsafe { from.cast::<[f32; 8]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Self::Vector {
        // SAFETY: the caller vouches for the pointer.
        unsafe { from.cast::<[u16; 8]>().read_unaligned() }.map(|bits| half::f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Self::Vector {
        // SAFETY: the caller vouches for the pointer.
        unsafe { from.cast::<[u16; 8]>().read_unaligned() }.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
    #[inline(always)]
    unsafe fn store(self, values: Self::Vector, to: *mut f32) {
        // SAFETY: the caller vouches for the pointer.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(values) }
    }
    #[inline(always)]
    fn multiply_add(self, a: Self::Vector, b: Self::Vector, sum: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| a[lane] * b[lane] + sum[lane])
    }
    #[inline(always)]
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| a[lane] + b[lane])
    }
    #[inline(always)]
    fn sum(self, values: Self::Vector) -> f32 {
        values.iter().sum()
    }
}
