//! Experts rounded to fewer bits: the inverse of what [`quantised`](super::quantised) reads.
//!
//! A code is the nearest one to the element divided by its scale, the even one of two as near; beyond the largest code it is
//! that. What the scales are:
//!
//! | format | scale of a group | global of a matrix | source |
//! |---|---|---|---|
//! | fp8 | largest of a 128 x 128 block / 448 | | DeepSeek-V3 |
//! | nvfp4 | largest of 16 / 6 / global, to the nearest e4m3 | largest of the matrix / (6 x 448) | NVIDIA ModelOpt |
//! | mxfp4 | 2^(exponent of the largest of 32 - 2) | | OCP Microscaling Formats 1.0 |

use std::ops::Range;

use bytemuck::allocation::pod_collect_to_vec;
use freetoken_backend::{Banks, ExpertRecord, Format, e4m3, e8m0};
use half::{bf16, f16};

use super::quantised::FP8_BLOCK;

/// Largest e2m1.
const E2M1_MAX: f32 = 6.0;
/// Largest e4m3, and its code.
const E4M3_MAX: (f32, u8) = (448.0, 0x7e);
/// The code of 1 as an e4m3, and as a power of two: scales where every element is zero.
const E4M3_ONE: u8 = 0x38;
const E8M0_ONE: u8 = 127;

/// An element that is no number, or infinite.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("the element at row {row} and column {col} of `{projection}` is {value}, which no code stands for")]
pub struct NotFinite {
    /// The matrix.
    pub projection: &'static str,
    /// Its row.
    pub row: usize,
    /// Its column.
    pub col: usize,
    /// The element.
    pub value: f32,
}

/// One expert, from a record of elements to a record of codes of the same shape. Asserts that the formats are those, and that the
/// bytes are the records'.
///
/// # Errors
/// [`NotFinite`].
pub fn quantise(
    from: &ExpertRecord,
    bytes: &[u8],
    to: &ExpertRecord,
    into: &mut [u8],
) -> Result<(), NotFinite> {
    assert!(from.format.group().is_none() && to.format.group().is_some(), "from elements to codes");
    assert_eq!((from.hidden, from.intermediate), (to.hidden, to.intermediate), "one shape");
    let (hidden, intermediate) = (to.hidden, to.intermediate);
    for (projection, source, banks, cols) in [
        ("gate_proj", from.gate(), to.gate(), hidden),
        ("up_proj", from.up(), to.up(), hidden),
        ("down_proj", from.down.clone(), to.down.clone(), intermediate),
    ] {
        let values = elements(from.format, &bytes[source.codes]);
        if let Some(place) = values.iter().position(|value| !value.is_finite()) {
            return Err(NotFinite { projection, row: place / cols, col: place % cols, value: values[place] });
        }
        match to.format {
            Format::Fp8 => fp8(&values, cols, &banks, into),
            Format::Nvfp4 => nvfp4(&values, cols, &banks, into),
            _ => mxfp4(&values, cols, &banks, into),
        }
    }
    Ok(())
}

fn elements(format: Format, bytes: &[u8]) -> Vec<f32> {
    let words = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match format {
        Format::Bf16 => words().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        Format::F16 => words().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        _ => pod_collect_to_vec(bytes),
    }
}

fn largest(values: impl IntoIterator<Item = f32>) -> f32 {
    values.into_iter().fold(0.0, |most, value| most.max(value.abs()))
}

/// `largest / of`, or 1 where every element is zero; never zero itself, which no reader takes.
fn factor(largest: f32, of: f32) -> f32 {
    if largest == 0.0 { 1.0 } else { (largest / of).max(f32::MIN_POSITIVE) }
}

fn fp8(values: &[f32], cols: usize, banks: &Banks, into: &mut [u8]) {
    let rows = values.len() / cols;
    let n_groups = cols.div_ceil(FP8_BLOCK);
    let block = |n: usize, end: usize| n * FP8_BLOCK..((n + 1) * FP8_BLOCK).min(end);
    for top in 0..rows.div_ceil(FP8_BLOCK) {
        for group in 0..n_groups {
            let (rows, cols_of_group) = (block(top, rows), block(group, cols));
            let part = |row: usize| row * cols + cols_of_group.start..row * cols + cols_of_group.end;
            let scale =
                factor(largest(rows.clone().flat_map(|row| values[part(row)].iter().copied())), E4M3_MAX.0);
            for row in rows {
                let at = banks.scales.start + 4 * (row * n_groups + group);
                into[at..at + 4].copy_from_slice(&scale.to_le_bytes());
                let codes = offset(part(row), banks.codes.start);
                for (code, value) in into[codes].iter_mut().zip(&values[part(row)]) {
                    *code = nearest_e4m3(value / scale);
                }
            }
        }
    }
}

fn nvfp4(values: &[f32], cols: usize, banks: &Banks, into: &mut [u8]) {
    let global = factor(largest(values.iter().copied()), E2M1_MAX * E4M3_MAX.0);
    into[banks.globals.clone()].chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&global.to_le_bytes()));
    four_bits(values, cols, 16, banks, into, |most| {
        let code = if most == 0.0 { E4M3_ONE } else { nearest_e4m3(most / E2M1_MAX / global) };
        (code, e4m3(code) * global)
    });
}

fn mxfp4(values: &[f32], cols: usize, banks: &Banks, into: &mut [u8]) {
    four_bits(values, cols, 32, banks, into, |most| {
        let code = if most == 0.0 { E8M0_ONE } else { (exponent(most) - 2 + 127).clamp(0, 254) as u8 };
        (code, e8m0(code))
    });
}

/// Codes of 4 bits; `scale` gives the code and the value of a group's scale from the largest magnitude in it.
fn four_bits(
    values: &[f32],
    cols: usize,
    group: usize,
    banks: &Banks,
    into: &mut [u8],
    scale: impl Fn(f32) -> (u8, f32),
) {
    assert!(cols.is_multiple_of(group), "whole groups");
    for (i, values) in values.chunks_exact(group).enumerate() {
        let (code, scale) = scale(largest(values.iter().copied()));
        into[banks.scales.start + i] = code;
        // A scale that was rounded to zero leaves zeros.
        let nearest = |value: f32| if scale == 0.0 { 0 } else { nearest_e2m1(value / scale) };
        let start = banks.codes.start + i * group / 2;
        for (byte, pair) in into[start..start + group / 2].iter_mut().zip(values.chunks_exact(2)) {
            *byte = nearest(pair[0]) | nearest(pair[1]) << 4;
        }
    }
}

fn offset(range: Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}

/// `floor(log2(value))` of a positive number.
fn exponent(value: f32) -> i32 {
    let bits = value.to_bits();
    match (bits >> 23) as i32 {
        // The leading one of a subnormal is that of its mantissa.
        0 => 31 - bits.leading_zeros() as i32 - 149,
        biased => biased - 127,
    }
}

/// The 4-bit code nearest to a number.
fn nearest_e2m1(value: f32) -> u8 {
    let magnitude = value.abs();
    // Between the codes 0 to 4 lie halves, then ones, then twos: rounding to even there is rounding to even codes.
    let code = if magnitude < 2.0 {
        (magnitude * 2.0).round_ties_even() as u8
    } else if magnitude < 4.0 {
        magnitude.round_ties_even() as u8 + 2
    } else {
        (magnitude / 2.0).min(3.0).round_ties_even() as u8 + 4
    };
    code | if value.is_sign_negative() { 8 } else { 0 }
}

/// The 8-bit code nearest to a number.
fn nearest_e4m3(value: f32) -> u8 {
    let magnitude = value.abs();
    let code = if magnitude >= E4M3_MAX.0 {
        E4M3_MAX.1
    } else if magnitude < 1.0 / 64.0 {
        (magnitude * 512.0).round_ties_even() as u8
    } else {
        // Of 23 bits of mantissa three stay; a carry out of them goes into the exponent, as it should.
        let bits = magnitude.to_bits();
        let rounded = bits + 0x7_ffff + (bits >> 20 & 1);
        ((rounded >> 20) - (120 << 3)) as u8
    };
    code | if value.is_sign_negative() { 0x80 } else { 0 }
}

#[cfg(test)]
mod tests {
    use freetoken_backend::{e2m1, record};
    use proptest::prelude::*;

    use super::*;

    /// The code whose value is nearest, the even one of two: by trying all of them.
    fn tried(value: f32, codes: Range<u8>, decode: fn(u8) -> f32) -> u8 {
        // Far beyond the largest code all distances are one number.
        let magnitude = value.abs().min(1e4) as f64;
        let distance = |code: &u8| (decode(*code) as f64 - magnitude).abs();
        codes.min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)))).unwrap()
    }

    fn check_nearest(value: f32) {
        let sign = value.is_sign_negative();
        let expected = tried(value, 0..8, e2m1) | if sign { 8 } else { 0 };
        assert_eq!(nearest_e2m1(value), expected, "{value} as an e2m1");
        let expected = tried(value, 0..0x7f, e4m3) | if sign { 0x80 } else { 0 };
        assert_eq!(nearest_e4m3(value), expected, "{value} as an e4m3");
    }

    #[test]
    fn codes_are_the_nearest_and_ties_go_to_even() {
        for code in 0..=0x7e {
            let (value, next) = (e4m3(code), e4m3((code + 1).min(0x7e)));
            assert_eq!(nearest_e4m3(value), code);
            for value in [value, (value + next) / 2.0, value.next_up(), ((value + next) / 2.0).next_up()] {
                check_nearest(value);
                check_nearest(-value);
            }
        }
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 1e30, f32::MAX].into_iter().for_each(check_nearest);
    }

    #[test]
    fn exponents_are_those_of_the_logarithm() {
        for power in -149..=127 {
            let value = 2_f64.powi(power) as f32;
            assert_eq!(exponent(value), power);
            if power > -149 {
                assert_eq!(exponent(value.next_down()), power - 1);
            }
            // The smallest number has no second bit.
            assert_eq!(exponent(value * 1.5), if power == -149 { -148 } else { power });
        }
    }

    /// The elements of a matrix of a record, by the definition of its format.
    fn decoded(format: Format, banks: &Banks, cols: usize, bytes: &[u8]) -> Vec<f32> {
        let (codes, rows) = (&bytes[banks.codes.clone()], banks.codes.len() / format.row_bytes(cols));
        let element = |row: usize, col: usize| {
            let scales = &bytes[banks.scales.clone()][row * format.scale_row_bytes(cols)..];
            let scale = format.scale(scales, col / format.group().unwrap());
            let at = row * cols + col;
            match format {
                Format::Fp8 => e4m3(codes[at]) * scale,
                Format::Mxfp4 => e2m1(codes[at / 2] >> (at % 2 * 4)) * scale,
                _ => {
                    let global: f32 =
                        bytemuck::pod_read_unaligned(&bytes[banks.globals.start + 4 * row..][..4]);
                    e2m1(codes[at / 2] >> (at % 2 * 4)) * scale * global
                }
            }
        };
        (0..rows)
            .flat_map(|row| (0..cols).map(move |col| (row, col)))
            .map(|(row, col)| element(row, col))
            .collect()
    }

    /// One expert with these elements in all of its matrices, and what it is in `format`.
    fn through(
        format: Format,
        hidden: usize,
        intermediate: usize,
        value: impl Fn(usize) -> f32,
    ) -> [(Vec<f32>, Vec<f32>); 3] {
        let (from, to) = (record(Format::F32, hidden, intermediate), record(format, hidden, intermediate));
        let mut bytes = vec![0; from.bytes];
        for banks in [from.gate(), from.up(), from.down.clone()] {
            for (i, b) in bytes[banks.codes].chunks_exact_mut(4).enumerate() {
                b.copy_from_slice(&value(i).to_le_bytes());
            }
        }
        let mut into = vec![0; to.bytes];
        quantise(&from, &bytes, &to, &mut into).unwrap();
        crate::formats::quantised::check_record(&to, &into, &"e").unwrap();
        [
            (from.gate(), to.gate(), hidden),
            (from.up(), to.up(), hidden),
            (from.down.clone(), to.down.clone(), intermediate),
        ]
        .map(|(from, to, cols)| {
            (elements(Format::F32, &bytes[from.codes]), decoded(format, &to, cols, &into))
        })
    }

    /// Errors are at most half a step of the element's own size, and half the smallest step.
    #[test]
    fn elements_come_back_as_near_as_the_codes_allow() {
        for (format, group, step, least) in [
            (Format::Fp8, 128, 1.0 / 16.0, 0.5 / 512.0 / 448.0),
            (Format::Nvfp4, 16, 0.25, 0.25 / 6.0),
            (Format::Mxfp4, 32, 0.25, 0.25 / 4.0),
        ] {
            let value =
                |i: usize| ((i * 2_654_435_761 % 10_007) as f32 / 5003.5 - 1.0).powi(3) * (1 + i % 7) as f32;
            for (before, after) in through(format, 160, 96, value) {
                let most = largest(before.iter().copied());
                for (i, (a, b)) in before.iter().zip(&after).enumerate() {
                    let near = if format == Format::Fp8 {
                        most
                    } else {
                        largest(before[i / group * group..][..group].iter().copied())
                    };
                    // The scales of nvfp4 are rounded too, and the largest of mxfp4 may be cut from 8 to 6.
                    let slack = match format {
                        Format::Fp8 => 0.0,
                        Format::Nvfp4 => 1.0 / 16.0,
                        _ => {
                            if a.abs() > 0.7 * near {
                                0.25
                            } else {
                                0.0
                            }
                        }
                    };
                    let bound = a.abs() * (step + slack) + least * near * 1.1;
                    assert!((a - b).abs() <= bound, "{format}: {a} became {b}, of a group up to {near}");
                }
            }
        }
    }

    /// Elements that codes and scales can say exactly are said exactly.
    #[test]
    fn what_the_format_holds_comes_back_exactly() {
        for format in [Format::Fp8, Format::Nvfp4, Format::Mxfp4] {
            let value = |i: usize| match format {
                // The largest of each group is the largest code, so scales are powers of two.
                Format::Fp8 => e4m3([0x7e, 0xfe, 1, 0x38][i % 4]) * 0.5,
                _ => {
                    e2m1([7, 15, 1, 4, 10, 0, 3][i % 7]) * if format == Format::Nvfp4 { 448.0 } else { 0.125 }
                }
            };
            for (before, after) in through(format, 128, 128, value) {
                assert_eq!(before, after, "{format}");
            }
        }
    }

    #[test]
    fn zeros_stay_zeros_and_what_is_no_number_is_refused() {
        for format in [Format::Fp8, Format::Nvfp4, Format::Mxfp4] {
            for (_, after) in through(format, 32, 32, |_| 0.0) {
                assert!(after.iter().all(|value| *value == 0.0));
            }
            let (from, to) = (record(Format::F32, 32, 32), record(format, 32, 32));
            let mut bytes = vec![0; from.bytes];
            let at = from.down.codes.start + 4 * (32 * 3 + 5);
            bytes[at..at + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
            let wrong = quantise(&from, &bytes, &to, &mut vec![0; to.bytes]).unwrap_err();
            assert_eq!((wrong.projection, wrong.row, wrong.col), ("down_proj", 3, 5));
        }
    }

    proptest! {
        #[test]
        fn any_number_has_its_nearest_code(bits in any::<u32>()) {
            let value = f32::from_bits(bits);
            if value.is_finite() {
                check_nearest(value);
            }
        }

        /// Where most numbers are that anybody rounds.
        #[test]
        fn any_small_number_has_its_nearest_code(value in -8.0_f32..8.0) {
            check_nearest(value);
        }

        /// Very large and very small elements have scales that a reader takes.
        #[test]
        fn any_magnitude_has_scales_that_are_read(power in -149..127_i32, format in 0..3_usize) {
            let format = [Format::Fp8, Format::Nvfp4, Format::Mxfp4][format];
            for (_, after) in through(format, 32, 32, |i| 2_f64.powi(power) as f32 * (i % 3) as f32) {
                prop_assert!(after.iter().all(|value| value.is_finite()));
            }
        }
    }
}
