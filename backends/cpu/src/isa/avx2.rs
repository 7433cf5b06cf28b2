//! AVX2 with FMA and F16C: 8 lanes, 16 registers.

#![allow(unsafe_code)] // Intrinsics; see `Lanes` for what each function asks of its caller.

use super::{
    Kernels, kernels, scalar,
    tile::{Fma, Lanes, Load, dot_row, dot_rows, xor_lanes},
};
use half::{bf16, f16};
use std::arch::x86_64::*;

pub(super) fn detected() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

kernels!("AVX2", "avx2,fma,f16c", __m256);

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
