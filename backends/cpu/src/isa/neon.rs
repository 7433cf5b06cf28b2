//! NEON: two registers of 4 lanes each, so that a multiply need not wait for the one before. Tested under emulation,
//! not yet measured on a CPU.

#![allow(unsafe_code)] // Intrinsics; see `Lanes` for what each function asks of its caller.

use super::{
    DeltaRow, Kernels, kernels, scalar,
    scaled::{Code, Decode, Fp8, Mxfp4, Nvfp4, Scaled, dot_scaled},
    tile::{Fma, Lanes, Load, dot_row, dot_rows, xor_lanes},
};
use half::{bf16, f16};
use std::arch::aarch64::*;

kernels!("NEON", "neon", Pair, None);

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

impl Decode for Pair {
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller promises NEON.
        unsafe { Self(vdupq_n_f32(value), vdupq_n_f32(value)) }
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: the caller promises NEON.
        unsafe { Self(vmulq_f32(self.0, other.0), vmulq_f32(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn values(pointer: *const f32) -> Self {
        // SAFETY: the caller promises NEON and 8 elements.
        unsafe { <Self as Load<f32>>::load(pointer) }
    }

    /// A table of halves: twice the value of a code is a whole number.
    #[inline(always)]
    unsafe fn e2m1(pointer: *const u8) -> Self {
        const TWICE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
        // SAFETY: the caller promises NEON and 8 codes, which are 4 bytes; the table is a register long.
        unsafe {
            let bytes = vreinterpret_u8_u32(vdup_n_u32(pointer.cast::<u32>().read_unaligned()));
            let codes = vzip1_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8::<4>(bytes));
            let twice = vmovl_s8(vqtbl1_s8(vld1q_s8(TWICE.as_ptr()), codes));
            let (low, high) = (vmovl_s16(vget_low_s16(twice)), vmovl_high_s16(twice));
            Self(vcvtq_n_f32_s32::<1>(low), vcvtq_n_f32_s32::<1>(high))
        }
    }

    #[inline(always)]
    unsafe fn e4m3(pointer: *const u8) -> Self {
        // SAFETY: the caller promises NEON and 8 codes.
        unsafe {
            let wide = vshlq_n_s16::<7>(vmovl_s8(vld1_s8(pointer.cast())));
            let halves = vreinterpretq_f16_u16(vbicq_u16(vreinterpretq_u16_s16(wide), vdupq_n_u16(1 << 14)));
            Self(vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves))
        }
    }
}
