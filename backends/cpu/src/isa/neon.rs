//! NEON: two registers of 4 lanes each, so that a multiply need not wait for the one before. Tested under emulation,
//! not yet measured on a CPU.

#![allow(unsafe_code)] // Intrinsics; see `Lanes` for what each function asks of its caller.

use super::{
    Kernels, kernels, scalar,
    tile::{Fma, Lanes, Load, dot_row, dot_rows, xor_lanes},
};
use half::{bf16, f16};
use std::arch::aarch64::*;

kernels!("NEON", "neon", Pair);

#[derive(Clone, Copy)]
struct Pair(float32x4_t, float32x4_t);

impl Lanes for Pair {
    const LEN: usize = 8;
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller promises NEON.
        unsafe { Self(vdupq_n_f32(0.0), vdupq_n_f32(0.0)) }
    }

    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        // SAFETY: the caller promises NEON.
        unsafe { Self(vfmaq_f32(self.0, a.0, b.0), vfmaq_f32(self.1, a.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn total(self) -> f32 {
        // SAFETY: the caller promises NEON.
        unsafe { vaddvq_f32(vaddq_f32(self.0, self.1)) }
    }

    #[inline(always)]
    unsafe fn xor(self, other: Self) -> Self {
        // SAFETY: the caller promises NEON.
        unsafe {
            let [a, b, c, d] = [self.0, other.0, self.1, other.1].map(|half| vreinterpretq_u32_f32(half));
            Self(vreinterpretq_f32_u32(veorq_u32(a, b)), vreinterpretq_f32_u32(veorq_u32(c, d)))
        }
    }
}

impl Load<f32> for Pair {
    #[inline(always)]
    unsafe fn load(pointer: *const f32) -> Self {
        // SAFETY: the caller promises NEON and 8 elements.
        unsafe { Self(vld1q_f32(pointer), vld1q_f32(pointer.add(4))) }
    }
}

impl Load<bf16> for Pair {
    #[inline(always)]
    unsafe fn load(pointer: *const bf16) -> Self {
        // SAFETY: the caller promises NEON and 8 elements.
        unsafe {
            let bits = vld1q_u16(pointer.cast());
            let (low, high) = (vshll_n_u16::<16>(vget_low_u16(bits)), vshll_high_n_u16::<16>(bits));
            Self(vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(high))
        }
    }
}

impl Load<f16> for Pair {
    #[inline(always)]
    unsafe fn load(pointer: *const f16) -> Self {
        // SAFETY: the caller promises NEON and 8 elements.
        unsafe {
            let bits = vreinterpretq_f16_u16(vld1q_u16(pointer.cast()));
            Self(vcvt_f32_f16(vget_low_f16(bits)), vcvt_high_f32_f16(bits))
        }
    }
}
