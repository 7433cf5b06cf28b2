//! AVX-512 (F, BW, VL): 16 lanes, 32 registers; and the same with the dot product of bf16 pairs (AVX512_BF16).
//!
//! Intel's VDPBF16PS starts every second cycle (measured on Emerald Rapids) where FMA starts twice a cycle: with many
//! activation rows its tiles reach 95 % of the instruction's peak, and are then as fast as those of widened f32.

#![allow(unsafe_code)] // Intrinsics; see `Lanes` for what each function asks of its caller.

use super::{
    Kernels, kernels, scalar,
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
    detected() && is_x86_feature_detected!("avx512bf16")
}

kernels!("AVX-512", "avx2,fma,f16c,avx512f,avx512bw,avx512vl", __m512);

pub(super) const KERNELS_BF16: Kernels =
    Kernels { name: "AVX-512 BF16", multiplies_bf16: true, dot_bf16_bf16: dot_pairs, ..KERNELS };

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
