//! The loops over weights with scales: codes are decoded in registers, multiplied by their group's scale, and used for up to four
//! activation rows. An instruction set adds how codes become f32 ([`Decode`]); a format says where its codes and scales lie
//! ([`Code`]). Factors of whole rows are the caller's.

#![allow(unsafe_code)] // Loads through pointers; see `Lanes` for what each function asks of its caller.

use freetoken_backend::{e2m1, e4m3, e8m0};

use super::tile::{AHEAD_BYTES, Lanes};

/// A format with scales.
pub(super) trait Code {
    /// Columns of a group, a multiple of every register's length.
    const GROUP: usize;
    /// Columns whose codes fill a byte.
    const PER_BYTE: usize;
    /// Bytes of a scale.
    const SCALE_BYTES: usize;
    /// What decoded codes must be multiplied with.
    const UNIT: f32;
    /// The value of the code of a column.
    fn code(codes: &[u8], col: usize) -> f32;
    /// The scale at a pointer.
    ///
    /// # Safety
    /// `SCALE_BYTES` can be read there.
    unsafe fn scale(pointer: *const u8) -> f32;
    /// Codes as f32 values over [`Code::UNIT`].
    ///
    /// # Safety
    /// See [`Lanes`]: the codes of `LEN` columns can be read.
    unsafe fn decode<V: Decode>(pointer: *const u8) -> V;
}

/// Registers that codes become values in.
pub(super) trait Decode: Lanes {
    unsafe fn splat(value: f32) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// `LEN` values.
    unsafe fn values(pointer: *const f32) -> Self;
    /// `LEN` 4-bit codes.
    unsafe fn e2m1(pointer: *const u8) -> Self;
    /// `LEN` 8-bit codes over 256, as they are in the bits of an f16; what those that are no number become is not defined.
    unsafe fn e4m3(pointer: *const u8) -> Self;
}

pub(super) struct Fp8;
pub(super) struct Nvfp4;
pub(super) struct Mxfp4;

/// Values of all scale codes.
static E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = e4m3(code as u8);
        code += 1;
    }
    values
};

impl Code for Fp8 {
    const GROUP: usize = 128;
    const PER_BYTE: usize = 1;
    const SCALE_BYTES: usize = 4;
    const UNIT: f32 = 256.0;

    fn code(codes: &[u8], col: usize) -> f32 {
        e4m3(codes[col])
    }

    #[inline(always)]
    unsafe fn scale(pointer: *const u8) -> f32 {
        // SAFETY: the caller promises four bytes.
        unsafe { pointer.cast::<f32>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn decode<V: Decode>(pointer: *const u8) -> V {
        // SAFETY: the caller's promise is the same.
        unsafe { V::e4m3(pointer) }
    }
}

impl Code for Nvfp4 {
    const GROUP: usize = 16;
    const PER_BYTE: usize = 2;
    const SCALE_BYTES: usize = 1;
    const UNIT: f32 = 1.0;

    fn code(codes: &[u8], col: usize) -> f32 {
        e2m1(codes[col / 2] >> (col % 2 * 4))
    }

    #[inline(always)]
    unsafe fn scale(pointer: *const u8) -> f32 {
        // SAFETY: the caller promises a byte.
        E4M3[unsafe { *pointer } as usize]
    }

    #[inline(always)]
    unsafe fn decode<V: Decode>(pointer: *const u8) -> V {
        // SAFETY: the caller's promise is the same.
        unsafe { V::e2m1(pointer) }
    }
}

impl Code for Mxfp4 {
    const GROUP: usize = 32;
    const PER_BYTE: usize = 2;
    const SCALE_BYTES: usize = 1;
    const UNIT: f32 = 1.0;

    fn code(codes: &[u8], col: usize) -> f32 {
        Nvfp4::code(codes, col)
    }

    #[inline(always)]
    unsafe fn scale(pointer: *const u8) -> f32 {
        // SAFETY: the caller promises a byte.
        e8m0(unsafe { *pointer })
    }

    #[inline(always)]
    unsafe fn decode<V: Decode>(pointer: *const u8) -> V {
        // SAFETY: the caller's promise is the same.
        unsafe { V::e2m1(pointer) }
    }
}

/// Weight rows and the shape of a call: codes, scales, columns.
#[derive(Clone, Copy)]
pub(super) struct Scaled<'a> {
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [u8],
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl<'a> Scaled<'a> {
    pub(super) fn code_bytes<C: Code>(&self) -> usize {
        self.cols / C::PER_BYTE
    }

    pub(super) fn scale_bytes<C: Code>(&self) -> usize {
        self.cols.div_ceil(C::GROUP) * C::SCALE_BYTES
    }

    /// The rows from `row` on.
    pub(super) fn from<C: Code>(&self, row: usize) -> Self {
        Scaled {
            codes: &self.codes[row * self.code_bytes::<C>()..],
            scales: &self.scales[row * self.scale_bytes::<C>()..],
            rows: self.rows - row,
            cols: self.cols,
        }
    }
}

/// Plain Rust: every other way is held against this one.
pub(super) fn dot_plain<C: Code>(w: Scaled<'_>, x: &[f32], n: usize, tile: &mut [f32]) {
    for r in 0..w.rows {
        let row = w.from::<C>(r);
        // SAFETY: a scale for each group of the row.
        let scale = |group: usize| unsafe { C::scale(row.scales[group * C::SCALE_BYTES..].as_ptr()) };
        for i in 0..n {
            let x = &x[i * w.cols..][..w.cols];
            let term = |(c, x): (usize, &f32)| x * (C::code(row.codes, c) * scale(c / C::GROUP));
            tile[i * w.rows + r] = x.iter().enumerate().map(term).sum();
        }
    }
}

/// Cuts `tile` into register tiles, as [`super::tile::dot_rows`] does.
#[inline(always)]
pub(super) unsafe fn dot_scaled<C: Code, V: Decode>(w: Scaled<'_>, x: &[f32], n: usize, tile: &mut [f32]) {
    let most = if n == 1 { 4 } else { V::ROWS };
    let mut row = 0;
    while row < w.rows {
        let part = w.from::<C>(row);
        // SAFETY: the caller's promise of the instruction set is passed on.
        row += unsafe {
            match most.min(part.rows) {
                4.. => dot_group::<C, V, 4>(part, x, n, &mut tile[row..], w.rows),
                2 | 3 => dot_group::<C, V, 2>(part, x, n, &mut tile[row..], w.rows),
                _ => dot_group::<C, V, 1>(part, x, n, &mut tile[row..], w.rows),
            }
        }
    }
}

/// The first `R` rows of `w` with all `n` rows of `x`, into the first `R` columns of `tile`; returns `R`.
#[inline(always)]
unsafe fn dot_group<C: Code, V: Decode, const R: usize>(
    w: Scaled<'_>,
    x: &[f32],
    n: usize,
    tile: &mut [f32],
    stride: usize,
) -> usize {
    let mut i = 0;
    while i < n {
        let (x, tile) = (&x[i * w.cols..], &mut tile[i * stride..]);
        // SAFETY: the caller's promise of the instruction set is passed on.
        i += unsafe {
            match n - i {
                4.. => dot_tile::<C, V, R, 4>(w, x, tile, stride),
                3 => dot_tile::<C, V, R, 3>(w, x, tile, stride),
                2 => dot_tile::<C, V, R, 2>(w, x, tile, stride),
                _ => dot_tile::<C, V, R, 1>(w, x, tile, stride),
            }
        }
    }
    R
}

/// The first `R` rows of `w` with the first `N` rows of `x`, all sums in registers; returns `N`.
#[inline(always)]
unsafe fn dot_tile<C: Code, V: Decode, const R: usize, const N: usize>(
    w: Scaled<'_>,
    x: &[f32],
    tile: &mut [f32],
    stride: usize,
) -> usize {
    const { assert!(C::GROUP.is_multiple_of(V::LEN) && V::LEN <= MAX_LEN) };
    let (code_bytes, scale_bytes, cols) = (w.code_bytes::<C>(), w.scale_bytes::<C>(), w.cols);
    let (codes, scales) = (&w.codes[..R * code_bytes], &w.scales[..R * scale_bytes]);
    let x = &x[..N * cols];
    // SAFETY: the `R` and `N` rows were just sliced. Group `g` begins inside of them, so its scale is there; a step ends at or
    // before the end of the rows, but for the last one of a group that is cut short, which reads padded copies. The caller
    // promises the instruction set.
    unsafe {
        let mut sums = [[V::zero(); R]; N];
        for g in 0..cols.div_ceil(C::GROUP) {
            let (start, end) = (g * C::GROUP, cols.min((g + 1) * C::GROUP));
            let mut scale = [V::zero(); R];
            for (r, scale) in scale.iter_mut().enumerate() {
                *scale =
                    V::splat(C::UNIT * C::scale(scales.as_ptr().add(r * scale_bytes + g * C::SCALE_BYTES)));
            }
            if (start / C::PER_BYTE).is_multiple_of(64) {
                let mut ahead = start / C::PER_BYTE + AHEAD_BYTES;
                if ahead >= code_bytes {
                    // The end of row r is the start of row r + 1, which another stream reads: on to the next group.
                    ahead += (R - 1) * code_bytes;
                }
                for r in 0..R {
                    for line in (0..C::GROUP / C::PER_BYTE).step_by(64) {
                        V::prefetch(codes.as_ptr().wrapping_add(r * code_bytes + ahead + line));
                    }
                }
            }
            let mut c = start;
            // A long group is summed without its scale, a group of one step is not worth a sum of its own.
            let is_long = C::GROUP > 2 * V::LEN;
            let mut part = if is_long { [[V::zero(); R]; N] } else { sums };
            let factor = if is_long { [V::splat(1.0); R] } else { scale };
            while c + V::LEN <= end {
                let codes = codes.as_ptr().add(c / C::PER_BYTE);
                step::<C, V, R, N>(&mut part, &factor, codes, code_bytes, x.as_ptr().add(c), cols);
                c += V::LEN;
            }
            if c < end {
                let mut last_codes = [[0; MAX_LEN]; R];
                for (r, last) in last_codes.iter_mut().enumerate() {
                    let row = &codes[r * code_bytes..][c / C::PER_BYTE..code_bytes];
                    last[..row.len()].copy_from_slice(row);
                }
                let mut last_x = [[0.0; MAX_LEN]; N];
                for (i, last) in last_x.iter_mut().enumerate() {
                    last[..end - c].copy_from_slice(&x[i * cols..][c..end]);
                }
                let (codes, x) = (last_codes.as_ptr().cast(), last_x.as_ptr().cast());
                step::<C, V, R, N>(&mut part, &factor, codes, MAX_LEN, x, MAX_LEN);
            }
            if is_long {
                for i in 0..N {
                    for r in 0..R {
                        sums[i][r] = sums[i][r].fma(part[i][r], scale[r]);
                    }
                }
            } else {
                sums = part;
            }
        }
        for i in 0..N {
            for r in 0..R {
                tile[i * stride + r] = sums[i][r].total();
            }
        }
    }
    N
}

/// The longest register in columns.
const MAX_LEN: usize = 16;

/// Adds `LEN` columns of `R` weight rows times `N` activation rows; rows of codes lie `code_bytes` apart, those of activations
/// `stride` elements.
#[inline(always)]
unsafe fn step<C: Code, V: Decode, const R: usize, const N: usize>(
    sums: &mut [[V; R]; N],
    scale: &[V; R],
    codes: *const u8,
    code_bytes: usize,
    x: *const f32,
    stride: usize,
) {
    // SAFETY: the caller promises the instruction set and `LEN` columns in each of the rows.
    unsafe {
        let mut weights = *scale;
        for (r, weights) in weights.iter_mut().enumerate() {
            *weights = weights.mul(C::decode::<V>(codes.add(r * code_bytes)));
        }
        for (i, sums) in sums.iter_mut().enumerate() {
            let inputs = V::values(x.add(i * stride));
            for (sums, weights) in sums.iter_mut().zip(weights) {
                *sums = sums.fma(weights, inputs);
            }
        }
    }
}
