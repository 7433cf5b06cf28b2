//! Weights of every format, made up: codes, scales and globals whose product stays below a bound; and the elements that they
//! stand for, one by one in f64.

use half::{bf16, f16};

use super::arena::Rng;
use crate::{Banks, ExpertRecord, Format, e2m1, e4m3};

/// Largest magnitude of a 4-bit code.
const MOST_E2M1: f32 = 6.0;
/// Largest magnitude of an e4m3 code.
const MOST_E4M3: f32 = 448.0;
/// First scale code of NVFP4, 0.25, and how many follow: up to 3.75.
const SCALE_CODES: (u8, usize) = (0x28, 0x20);

/// Codes of elements up to `most`.
pub(super) fn codes(format: Format, most: f32, rng: &mut Rng, out: &mut [u8]) {
    match format {
        Format::F32 => {
            out.chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&rng.symmetric(most).to_le_bytes()));
        }
        Format::Bf16 => out
            .chunks_exact_mut(2)
            .for_each(|b| b.copy_from_slice(&bf16::from_f32(rng.symmetric(most)).to_le_bytes())),
        Format::F16 => out
            .chunks_exact_mut(2)
            .for_each(|b| b.copy_from_slice(&f16::from_f32(rng.symmetric(most)).to_le_bytes())),
        Format::Fp8 => {
            // Any code but the two that are no number.
            out.iter_mut().for_each(|b| *b = (rng.below(2) << 7 | rng.below(0x7f)) as u8);
        }
        Format::Nvfp4 | Format::Mxfp4 => out.iter_mut().for_each(|b| *b = rng.bits() as u8),
    }
}

/// Scales of elements up to about `most`.
pub(super) fn scales(format: Format, most: f32, rng: &mut Rng, out: &mut [u8]) {
    match format {
        Format::F32 | Format::Bf16 | Format::F16 => assert!(out.is_empty(), "{format} has no scales"),
        Format::Fp8 => {
            let scale = most / MOST_E4M3;
            out.chunks_exact_mut(4)
                .for_each(|b| b.copy_from_slice(&(scale * (1.0 + rng.symmetric(0.5))).to_le_bytes()));
        }
        Format::Nvfp4 => {
            let (first, n) = SCALE_CODES;
            out.iter_mut().for_each(|b| *b = first + rng.below(n) as u8);
        }
        Format::Mxfp4 => {
            let exponent = (most / MOST_E2M1).log2().round() as i32;
            out.iter_mut().for_each(|b| *b = (127 + exponent - rng.below(4) as i32) as u8);
        }
    }
}

/// Globals of elements up to about `most`.
pub(super) fn globals(most: f32, rng: &mut Rng, out: &mut [u8]) {
    let (first, n) = SCALE_CODES;
    let global = most / (MOST_E2M1 * e4m3(first + n as u8 - 1));
    out.chunks_exact_mut(4)
        .for_each(|b| b.copy_from_slice(&(global * (1.0 + rng.symmetric(0.5))).to_le_bytes()));
}

/// Records of experts with elements up to about `most`, one after the other.
pub(super) fn records(record: &ExpertRecord, most: f32, rng: &mut Rng, out: &mut [u8]) {
    for out in out.chunks_exact_mut(record.bytes) {
        for banks in [&record.gate_up, &record.down] {
            codes(record.format, most, rng, &mut out[banks.codes.clone()]);
            scales(record.format, most, rng, &mut out[banks.scales.clone()]);
            globals(most, rng, &mut out[banks.globals.clone()]);
        }
    }
}

/// One element of a matrix whose rows have `cols` columns and whose banks lie in `bytes`.
pub(super) fn element(
    format: Format,
    bytes: &[u8],
    banks: &Banks,
    row: usize,
    col: usize,
    cols: usize,
) -> f64 {
    let row_of = |bank: &std::ops::Range<usize>, row_bytes: usize| {
        &bytes[bank.start + row * row_bytes..bank.start + (row + 1) * row_bytes]
    };
    let codes = row_of(&banks.codes, format.row_bytes(cols));
    let code = match format {
        Format::F32 => f32::from_le_bytes(codes[4 * col..4 * col + 4].try_into().expect("four bytes")) as f64,
        Format::Bf16 => bf16::from_le_bytes([codes[2 * col], codes[2 * col + 1]]).to_f64(),
        Format::F16 => f16::from_le_bytes([codes[2 * col], codes[2 * col + 1]]).to_f64(),
        Format::Fp8 => e4m3(codes[col]) as f64,
        Format::Nvfp4 | Format::Mxfp4 => e2m1(codes[col / 2] >> (col % 2 * 4)) as f64,
    };
    let Some(group) = format.group() else { return code };
    let scale = format.scale(row_of(&banks.scales, format.scale_row_bytes(cols)), col / group) as f64;
    match row_of(&banks.globals, format.global_row_bytes()) {
        [] => code * scale,
        global => code * scale * f32::from_le_bytes(global.try_into().expect("four bytes")) as f64,
    }
}
