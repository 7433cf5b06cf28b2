//! 4-bit codes times activations in whole numbers: bytes are multiplied four at a time, and only the sum of a group becomes f32.
//!
//! ```text
//! x = scale * (128 * high + low)                         a scale for 128 columns, high and low from -64 to 64
//! 2 * code + 12 = 0 ..= 24                               unsigned, as the instruction wants one side
//! sum of x * code = scale / 2 * (sum of (2 * code + 12) * q - 12 * sum of q),   q = 128 * high + low
//! ```
//!
//! The sums are exact. What is rounded is `x`, to one part in 16,000 of the largest of its 128 columns. Even and odd columns lie
//! apart, as the two halves of a byte of codes give them.

#![allow(unsafe_code)] // Loads through pointers; see `Lanes` for what each function asks of its caller.

use super::{
    scaled::{Code, Decode, Mxfp4, Nvfp4, Scaled},
    tile::{AHEAD_BYTES, Lanes},
};

/// Columns of a block of activations.
const BLOCK: usize = 128;
/// Bytes of its codes.
const CODES: usize = BLOCK / 2;
/// Largest whole number that an activation becomes: both parts stay a signed byte.
const MOST: f32 = 8191.0;
/// What is added to twice a code.
const OFFSET: i32 = 12;

/// 128 columns of an activation row; those behind its end are zero.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Block {
    /// Low parts of even columns, then of odd ones.
    low: [[i8; CODES]; 2],
    /// High parts.
    high: [[i8; CODES]; 2],
    /// -12 times the sum of the 8 columns whose codes are bytes `4 * i ..` of the block.
    correction: [i32; CODES / 4],
    scale: f32,
}

impl Default for Block {
    fn default() -> Self {
        let zeros = [[0; CODES]; 2];
        Block { low: zeros, high: zeros, correction: [0; CODES / 4], scale: 0.0 }
    }
}

/// Blocks of a row of so many columns.
pub(crate) fn n_blocks(cols: usize) -> usize {
    cols.div_ceil(BLOCK)
}

/// Splits a row into whole numbers; compiled again for each instruction set.
#[inline(always)]
pub(super) fn to_blocks(x: &[f32], out: &mut [Block]) {
    assert_eq!(out.len(), n_blocks(x.len()), "a block for each 128 columns");
    for (x, out) in x.chunks(BLOCK).zip(out) {
        let mut row = [0.0_f32; BLOCK];
        row[..x.len()].copy_from_slice(x);
        // Magnitudes are in the order of their bits; one that is not finite is the largest, and then so is every sum.
        let largest = row.iter().fold(0, |most, x| (x.to_bits() & 0x7fff_ffff).max(most));
        let largest = f32::from_bits(largest);
        let inverse = if largest > 0.0 { MOST / largest } else { 0.0 };
        out.scale = largest / MOST;
        // Adding 3 * 2^22 rounds to a whole number, to nearest, and leaves it in the low bits.
        const MAGIC: f32 = 12_582_912.0;
        let q = row.map(|x| (x * inverse + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits()) as i32);
        let high = q.map(|q| q.wrapping_add(64) >> 7);
        for i in 0..CODES {
            for odd in 0..2 {
                let c = 2 * i + odd;
                out.high[odd][i] = high[c] as i8;
                out.low[odd][i] = q[c].wrapping_sub(high[c] << 7) as i8;
            }
        }
        for (correction, q) in out.correction.iter_mut().zip(q.as_chunks::<8>().0) {
            *correction = q.iter().fold(0_i32, |sum, q| sum.wrapping_add(*q)).wrapping_mul(-OFFSET);
        }
    }
}

/// A register of bytes.
pub(super) trait Bytes: Copy {
    /// The f32 register of the same size: a lane for four bytes.
    type Floats: Decode;
    /// Bytes in it, at most those of a block.
    const LEN: usize;
    unsafe fn zero() -> Self;
    unsafe fn load(pointer: *const u8) -> Self;
    /// Twice the codes in its bytes and 12: those of even columns, those of odd ones.
    unsafe fn codes(self) -> (Self, Self);
    /// Adds to each lane of `sums` the four products of its unsigned bytes with the signed ones of `x`.
    unsafe fn dot(self, x: Self, sums: Self) -> Self;
    /// `128 * high + low` of whole numbers, as f32.
    unsafe fn joined(high: Self, low: Self) -> Self::Floats;
    /// The scales of `LEN` bytes of codes over 256, each in two lanes.
    unsafe fn e4m3_scales(pointer: *const u8) -> Self::Floats;
    /// The scales of `LEN` bytes of codes, each in four lanes.
    unsafe fn e8m0_scales(pointer: *const u8) -> Self::Floats;
}

/// A format with 4-bit codes.
pub(super) trait Nibbles: Code {
    /// What its scales in registers must be multiplied with, half because codes are doubled.
    const FACTOR: f32;
    unsafe fn scales<B: Bytes>(pointer: *const u8) -> B::Floats;
}

impl Nibbles for Nvfp4 {
    const FACTOR: f32 = 0.5 * 256.0;

    #[inline(always)]
    unsafe fn scales<B: Bytes>(pointer: *const u8) -> B::Floats {
        // SAFETY: the caller's promise is the same.
        unsafe { B::e4m3_scales(pointer) }
    }
}

impl Nibbles for Mxfp4 {
    const FACTOR: f32 = 0.5;

    #[inline(always)]
    unsafe fn scales<B: Bytes>(pointer: *const u8) -> B::Floats {
        // SAFETY: the caller's promise is the same.
        unsafe { B::e8m0_scales(pointer) }
    }
}

/// Cuts `tile` into register tiles, as [`super::tile::dot_rows`] does.
#[inline(always)]
pub(super) unsafe fn dot_nibbles<C: Nibbles, B: Bytes>(
    w: Scaled<'_>,
    x: &[Block],
    n: usize,
    tile: &mut [f32],
) {
    let blocks = n_blocks(w.cols);
    let mut row = 0;
    while row < w.rows {
        let part = w.from::<C>(row);
        let mut i = 0;
        // SAFETY: the caller's promise of the instruction set is passed on.
        row += unsafe {
            let taken = if part.rows >= 4 { 4 } else { 1 };
            while i < n {
                let (x, tile) = (&x[i * blocks..], &mut tile[i * w.rows + row..]);
                i += match (taken, n - i) {
                    (4, 1) => dot_tile::<C, B, 4, 1>(part, x, tile, w.rows),
                    (4, _) => dot_tile::<C, B, 4, 2>(part, x, tile, w.rows),
                    (_, 1) => dot_tile::<C, B, 1, 1>(part, x, tile, w.rows),
                    _ => dot_tile::<C, B, 1, 2>(part, x, tile, w.rows),
                };
            }
            taken
        };
    }
}

/// The first `R` rows of `w` with the first `N` rows of `x`, all sums in registers; returns `N`.
#[inline(always)]
unsafe fn dot_tile<C: Nibbles, B: Bytes, const R: usize, const N: usize>(
    w: Scaled<'_>,
    x: &[Block],
    tile: &mut [f32],
    stride: usize,
) -> usize {
    let (code_bytes, scale_bytes, blocks) = (w.code_bytes::<C>(), w.scale_bytes::<C>(), n_blocks(w.cols));
    let (codes, scales) = (&w.codes[..R * code_bytes], &w.scales[..R * scale_bytes]);
    let x = &x[..N * blocks];
    let block_scales = BLOCK / C::GROUP;
    // SAFETY: the rows were just sliced. A block that is not the last lies inside of its row, and so do its scales; the last one
    // is read from a padded copy. The caller promises the instruction set.
    unsafe {
        let mut sums = [[B::Floats::zero(); R]; N];
        for b in 0..blocks {
            let (at, left) = (b * CODES, code_bytes - b * CODES);
            let mut ahead = at + AHEAD_BYTES;
            if ahead >= code_bytes {
                // The end of row r is the start of row r + 1, which another stream reads: on to the group after
                // the next one, since a group of 4-bit rows is short.
                ahead += (2 * R - 1) * code_bytes;
            }
            for r in 0..R {
                B::Floats::prefetch(codes.as_ptr().wrapping_add(r * code_bytes + ahead));
            }
            if (b * block_scales).is_multiple_of(64) {
                // Those of the next group: without, a twentieth of the bandwidth is lost.
                for r in R..2 * R {
                    B::Floats::prefetch(scales.as_ptr().wrapping_add(r * scale_bytes + b * block_scales));
                }
            }
            if left >= CODES {
                let (codes, scales) = (codes.as_ptr().add(at), scales.as_ptr().add(b * block_scales));
                block::<C, B, R, N>(&mut sums, codes, code_bytes, scales, scale_bytes, &x[b..], blocks);
                continue;
            }
            let (mut last_codes, mut last_scales) = ([[0; CODES]; R], [[0; 8]; R]);
            for r in 0..R {
                last_codes[r][..left].copy_from_slice(&codes[r * code_bytes + at..(r + 1) * code_bytes]);
                let row = &scales[r * scale_bytes + b * block_scales..(r + 1) * scale_bytes];
                last_scales[r][..row.len()].copy_from_slice(row);
            }
            let (codes, scales) = (last_codes.as_ptr().cast(), last_scales.as_ptr().cast());
            block::<C, B, R, N>(&mut sums, codes, CODES, scales, 8, &x[b..], blocks);
        }
        for i in 0..N {
            for r in 0..R {
                tile[i * stride + r] = sums[i][r].total();
            }
        }
    }
    N
}

/// Adds a block of `R` weight rows times `N` activation rows.
#[inline(always)]
unsafe fn block<C: Nibbles, B: Bytes, const R: usize, const N: usize>(
    sums: &mut [[B::Floats; R]; N],
    codes: *const u8,
    code_bytes: usize,
    scales: *const u8,
    scale_bytes: usize,
    x: &[Block],
    stride: usize,
) {
    const { assert!(CODES.is_multiple_of(B::LEN)) };
    // SAFETY: the caller promises the instruction set, and a whole block of codes and its scales in each of the rows.
    unsafe {
        for at in (0..CODES).step_by(B::LEN) {
            for r in 0..R {
                let (even, odd) = B::load(codes.add(r * code_bytes + at)).codes();
                let scale = C::scales::<B>(scales.add(r * scale_bytes + 2 * at / C::GROUP));
                for (i, sums) in sums.iter_mut().enumerate() {
                    let x = &x[i * stride];
                    let part = |half: &[i8; CODES]| B::load(half.as_ptr().cast::<u8>().add(at));
                    let correction = B::load(x.correction.as_ptr().cast::<u8>().add(at));
                    let low = odd.dot(part(&x.low[1]), even.dot(part(&x.low[0]), correction));
                    let high = even.dot(part(&x.high[0]), B::zero());
                    let sum = B::joined(odd.dot(part(&x.high[1]), high), low);
                    sums[r] = sums[r].fma(sum, scale.mul(B::Floats::splat(x.scale * C::FACTOR)));
                }
            }
        }
    }
}
