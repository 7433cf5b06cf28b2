//! AVX2 with FMA and F16C: 8 lanes, 16 registers.

#![allow(unsafe_code)] // Intrinsics; see `Lanes` for what each function asks of its caller.

use super::{
    Block, DeltaRow, Kernels, NibbleKernels, kernels, nibble_kernels,
    nibbles::{self, Bytes, Nibbles, dot_nibbles},
    scalar,
    scaled::{Code, Decode, Fp8, Mxfp4, Nvfp4, Scaled, dot_scaled},
    tile::{Fma, Lanes, Load, dot_row, dot_rows, xor_lanes},
};
use half::{bf16, f16};
use std::arch::x86_64::*;

pub(super) fn detected() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

kernels!("AVX2", "avx2,fma,f16c", __m256, Some(&NIBBLES));
nibble_kernels!(NIBBLES, bytes, "avx2,fma,f16c", Bytes32);

impl Lanes for __m256 {
    const LEN: usize = 8;
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller promises AVX2.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        // SAFETY: the caller promises FMA.
        unsafe { _mm256_fmadd_ps(a, b, self) }
    }

    #[inline(always)]
    unsafe fn total(self) -> f32 {
        // SAFETY: the caller promises AVX2.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(self), _mm256_extractf128_ps::<1>(self));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    unsafe fn xor(self, other: Self) -> Self {
        // SAFETY: the caller promises AVX2.
        unsafe { _mm256_xor_ps(self, other) }
    }

    #[inline(always)]
    fn prefetch(pointer: *const u8) {
        // SAFETY: a prefetch reads nothing that the program can see and does not fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(pointer.cast()) }
    }
}

impl Load<f32> for __m256 {
    #[inline(always)]
    unsafe fn load(pointer: *const f32) -> Self {
        // SAFETY: the caller promises AVX2 and 8 elements.
        unsafe { _mm256_loadu_ps(pointer) }
    }
}

impl Load<bf16> for __m256 {
    #[inline(always)]
    unsafe fn load(pointer: *const bf16) -> Self {
        // SAFETY: the caller promises AVX2 and 8 elements.
        unsafe {
            let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(pointer.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
        }
    }
}

impl Load<f16> for __m256 {
    #[inline(always)]
    unsafe fn load(pointer: *const f16) -> Self {
        // SAFETY: the caller promises F16C and 8 elements.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(pointer.cast())) }
    }
}

impl Decode for __m256 {
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller promises AVX2.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: the caller promises AVX2.
        unsafe { _mm256_mul_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn values(pointer: *const f32) -> Self {
        // SAFETY: the caller promises AVX2 and 8 elements.
        unsafe { _mm256_loadu_ps(pointer) }
    }

    /// Lane i takes the i-th of eight codes to its lowest bits, of which the permutation reads three; the fourth is the sign.
    #[inline(always)]
    unsafe fn e2m1(pointer: *const u8) -> Self {
        // SAFETY: the caller promises AVX2 and 8 codes, which are 4 bytes.
        unsafe {
            let all = _mm256_set1_epi32(pointer.cast::<i32>().read_unaligned());
            let codes = _mm256_srlv_epi32(all, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
            let magnitudes = _mm256_setr_ps(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0);
            let signs = _mm256_and_si256(_mm256_slli_epi32::<28>(codes), _mm256_set1_epi32(i32::MIN));
            _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, codes), _mm256_castsi256_ps(signs))
        }
    }

    #[inline(always)]
    unsafe fn e4m3(pointer: *const u8) -> Self {
        // SAFETY: the caller promises F16C and 8 codes.
        unsafe {
            let wide = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(pointer.cast())));
            let halves = _mm_andnot_si128(_mm_set1_epi16(1 << 14), wide);
            _mm256_cvtph_ps(halves)
        }
    }
}

/// 32 bytes.
#[derive(Clone, Copy)]
struct Bytes32(__m256i);

impl Bytes for Bytes32 {
    type Floats = __m256;
    const LEN: usize = 32;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller promises AVX2.
        unsafe { Self(_mm256_setzero_si256()) }
    }

    #[inline(always)]
    unsafe fn load(pointer: *const u8) -> Self {
        // SAFETY: the caller promises AVX2 and 32 bytes.
        unsafe { Self(_mm256_loadu_si256(pointer.cast())) }
    }

    #[inline(always)]
    unsafe fn codes(self) -> (Self, Self) {
        // SAFETY: the caller promises AVX2.
        unsafe {
            let values = _mm256_broadcastsi128_si256(_mm_setr_epi8(
                12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
            ));
            let mask = _mm256_set1_epi8(15);
            let even = _mm256_and_si256(self.0, mask);
            let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(self.0), mask);
            (Self(_mm256_shuffle_epi8(values, even)), Self(_mm256_shuffle_epi8(values, odd)))
        }
    }

    /// Two products of at most 24 * 64 fit 16 bits.
    #[inline(always)]
    unsafe fn dot(self, x: Self, sums: Self) -> Self {
        // SAFETY: the caller promises AVX2.
        unsafe {
            let pairs = _mm256_maddubs_epi16(self.0, x.0);
            Self(_mm256_add_epi32(sums.0, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))))
        }
    }

    #[inline(always)]
    unsafe fn joined(high: Self, low: Self) -> __m256 {
        // SAFETY: the caller promises AVX2.
        unsafe { _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32::<7>(high.0), low.0)) }
    }

    /// An e4m3 in the bits of an f16 is its value times 2^-8; it is not negative.
    #[inline(always)]
    unsafe fn e4m3_scales(pointer: *const u8) -> __m256 {
        // SAFETY: the caller promises F16C and 4 bytes.
        unsafe {
            let all = _mm_set1_epi32(pointer.cast::<i32>().read_unaligned());
            let twice = _mm_setr_epi8(0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1);
            _mm256_cvtph_ps(_mm_slli_epi16::<7>(_mm_shuffle_epi8(all, twice)))
        }
    }

    #[inline(always)]
    unsafe fn e8m0_scales(pointer: *const u8) -> __m256 {
        // SAFETY: the caller promises AVX2 and 2 bytes.
        unsafe {
            let all = _mm256_set1_epi16(pointer.cast::<i16>().read_unaligned());
            let [a, b] = [0, 1].map(|byte| i32::from_le_bytes([0x80, 0x80, 0x80, byte]));
            let places = _mm256_setr_epi32(a, a, a, a, b, b, b, b);
            _mm256_castsi256_ps(_mm256_srli_epi32::<1>(_mm256_shuffle_epi8(all, places)))
        }
    }
}
