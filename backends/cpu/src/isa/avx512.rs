//! AVX-512 (F, BW, VL): 16 lanes, 32 registers; and the same with the dot products of bf16 pairs (AVX512_BF16) and of bytes
//! (AVX512_VNNI): every CPU that has the first has the second.
//!
//! Intel's VDPBF16PS starts every second cycle (measured on Emerald Rapids) where FMA starts twice a cycle: with many
//! activation rows its tiles reach 95 % of the instruction's peak, and are then as fast as those of widened f32.

#![allow(unsafe_code)] // Intrinsics; see `Lanes` for what each function asks of its caller.

use super::{
    Block, DeltaRow, Kernels, NibbleKernels, kernels, nibble_kernels,
    nibbles::{self, Bytes, Nibbles, dot_nibbles},
    scalar,
    scaled::{Code, Decode, Fp8, Mxfp4, Nvfp4, Scaled, dot_scaled},
    tile::{Fma, Lanes, Load, Step, dot_row, dot_rows, xor_lanes},
};
use half::{bf16, f16};
use std::arch::x86_64::*;

pub(super) fn detected() -> bool {
    super::avx2::detected()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
}

pub(super) fn detected_bf16() -> bool {
    detected() && is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vnni")
}

kernels!("AVX-512", "avx2,fma,f16c,avx512f,avx512bw,avx512vl", __m512, Some(&NIBBLES));
nibble_kernels!(NIBBLES, bytes, "avx2,fma,f16c,avx512f,avx512bw,avx512vl", Wide<false>);
nibble_kernels!(NIBBLES_VNNI, vnni, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni", Wide<true>);

pub(super) const KERNELS_BF16: Kernels = Kernels {
    name: "AVX-512 BF16",
    multiplies_bf16: true,
    dot_bf16_bf16: dot_pairs,
    nibbles: Some(&NIBBLES_VNNI),
    ..KERNELS
};

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512bf16")]
fn dot_pairs(w: &[bf16], rows: usize, x: &[bf16], n: usize, cols: usize, tile: &mut [f32]) {
    // SAFETY: this function has the features, and so has the CPU that runs it.
    unsafe { dot_rows::<Pairs>(w, rows, x, n, cols, tile) }
}

/// The step that multiplies 16 pairs of bf16 and adds both products of a pair to one lane.
struct Pairs;

impl Step for Pairs {
    type Weight = bf16;
    type Input = bf16;
    type Operand = __m512bh;
    type Sums = __m512;
    const LEN: usize = 32;

    #[inline(always)]
    unsafe fn weights(pointer: *const bf16) -> __m512bh {
        // SAFETY: the caller promises AVX-512 and 32 elements; the two register types have the same bits.
        unsafe { std::mem::transmute(_mm512_loadu_si512(pointer.cast())) }
    }

    #[inline(always)]
    unsafe fn inputs(pointer: *const bf16) -> __m512bh {
        // SAFETY: the caller's promise is the same.
        unsafe { Self::weights(pointer) }
    }

    #[inline(always)]
    unsafe fn add(sums: __m512, weights: __m512bh, inputs: __m512bh) -> __m512 {
        // SAFETY: the caller promises AVX512_BF16.
        unsafe { _mm512_dpbf16_ps(sums, weights, inputs) }
    }
}

impl Lanes for __m512 {
    const LEN: usize = 16;
    const ROWS: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller promises AVX-512.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        // SAFETY: the caller promises AVX-512.
        unsafe { _mm512_fmadd_ps(a, b, self) }
    }

    #[inline(always)]
    unsafe fn total(self) -> f32 {
        // SAFETY: the caller promises AVX-512.
        unsafe { _mm512_reduce_add_ps(self) }
    }

    #[inline(always)]
    unsafe fn xor(self, other: Self) -> Self {
        // SAFETY: the caller promises AVX-512.
        unsafe {
            _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(self), _mm512_castps_si512(other)))
        }
    }

    #[inline(always)]
    fn prefetch(pointer: *const u8) {
        <__m256 as Lanes>::prefetch(pointer);
    }
}

impl Load<f32> for __m512 {
    #[inline(always)]
    unsafe fn load(pointer: *const f32) -> Self {
        // SAFETY: the caller promises AVX-512 and 16 elements.
        unsafe { _mm512_loadu_ps(pointer) }
    }
}

impl Load<bf16> for __m512 {
    #[inline(always)]
    unsafe fn load(pointer: *const bf16) -> Self {
        // SAFETY: the caller promises AVX-512 and 16 elements.
        unsafe {
            let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(pointer.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
        }
    }
}

impl Load<f16> for __m512 {
    #[inline(always)]
    unsafe fn load(pointer: *const f16) -> Self {
        // SAFETY: the caller promises AVX-512 and 16 elements.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(pointer.cast())) }
    }
}

impl Decode for __m512 {
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller promises AVX-512.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: the caller promises AVX-512.
        unsafe { _mm512_mul_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn values(pointer: *const f32) -> Self {
        // SAFETY: the caller promises AVX-512 and 16 elements.
        unsafe { _mm512_loadu_ps(pointer) }
    }

    /// Lane i takes the i-th of sixteen codes to its lowest bits, of which the permutation reads four.
    #[inline(always)]
    unsafe fn e2m1(pointer: *const u8) -> Self {
        // SAFETY: the caller promises AVX-512 and 16 codes, which are 8 bytes.
        unsafe {
            let bytes = _mm512_castsi128_si512(_mm_loadl_epi64(pointer.cast()));
            let halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
            let shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
            let codes = _mm512_srlv_epi32(_mm512_permutexvar_epi32(halves, bytes), shifts);
            let values = _mm512_setr_ps(
                0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
            );
            _mm512_permutexvar_ps(codes, values)
        }
    }

    #[inline(always)]
    unsafe fn e4m3(pointer: *const u8) -> Self {
        // SAFETY: the caller promises AVX-512 and 16 codes.
        unsafe {
            let wide = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(pointer.cast())));
            let halves = _mm256_andnot_si256(_mm256_set1_epi16(1 << 14), wide);
            _mm512_cvtph_ps(halves)
        }
    }
}

/// 64 bytes; with or without the instruction that multiplies and adds them at once (AVX512_VNNI).
#[derive(Clone, Copy)]
struct Wide<const VNNI: bool>(__m512i);

impl<const VNNI: bool> Bytes for Wide<VNNI> {
    type Floats = __m512;
    const LEN: usize = 64;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller promises AVX-512.
        unsafe { Self(_mm512_setzero_si512()) }
    }

    #[inline(always)]
    unsafe fn load(pointer: *const u8) -> Self {
        // SAFETY: the caller promises AVX-512 and 64 bytes.
        unsafe { Self(_mm512_loadu_si512(pointer.cast())) }
    }

    #[inline(always)]
    unsafe fn codes(self) -> (Self, Self) {
        // SAFETY: the caller promises AVX-512.
        unsafe {
            let values = _mm512_broadcast_i32x4(_mm_setr_epi8(
                12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
            ));
            let mask = _mm512_set1_epi8(15);
            let even = _mm512_and_si512(self.0, mask);
            let odd = _mm512_and_si512(_mm512_srli_epi16::<4>(self.0), mask);
            (Self(_mm512_shuffle_epi8(values, even)), Self(_mm512_shuffle_epi8(values, odd)))
        }
    }

    #[inline(always)]
    unsafe fn dot(self, x: Self, sums: Self) -> Self {
        // SAFETY: the caller promises AVX-512, and its VNNI where it asks for that.
        unsafe {
            if VNNI {
                return Self(_mm512_dpbusd_epi32(sums.0, self.0, x.0));
            }
            let pairs = _mm512_maddubs_epi16(self.0, x.0);
            Self(_mm512_add_epi32(sums.0, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1))))
        }
    }

    #[inline(always)]
    unsafe fn joined(high: Self, low: Self) -> __m512 {
        // SAFETY: the caller promises AVX-512.
        unsafe { _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<7>(high.0), low.0)) }
    }

    /// An e4m3 in the bits of an f16 is its value times 2^-8; it is not negative.
    #[inline(always)]
    unsafe fn e4m3_scales(pointer: *const u8) -> __m512 {
        // SAFETY: the caller promises AVX-512 and 8 bytes.
        unsafe {
            let all = _mm256_set1_epi64x(pointer.cast::<i64>().read_unaligned());
            let twice = _mm256_setr_epi8(
                0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1, 4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6,
                -1, 7, -1, 7, -1,
            );
            _mm512_cvtph_ps(_mm256_slli_epi16::<7>(_mm256_shuffle_epi8(all, twice)))
        }
    }

    #[inline(always)]
    unsafe fn e8m0_scales(pointer: *const u8) -> __m512 {
        // SAFETY: the caller promises AVX-512 and 4 bytes.
        unsafe {
            let all = _mm512_set1_epi32(pointer.cast::<i32>().read_unaligned());
            let lane = |byte: i32| i32::from_le_bytes([0x80, 0x80, 0x80, byte as u8]);
            let [a, b, c, d] = [0, 1, 2, 3].map(lane);
            let places = _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d);
            _mm512_castsi512_ps(_mm512_srli_epi32::<1>(_mm512_shuffle_epi8(all, places)))
        }
    }
}
