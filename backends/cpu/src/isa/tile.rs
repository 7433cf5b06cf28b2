//! The loops around an instruction set: register tiles of weight rows by activation rows, and how a dot product steps through
//! the columns. An instruction set adds how a register is loaded and multiplied ([`Lanes`], [`Load`]).

#![allow(unsafe_code)] // Loads through pointers; see `Lanes` for what each function asks of its caller.

use std::marker::PhantomData;

use super::scalar;

/// One or two registers of f32.
///
/// # Safety
/// Of every `unsafe` function here and in the two traits below: the CPU has the instruction set, and `LEN` elements can
/// be read at a pointer, which needs no alignment.
pub(super) trait Lanes: Copy {
    /// f32 values in it.
    const LEN: usize;
    /// Weight rows of a tile with several activation rows: 4 * `ROWS` accumulators fit the register file.
    const ROWS: usize;
    unsafe fn zero() -> Self;
    /// `self + a * b`.
    unsafe fn fma(self, a: Self, b: Self) -> Self;
    unsafe fn total(self) -> f32;
    /// The exclusive or of the bits.
    unsafe fn xor(self, other: Self) -> Self;
    /// Asks for the cache line at `pointer`, which may lie anywhere.
    fn prefetch(_pointer: *const u8) {}
}

/// Reads `LEN` elements and widens them to f32.
pub(super) trait Load<T>: Lanes {
    unsafe fn load(pointer: *const T) -> Self;
}

/// One step of a dot product: `LEN` columns of a weight row and of an activation row.
pub(super) trait Step {
    type Weight: Copy + Default;
    type Input: Copy + Default;
    /// Columns, as the multiply takes them.
    type Operand: Copy;
    type Sums: Lanes;
    /// Columns of one step, at most [`MAX_LEN`].
    const LEN: usize;
    unsafe fn weights(pointer: *const Self::Weight) -> Self::Operand;
    unsafe fn inputs(pointer: *const Self::Input) -> Self::Operand;
    unsafe fn add(sums: Self::Sums, weights: Self::Operand, inputs: Self::Operand) -> Self::Sums;
}

/// The step that widens both sides to f32.
pub(super) struct Fma<V, W, X>(PhantomData<(V, W, X)>);

impl<V: Load<W> + Load<X>, W: Copy + Default, X: Copy + Default> Step for Fma<V, W, X> {
    type Weight = W;
    type Input = X;
    type Operand = V;
    type Sums = V;
    const LEN: usize = V::LEN;

    #[inline(always)]
    unsafe fn weights(pointer: *const W) -> V {
        // SAFETY: the caller's promise is the same.
        unsafe { V::load(pointer) }
    }

    #[inline(always)]
    unsafe fn inputs(pointer: *const X) -> V {
        // SAFETY: the caller's promise is the same.
        unsafe { V::load(pointer) }
    }

    #[inline(always)]
    unsafe fn add(sums: V, weights: V, inputs: V) -> V {
        // SAFETY: the caller's promise is the same.
        unsafe { sums.fma(weights, inputs) }
    }
}

/// The longest step in columns.
pub(super) const MAX_LEN: usize = 32;
/// How far ahead weights are asked for: any distance from 512 to 3072 is as good; without, a fifth of the bandwidth is
/// lost.
pub(super) const AHEAD_BYTES: usize = 1024;

/// One row with one row: too short to pay for the loops of [`dot_rows`].
#[inline(always)]
pub(super) unsafe fn dot_row<S: Step>(w: &[S::Weight], x: &[S::Input]) -> f32 {
    assert_eq!(w.len(), x.len(), "key row and query row have one length");
    let mut sum = [0.0];
    // SAFETY: the caller's promise of the instruction set is passed on.
    unsafe { dot_tile_of::<S, 1, 1>(w, x, x.len(), &mut sum, 1) };
    sum[0]
}

/// Cuts `tile` into register tiles: groups of weight rows outside, so that a group stays in the first-level cache while
/// all activation rows pass.
#[inline(always)]
pub(super) unsafe fn dot_rows<S: Step>(
    w: &[S::Weight],
    rows: usize,
    x: &[S::Input],
    n: usize,
    cols: usize,
    tile: &mut [f32],
) {
    let most = if n == 1 { 4 } else { S::Sums::ROWS };
    let mut row = 0;
    while row < rows {
        let w = &w[row * cols..];
        // SAFETY: the caller's promise of the instruction set is passed on.
        row += unsafe {
            match most.min(rows - row) {
                4.. => dot_group::<S, 4>(w, x, n, cols, &mut tile[row..], rows),
                2 | 3 => dot_group::<S, 2>(w, x, n, cols, &mut tile[row..], rows),
                _ => dot_group::<S, 1>(w, x, n, cols, &mut tile[row..], rows),
            }
        }
    }
}

/// The first `R` rows of `w` with all `n` rows of `x`, into the first `R` columns of `tile`; returns `R`.
#[inline(always)]
pub(super) unsafe fn dot_group<S: Step, const R: usize>(
    w: &[S::Weight],
    x: &[S::Input],
    n: usize,
    cols: usize,
    tile: &mut [f32],
    stride: usize,
) -> usize {
    let mut i = 0;
    while i < n {
        let (x, tile) = (&x[i * cols..], &mut tile[i * stride..]);
        // SAFETY: the caller's promise of the instruction set is passed on.
        i += unsafe {
            match n - i {
                4.. => dot_tile_of::<S, R, 4>(w, x, cols, tile, stride),
                3 => dot_tile_of::<S, R, 3>(w, x, cols, tile, stride),
                2 => dot_tile_of::<S, R, 2>(w, x, cols, tile, stride),
                _ => dot_tile_of::<S, R, 1>(w, x, cols, tile, stride),
            }
        }
    }
    R
}

/// The first `R` rows of `w` with the first `N` rows of `x`, all sums in registers; returns `N`.
#[inline(always)]
pub(super) unsafe fn dot_tile_of<S: Step, const R: usize, const N: usize>(
    w: &[S::Weight],
    x: &[S::Input],
    cols: usize,
    tile: &mut [f32],
    stride: usize,
) -> usize {
    let (w, x) = (&w[..R * cols], &x[..N * cols]);
    const { assert!(S::LEN <= MAX_LEN) };
    // SAFETY: `c + LEN <= cols` in the loop, so every step reads inside the `R` and `N` rows just sliced; the padded
    // rows of the tail are `MAX_LEN >= LEN` long. The caller promises the instruction set.
    unsafe {
        let mut sums = [[S::Sums::zero(); R]; N];
        let mut c = 0;
        while c + S::LEN <= cols {
            let mut ahead = c + AHEAD_BYTES / size_of::<S::Weight>();
            if ahead >= cols {
                // The end of row r is the start of row r + 1, which another stream reads: on to the next group.
                ahead += (R - 1) * cols;
            }
            for r in 0..R {
                S::Sums::prefetch(w.as_ptr().wrapping_add(r * cols + ahead).cast());
            }
            step::<S, R, N>(&mut sums, w.as_ptr().add(c), x.as_ptr().add(c), cols);
            c += S::LEN;
        }
        if c < cols {
            let (w, x) = (padded::<_, R>(w, c, cols), padded::<_, N>(x, c, cols));
            step::<S, R, N>(&mut sums, w.as_ptr().cast(), x.as_ptr().cast(), MAX_LEN);
        }
        for i in 0..N {
            for r in 0..R {
                tile[i * stride + r] = sums[i][r].total();
            }
        }
    }
    N
}

/// Adds `S::LEN` columns of `R` weight rows times `N` activation rows; rows lie `stride` elements apart.
#[inline(always)]
pub(super) unsafe fn step<S: Step, const R: usize, const N: usize>(
    sums: &mut [[S::Sums; R]; N],
    w: *const S::Weight,
    x: *const S::Input,
    stride: usize,
) {
    // SAFETY: the caller promises the instruction set and `LEN` elements in each of the rows.
    unsafe {
        let mut weights = [S::weights(w); R];
        for (r, weights) in weights.iter_mut().enumerate().skip(1) {
            *weights = S::weights(w.add(r * stride));
        }
        for (i, sums) in sums.iter_mut().enumerate() {
            let inputs = S::inputs(x.add(i * stride));
            for (sums, weights) in sums.iter_mut().zip(weights) {
                *sums = S::add(*sums, weights, inputs);
            }
        }
    }
}

/// [`scalar::xor_words`] in eight registers, which are folded at the end.
#[inline(always)]
pub(super) unsafe fn xor_lanes<V: Load<f32>>(bytes: &[u8]) -> u64 {
    let blocks = bytes.chunks_exact(8 * size_of::<V>());
    let rest = scalar::xor_words(blocks.remainder());
    // SAFETY: a block is eight registers long, and the bytes of a register can be read while it lives. The caller
    // promises the instruction set.
    unsafe {
        let mut sums = [V::zero(); 8];
        for block in blocks {
            for (i, sum) in sums.iter_mut().enumerate() {
                let pointer = block.as_ptr().add(i * size_of::<V>());
                V::prefetch(pointer.wrapping_add(4 * AHEAD_BYTES));
                *sum = sum.xor(V::load(pointer.cast()));
            }
        }
        let sums = std::slice::from_raw_parts(sums.as_ptr().cast(), size_of_val(&sums));
        scalar::xor_words(sums) ^ rest
    }
}

/// The columns from `c` of each row, filled up with zeros.
pub(super) fn padded<T: Copy + Default, const ROWS: usize>(
    rows: &[T],
    c: usize,
    cols: usize,
) -> [[T; MAX_LEN]; ROWS] {
    let mut padded = [[T::default(); MAX_LEN]; ROWS];
    for (padded, row) in padded.iter_mut().zip(rows.chunks_exact(cols)) {
        padded[..cols - c].copy_from_slice(&row[c..]);
    }
    padded
}
