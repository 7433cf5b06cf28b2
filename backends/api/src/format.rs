//! How a weight is stored. A property of the weight: no model, op or type is named after one.
//!
//! Every format is one scheme. A row is **codes**; where the format is quantised, also a **scale** for each group of its
//! columns; and in one format a **global** factor for the whole row. An element is `code * scale * global`.
//!
//! | format | code | columns of a group | scale | global |
//! |---|---|---|---|---|
//! | f32, bf16, f16 | the element | | | |
//! | fp8 | e4m3 | 128, the last group may be shorter | f32 | |
//! | nvfp4 | e2m1 | 16 | e4m3 | f32 |
//! | mxfp4 | e2m1 | 32 | e8m0 | |
//!
//! Codes, scales and globals of a matrix are row-major runs of bytes each, which need not lie together. Of two 4-bit codes
//! in a byte, the low one is the even column. Names and number formats are those of the Open Compute Project.

use std::fmt;

/// Storage format of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE 754 binary32.
    F32,
    /// The upper half of binary32.
    Bf16,
    /// IEEE 754 binary16.
    F16,
    /// 8-bit codes and an f32 scale for 128 columns. Blocks of 128 x 128 and scales of a whole tensor are this, spread to rows,
    /// so that matrices can be stacked and cut at any row.
    Fp8,
    /// 4-bit codes, an 8-bit scale for 16 columns and an f32 factor for each row.
    Nvfp4,
    /// 4-bit codes and a power of two for 32 columns.
    Mxfp4,
}

impl Format {
    /// Bytes of the codes of one row of `cols` elements.
    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            Format::F32 => cols * 4,
            Format::Bf16 | Format::F16 => cols * 2,
            Format::Fp8 => cols,
            Format::Nvfp4 | Format::Mxfp4 => cols / 2,
        }
    }

    /// Columns that share a scale; `None` for formats that have codes only.
    pub fn group(self) -> Option<usize> {
        match self {
            Format::F32 | Format::Bf16 | Format::F16 => None,
            Format::Fp8 => Some(128),
            Format::Nvfp4 => Some(16),
            Format::Mxfp4 => Some(32),
        }
    }

    /// Bytes of the scales of one row: those of an f32 lie at multiples of four.
    pub fn scale_row_bytes(self, cols: usize) -> usize {
        let groups = self.group().map_or(0, |group| cols.div_ceil(group));
        if self == Format::Fp8 { groups * 4 } else { groups }
    }

    /// Bytes of the global factor of one row: four or none.
    pub fn global_row_bytes(self) -> usize {
        if self == Format::Nvfp4 { 4 } else { 0 }
    }

    /// Whether a row may have so many columns: 4-bit codes fill whole groups.
    pub fn takes_cols(self, cols: usize) -> bool {
        match self {
            Format::Nvfp4 | Format::Mxfp4 => self.group().is_some_and(|group| cols.is_multiple_of(group)),
            _ => true,
        }
    }

    /// The scale of a group as a number; `scales` are those of the row.
    pub fn scale(self, scales: &[u8], group: usize) -> f32 {
        match self {
            Format::F32 | Format::Bf16 | Format::F16 => 1.0,
            Format::Fp8 => bytemuck::pod_read_unaligned(&scales[4 * group..4 * group + 4]),
            Format::Nvfp4 => e4m3(scales[group]),
            Format::Mxfp4 => e8m0(scales[group]),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::F32 => "f32",
            Format::Bf16 => "bf16",
            Format::F16 => "f16",
            Format::Fp8 => "fp8",
            Format::Nvfp4 => "nvfp4",
            Format::Mxfp4 => "mxfp4",
        })
    }
}

/// The value of a 4-bit code: a sign, two bits of exponent, one of mantissa. Bits above the fourth are left aside.
pub const fn e2m1(code: u8) -> f32 {
    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let value = VALUES[(code & 7) as usize];
    if code & 8 == 0 { value } else { -value }
}

/// The value of an 8-bit code: a sign, four bits of exponent, three of mantissa, no infinity; 0x7f and 0xff are NaN.
pub const fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = ((code >> 3 & 15) as u32, (code & 7) as u32);
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa as f32 / 512.0,
        _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The power of two that a code stands for, `2^(code - 127)`; 255 is NaN.
pub const fn e8m0(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits((code as u32) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_bit_codes_are_those_of_the_table() {
        let table =
            [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0_f32];
        for code in 0..=u8::MAX {
            assert_eq!(e2m1(code).to_bits(), table[code as usize % 16].to_bits(), "{code:#x}");
        }
    }

    /// By the definition: `2^(exponent - 7) * (1 + mantissa / 8)`, or `2^-6 * mantissa / 8` where the exponent is zero.
    #[test]
    fn eight_bit_codes_are_those_of_the_definition() {
        for code in 0..=u8::MAX {
            let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
            let magnitude = match exponent {
                0 => 2_f64.powi(-6) * mantissa / 8.0,
                _ => 2_f64.powi(exponent - 7) * (1.0 + mantissa / 8.0),
            };
            let expected = if code < 128 { magnitude } else { -magnitude };
            match code & 0x7f {
                0x7f => assert!(e4m3(code).is_nan()),
                _ => assert_eq!((e4m3(code) as f64).to_bits(), expected.to_bits(), "{code:#x}"),
            }
        }
        assert_eq!((e4m3(0x7e), e4m3(0x38), e4m3(0x01), e4m3(0xfe)), (448.0, 1.0, 1.0 / 512.0, -448.0));
    }

    #[test]
    fn scale_codes_are_powers_of_two() {
        for code in 0..255 {
            assert_eq!(e8m0(code) as f64, 2_f64.powi(i32::from(code) - 127), "{code}");
        }
        assert!(e8m0(255).is_nan());
    }

    #[test]
    fn rows_are_counted_in_codes_scales_and_globals() {
        for (format, cols, codes, scales, global) in [
            (Format::F32, 7, 28, 0, 0),
            (Format::Bf16, 7, 14, 0, 0),
            (Format::F16, 7, 14, 0, 0),
            (Format::Fp8, 2048, 2048, 64, 0),
            (Format::Fp8, 129, 129, 8, 0),
            (Format::Nvfp4, 2048, 1024, 128, 4),
            (Format::Mxfp4, 2048, 1024, 64, 0),
        ] {
            let found = (format.row_bytes(cols), format.scale_row_bytes(cols), format.global_row_bytes());
            assert_eq!(found, (codes, scales, global), "{format}");
            assert!(format.takes_cols(cols));
        }
        assert!(!Format::Nvfp4.takes_cols(24) && !Format::Mxfp4.takes_cols(48) && Format::Fp8.takes_cols(1));
    }
}
