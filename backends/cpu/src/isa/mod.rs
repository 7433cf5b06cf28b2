//! Dot products of weight rows with activation rows, on the instruction set that the CPU has.
//!
//! ```text
//! tile[n * rows + r] = sum over c of w[r, c] * x[n, c]        accumulated in f32
//! ```
//!
//! The loops are here, once: `dot_rows` cuts the work into register tiles, `dot_tile_of` runs one. An instruction
//! set adds how a register is loaded and multiplied (`Lanes`, `Load`). With one activation row the weights pass as
//! four streams from DRAM, with software prefetch, and memory is the bound. With more, each weight that was loaded is
//! used for four activation rows, and the multiply units are the bound. `scalar` is the reference.
//!
//! Weights with scales have loops of their own (`scaled`), since a step there ends with its group and a code is no whole byte.
//! Nothing here knows threads or models.

#![allow(unsafe_code)] // Loads through pointers, and calls of code for an instruction set that was detected.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod nibbles;
mod scalar;
mod scaled;
mod tile;

use freetoken_backend::Format;
use half::{bf16, f16};

use crate::stored::Stored;
pub(crate) use nibbles::{Block, n_blocks};
use scaled::Scaled;

/// An instruction set of this CPU. That a value exists is the proof that the CPU has it.
#[derive(Clone, Copy)]
pub(crate) struct Isa(&'static Kernels);

impl Isa {
    /// The plain Rust reference, which every CPU runs.
    pub(crate) const SCALAR: Self = Self(&scalar::KERNELS);

    /// The fastest instruction set of this CPU.
    pub(crate) fn detect() -> Self {
        *Self::available().last().expect("the scalar kernels are always available")
    }

    /// Every instruction set of this CPU that has kernels, slowest first.
    pub(crate) fn available() -> Vec<Self> {
        let mut found = vec![Self::SCALAR];
        #[cfg(target_arch = "x86_64")]
        {
            if avx2::detected() {
                found.push(Self(&avx2::KERNELS));
            }
            if avx512::detected() {
                found.push(Self(&avx512::KERNELS));
            }
            if avx512::detected_bf16() {
                found.push(Self(&avx512::KERNELS_BF16));
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            found.push(Self(&neon::KERNELS));
        }
        found
    }

    /// Whether it multiplies bf16 by itself, so that rounding activations to bf16 pays.
    pub(crate) fn multiplies_bf16(self) -> bool {
        self.0.multiplies_bf16
    }

    /// Whether it multiplies 4-bit codes with whole numbers faster than with f32.
    pub(crate) fn multiplies_nibbles(self) -> bool {
        self.0.nibbles.is_some()
    }

    /// `scalar`, `AVX2`, `AVX-512`, `AVX-512 BF16` or `NEON`.
    pub(crate) fn name(self) -> &'static str {
        self.0.name
    }
}

impl std::fmt::Debug for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Weights `[rows, cols]`, row-major.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WeightRows<'a> {
    /// IEEE single precision.
    F32(&'a [f32]),
    /// The upper half of an f32.
    Bf16(&'a [bf16]),
    /// IEEE half precision.
    F16(&'a [f16]),
}

/// One key or value row of the cache, `[head_dim]`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KvRow<'a> {
    /// IEEE single precision.
    F32(&'a [f32]),
    /// The upper half of an f32.
    Bf16(&'a [bf16]),
}

/// `tile[n, rows] = x[n, cols] * w[rows, cols]^T`, accumulated in f32.
///
/// Each call starts cold streams: half a megabyte of weights a call keeps that below a few percent of the bandwidth.
///
/// # Panics
/// If a slice does not have the length that its shape states.
pub(crate) fn dot_tile(
    isa: Isa,
    w: WeightRows<'_>,
    rows: usize,
    x: &[f32],
    n: usize,
    cols: usize,
    tile: &mut [f32],
) {
    let Isa(kernels) = isa;
    match w {
        WeightRows::F32(w) => dot(kernels.dot_f32, w, rows, x, n, cols, tile),
        WeightRows::Bf16(w) => dot(kernels.dot_bf16, w, rows, x, n, cols, tile),
        WeightRows::F16(w) => dot(kernels.dot_f16, w, rows, x, n, cols, tile),
    }
}

/// [`dot_tile`] with activations that [`to_bf16`] rounded: twice the multiplies an instruction where the CPU has a bf16
/// dot product (which takes subnormals as zero), the same sums elsewhere.
///
/// # Panics
/// If a slice does not have the length that its shape states.
pub(crate) fn dot_tile_bf16(
    isa: Isa,
    w: &[bf16],
    rows: usize,
    x: &[bf16],
    n: usize,
    cols: usize,
    tile: &mut [f32],
) {
    dot(isa.0.dot_bf16_bf16, w, rows, x, n, cols, tile);
}

/// `tile[n, rows] = x[n, cols] * w[rows, cols]^T` of a weight with scales, accumulated in f32.
///
/// # Panics
/// If a slice does not have the length that its shape states, or the format has no scales.
pub(crate) fn dot_tile_scaled(isa: Isa, w: Stored<'_>, x: &[f32], n: usize, tile: &mut [f32]) {
    let Stored { format, rows, cols, codes, scales, globals } = w;
    assert_eq!(Some(x.len()), n.checked_mul(cols), "activations are [{n}, {cols}]");
    check_scaled(&w, n, tile);
    let kernel = match format {
        Format::Fp8 => isa.0.dot_fp8,
        Format::Nvfp4 => isa.0.dot_nvfp4,
        Format::Mxfp4 => isa.0.dot_mxfp4,
        Format::F32 | Format::Bf16 | Format::F16 => panic!("{format} has no scales"),
    };
    // SAFETY: the kernel comes from an `Isa`, so the CPU has its instructions.
    unsafe { kernel(Scaled { codes, scales, rows, cols }, x, n, tile) }
    scale_rows(globals, tile);
}

/// Splits a row of activations into whole numbers for [`dot_tile_nibbles`].
///
/// # Panics
/// If `out` has not a block for each 128 columns, or the instruction set does not multiply them.
pub(crate) fn to_blocks(isa: Isa, x: &[f32], out: &mut [Block]) {
    let kernels = isa.0.nibbles.expect("an instruction set that multiplies nibbles");
    // SAFETY: the kernel comes from an `Isa`, so the CPU has its instructions.
    unsafe { (kernels.to_blocks)(x, out) }
}

/// [`dot_tile_scaled`] of a weight with 4-bit codes and activations that [`to_blocks`] rounded.
///
/// # Panics
/// If a slice does not have the length that its shape states, or the instruction set does not multiply them.
pub(crate) fn dot_tile_nibbles(isa: Isa, w: Stored<'_>, x: &[Block], n: usize, tile: &mut [f32]) {
    let Stored { format, rows, cols, codes, scales, globals } = w;
    assert_eq!(Some(x.len()), n.checked_mul(n_blocks(cols)), "activations are [{n}, {cols}]");
    check_scaled(&w, n, tile);
    let kernels = isa.0.nibbles.expect("an instruction set that multiplies nibbles");
    let kernel = match format {
        Format::Nvfp4 => kernels.dot_nvfp4,
        Format::Mxfp4 => kernels.dot_mxfp4,
        Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8 => panic!("{format} has no 4-bit codes"),
    };
    // SAFETY: the kernel comes from an `Isa`, so the CPU has its instructions.
    unsafe { kernel(Scaled { codes, scales, rows, cols }, x, n, tile) }
    scale_rows(globals, tile);
}

fn check_scaled(w: &Stored<'_>, n: usize, tile: &[f32]) {
    let Stored { format, rows, cols, codes, scales, globals } = w;
    assert!(format.takes_cols(*cols), "{format} in whole groups");
    assert_eq!(Some(codes.len()), rows.checked_mul(format.row_bytes(*cols)), "codes of [{rows}, {cols}]");
    assert_eq!(scales.len(), rows * format.scale_row_bytes(*cols), "scales of [{rows}, {cols}]");
    assert_eq!(globals.len() * 4, rows * format.global_row_bytes(), "globals of [{rows}, {cols}]");
    assert_eq!(Some(tile.len()), n.checked_mul(*rows), "the tile is [{n}, {rows}]");
}

fn scale_rows(globals: &[f32], tile: &mut [f32]) {
    if !globals.is_empty() {
        for row in tile.chunks_exact_mut(globals.len()) {
            row.iter_mut().zip(globals).for_each(|(value, global)| *value *= global);
        }
    }
}

/// `sum of q[c] * k[c]`, both `[head_dim]`.
///
/// # Panics
/// If the lengths differ.
pub(crate) fn dot_kv(isa: Isa, q: &[f32], k: KvRow<'_>) -> f32 {
    // SAFETY: `isa` exists, so the CPU has the instructions of its kernels.
    unsafe {
        match k {
            KvRow::F32(k) => (isa.0.row_f32)(q, k),
            KvRow::Bf16(k) => (isa.0.row_bf16)(q, k),
        }
    }
}

/// `acc[c] += p * v[c]`, both `[head_dim]`.
///
/// # Panics
/// If the lengths differ.
pub(crate) fn axpy_kv(isa: Isa, p: f32, v: KvRow<'_>, acc: &mut [f32]) {
    // SAFETY: `isa` exists, so the CPU has the instructions of its kernels.
    unsafe {
        match v {
            KvRow::F32(v) => (isa.0.axpy_f32)(p, v, acc),
            KvRow::Bf16(v) => (isa.0.axpy_bf16)(p, v, acc),
        }
    }
}

/// One row of the delta rule for one head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaRow<'a> {
    /// What is left of the state.
    pub(crate) decay: f32,
    /// How far the state is corrected.
    pub(crate) beta: f32,
    /// `[key_dim]`
    pub(crate) q: &'a [f32],
    /// `[key_dim]`
    pub(crate) k: &'a [f32],
    /// `[value_dim]`
    pub(crate) v: &'a [f32],
}

/// `S = decay S;  u = beta (v - S^T k);  S += k u^T;  out = S^T q` over a state S `[key_dim, value_dim]`.
///
/// # Panics
/// If a slice does not have the length that its shape states.
pub(crate) fn delta(isa: Isa, row: DeltaRow<'_>, state: &mut [f32], out: &mut [f32]) {
    assert_eq!(row.q.len(), row.k.len(), "q and k are as wide");
    assert_eq!(row.v.len(), out.len(), "v and out are as wide");
    assert_eq!(Some(state.len()), row.k.len().checked_mul(row.v.len()), "the state is [key_dim, value_dim]");
    // SAFETY: `isa` exists, so the CPU has the instructions of its kernels.
    unsafe { (isa.0.delta)(row, state, out) }
}

/// Rounds `x` to bf16, to nearest, ties to even; a NaN stays a NaN.
///
/// # Panics
/// If the lengths differ.
pub(crate) fn to_bf16(isa: Isa, x: &[f32], out: &mut [bf16]) {
    // SAFETY: `isa` exists, so the CPU has the instructions of its kernels.
    unsafe { (isa.0.to_bf16)(x, out) }
}

/// The exclusive or of the little-endian words of `bytes`, the last one filled up with zeros: the cheapest use of every
/// byte, and so a measure of how fast they can be read.
pub(crate) fn xor_words(isa: Isa, bytes: &[u8]) -> u64 {
    // SAFETY: `isa` exists, so the CPU has the instructions of its kernels.
    unsafe { (isa.0.xor_words)(bytes) }
}

/// Weights, rows, inputs, n, cols, tile.
type Dot<W, X> = unsafe fn(&[W], usize, &[X], usize, usize, &mut [f32]);

/// Weights, inputs, n, tile.
type DotScaled = unsafe fn(Scaled<'_>, &[f32], usize, &mut [f32]);

/// The functions compiled for one instruction set; each may only be called on a CPU that has it.
struct Kernels {
    name: &'static str,
    multiplies_bf16: bool,
    dot_f32: Dot<f32, f32>,
    dot_bf16: Dot<bf16, f32>,
    dot_f16: Dot<f16, f32>,
    dot_bf16_bf16: Dot<bf16, bf16>,
    dot_fp8: DotScaled,
    dot_nvfp4: DotScaled,
    dot_mxfp4: DotScaled,
    nibbles: Option<&'static NibbleKernels>,
    row_f32: unsafe fn(&[f32], &[f32]) -> f32,
    row_bf16: unsafe fn(&[f32], &[bf16]) -> f32,
    axpy_f32: unsafe fn(f32, &[f32], &mut [f32]),
    axpy_bf16: unsafe fn(f32, &[bf16], &mut [f32]),
    delta: unsafe fn(DeltaRow<'_>, &mut [f32], &mut [f32]),
    to_bf16: unsafe fn(&[f32], &mut [bf16]),
    xor_words: unsafe fn(&[u8]) -> u64,
}

/// Those that multiply 4-bit codes with whole numbers.
struct NibbleKernels {
    to_blocks: unsafe fn(&[f32], &mut [Block]),
    dot_nvfp4: DotNibbles,
    dot_mxfp4: DotNibbles,
}

/// Weights, inputs, n, tile.
type DotNibbles = unsafe fn(Scaled<'_>, &[Block], usize, &mut [f32]);

/// Calls a kernel that was taken from an [`Isa`].
fn dot<W, X>(kernel: Dot<W, X>, w: &[W], rows: usize, x: &[X], n: usize, cols: usize, tile: &mut [f32]) {
    assert_eq!(Some(w.len()), rows.checked_mul(cols), "weights are [{rows}, {cols}]");
    assert_eq!(Some(x.len()), n.checked_mul(cols), "activations are [{n}, {cols}]");
    assert_eq!(Some(tile.len()), n.checked_mul(rows), "the tile is [{n}, {rows}]");
    // SAFETY: the kernel comes from an `Isa`, so the CPU has its instructions.
    unsafe { kernel(w, rows, x, n, cols, tile) }
}

/// Defines `KERNELS` for a type of [`tile::Lanes`], each function compiled with the instruction set's features.
macro_rules! kernels {
    ($name:literal, $features:literal, $lanes:ty, $nibbles:expr) => {
        pub(super) const KERNELS: Kernels = Kernels {
            name: $name,
            multiplies_bf16: false,
            dot_f32: dot::<f32, f32>,
            dot_bf16: dot::<bf16, f32>,
            dot_f16: dot::<f16, f32>,
            dot_bf16_bf16: dot::<bf16, bf16>,
            dot_fp8: scaled::<Fp8>,
            dot_nvfp4: scaled::<Nvfp4>,
            dot_mxfp4: scaled::<Mxfp4>,
            nibbles: $nibbles,
            row_f32: row::<f32>,
            row_bf16: row::<bf16>,
            axpy_f32: axpy::<f32>,
            axpy_bf16: axpy::<bf16>,
            delta,
            to_bf16,
            xor_words,
        };

        #[target_feature(enable = $features)]
        fn dot<W: Copy + Default, X: Copy + Default>(
            w: &[W],
            rows: usize,
            x: &[X],
            n: usize,
            cols: usize,
            tile: &mut [f32],
        ) where
            $lanes: Load<W> + Load<X>,
        {
            // SAFETY: this function has the features, and so has the CPU that runs it.
            unsafe { dot_rows::<Fma<$lanes, W, X>>(w, rows, x, n, cols, tile) }
        }

        #[target_feature(enable = $features)]
        fn scaled<C: Code>(w: Scaled<'_>, x: &[f32], n: usize, tile: &mut [f32]) {
            // SAFETY: this function has the features, and so has the CPU that runs it.
            unsafe { dot_scaled::<C, $lanes>(w, x, n, tile) }
        }

        #[target_feature(enable = $features)]
        fn row<K: Copy + Default>(q: &[f32], k: &[K]) -> f32
        where
            $lanes: Load<K>,
        {
            // SAFETY: this function has the features, and so has the CPU that runs it.
            unsafe { dot_row::<Fma<$lanes, K, f32>>(k, q) }
        }

        #[target_feature(enable = $features)]
        fn axpy<V: scalar::Widen>(p: f32, v: &[V], acc: &mut [f32]) {
            scalar::axpy(p, v, acc);
        }

        #[target_feature(enable = $features)]
        fn delta(row: DeltaRow<'_>, state: &mut [f32], out: &mut [f32]) {
            scalar::delta(row, state, out);
        }

        #[target_feature(enable = $features)]
        fn to_bf16(x: &[f32], out: &mut [bf16]) {
            scalar::to_bf16(x, out);
        }

        #[target_feature(enable = $features)]
        fn xor_words(bytes: &[u8]) -> u64 {
            // SAFETY: this function has the features, and so has the CPU that runs it.
            unsafe { xor_lanes::<$lanes>(bytes) }
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use kernels;

/// Defines [`NibbleKernels`] for a type of [`nibbles::Bytes`].
#[cfg(target_arch = "x86_64")]
macro_rules! nibble_kernels {
    ($name:ident, $module:ident, $features:literal, $bytes:ty) => {
        const $name: NibbleKernels = NibbleKernels {
            to_blocks: $module::to_blocks,
            dot_nvfp4: $module::dot::<Nvfp4>,
            dot_mxfp4: $module::dot::<Mxfp4>,
        };

        mod $module {
            use super::*;

            #[target_feature(enable = $features)]
            pub(super) fn to_blocks(x: &[f32], out: &mut [Block]) {
                nibbles::to_blocks(x, out);
            }

            #[target_feature(enable = $features)]
            pub(super) fn dot<C: Nibbles>(w: Scaled<'_>, x: &[Block], n: usize, tile: &mut [f32]) {
                // SAFETY: this function has the features, and so has the CPU that runs it.
                unsafe { dot_nibbles::<C, $bytes>(w, x, n, tile) }
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
use nibble_kernels;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::row_of;

    /// Values in -1..1 with a few exact zeros, the same for the same seed.
    fn random(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_769) | 1;
        let next = |_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            if state.is_multiple_of(17) { 0.0 } else { state as f32 / 2_147_483_648.0 - 1.0 }
        };
        (0..len).map(next).collect()
    }

    /// Checks `tile` against sums in f64: an error of `cols` roundings of the sum of magnitudes is the most that any
    /// order of f32 additions may leave.
    fn check(w: &[f32], rows: usize, x: &[f32], n: usize, cols: usize, tile: &[f32], case: &str) {
        for i in 0..n {
            for r in 0..rows {
                let terms = w[r * cols..][..cols].iter().zip(&x[i * cols..][..cols]);
                let terms = terms.map(|(w, x)| f64::from(*w) * f64::from(*x));
                let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                let error = (f64::from(tile[i * rows + r]) - sum).abs();
                let bound = (cols + 8) as f64 * f64::from(f32::EPSILON) / 2.0 * size;
                assert!(error <= bound, "{case} [{i}, {r}]: error {error:e}, bound {bound:e}");
            }
        }
    }

    fn check_all_formats(isa: Isa, rows: usize, n: usize, cols: usize) {
        let case = format!("{isa:?} rows {rows} n {n} cols {cols}");
        let (w, x) = (random(rows * cols, 1 + cols as u32), random(n * cols, 1000 + cols as u32));
        let mut tile = vec![f32::NAN; n * rows];
        let mut run = |w: WeightRows<'_>, stored: &[f32]| {
            tile.fill(f32::NAN);
            dot_tile(isa, w, rows, &x, n, cols, &mut tile);
            check(stored, rows, &x, n, cols, &tile, &case);
        };
        run(WeightRows::F32(&w), &w);
        let halves: Vec<f16> = w.iter().map(|&w| f16::from_f32(w)).collect();
        run(WeightRows::F16(&halves), &halves.iter().map(|w| w.to_f32()).collect::<Vec<_>>());
        let rounded =
            |values: &[f32]| -> Vec<bf16> { values.iter().map(|&value| bf16::from_f32(value)).collect() };
        let widened = |values: &[bf16]| -> Vec<f32> { values.iter().map(|value| value.to_f32()).collect() };
        let brains = rounded(&w);
        run(WeightRows::Bf16(&brains), &widened(&brains));

        let x = rounded(&x);
        tile.fill(f32::NAN);
        dot_tile_bf16(isa, &brains, rows, &x, n, cols, &mut tile);
        check(&widened(&brains), rows, &widened(&x), n, cols, &tile, &case);
    }

    #[test]
    fn every_tile_shape_on_every_instruction_set() {
        for isa in Isa::available() {
            for rows in 1..=9 {
                for n in 1..=9 {
                    check_all_formats(isa, rows, n, 37);
                }
            }
        }
    }

    #[test]
    fn every_tail_of_columns_on_every_instruction_set() {
        for isa in Isa::available() {
            for cols in (0..=70).chain([127, 2048]) {
                for (rows, n) in [(5, 1), (6, 5)] {
                    check_all_formats(isa, rows, n, cols);
                }
            }
        }
    }

    /// Rows of a format in which every code meets scales of its own.
    struct ScaledRows {
        format: Format,
        rows: usize,
        cols: usize,
        codes: Vec<u8>,
        scales: Vec<u8>,
        globals: Vec<f32>,
    }

    impl ScaledRows {
        fn new(format: Format, rows: usize, cols: usize) -> Self {
            let mut codes: Vec<u8> =
                (0..rows * format.row_bytes(cols)).map(|i| (i * 167 % 256) as u8).collect();
            let mut scales: Vec<u8> =
                (0..rows * format.scale_row_bytes(cols)).map(|i| (120 + i * 7 % 9) as u8).collect();
            match format {
                Format::Fp8 => {
                    // All codes but the two that are no number.
                    codes.iter_mut().for_each(|code| *code &= if *code & 0x7f == 0x7f { 0xf0 } else { 0xff });
                    for (i, scale) in scales.chunks_exact_mut(4).enumerate() {
                        scale.copy_from_slice(&(0.001 * (1 + i % 5) as f32).to_le_bytes());
                    }
                }
                // All scales, those below the normal numbers too.
                Format::Nvfp4 => scales.iter_mut().enumerate().for_each(|(i, s)| *s = (i * 5 % 127) as u8),
                _ => {}
            }
            let n_globals = rows * format.global_row_bytes() / 4;
            let globals = (0..n_globals).map(|i| 0.25 + i as f32).collect();
            ScaledRows { format, rows, cols, codes, scales, globals }
        }

        fn stored(&self) -> Stored<'_> {
            let ScaledRows { format, rows, cols, codes, scales, globals } = self;
            Stored { format: *format, rows: *rows, cols: *cols, codes, scales, globals }
        }

        fn elements(&self) -> Vec<f32> {
            (0..self.rows).flat_map(|row| row_of(&self.stored(), row)).collect()
        }
    }

    const SCALED: [Format; 3] = [Format::Fp8, Format::Nvfp4, Format::Mxfp4];

    #[test]
    fn scaled_rows_on_every_instruction_set() {
        for isa in Isa::available() {
            for format in SCALED {
                for (rows, n) in (1..=9).flat_map(|rows| (1..=9).map(move |n| (rows, n))) {
                    for cols in if rows + n < 5 { vec![1, 15, 16, 31, 48, 100, 129, 2048] } else { vec![160] }
                    {
                        let cols = if format.takes_cols(cols) { cols } else { cols.next_multiple_of(32) };
                        let w = ScaledRows::new(format, rows, cols);
                        let x = random(n * cols, 7 + cols as u32);
                        let mut tile = vec![f32::NAN; n * rows];
                        dot_tile_scaled(isa, w.stored(), &x, n, &mut tile);
                        let case = format!("{isa:?} {format} rows {rows} n {n} cols {cols}");
                        check(&w.elements(), rows, &x, n, cols, &tile, &case);
                    }
                }
            }
        }
    }

    /// Whole numbers: exact where the activations are, else within what rounding them may cost.
    #[test]
    fn nibbles_with_whole_numbers_on_every_instruction_set() {
        for isa in Isa::available().into_iter().filter(|isa| isa.multiplies_nibbles()) {
            for format in [Format::Nvfp4, Format::Mxfp4] {
                for (rows, n) in (1..=9).flat_map(|rows| (1..=5).map(move |n| (rows, n))) {
                    for cols in [32, 96, 128, 160, 2048] {
                        let w = ScaledRows::new(format, rows, cols);
                        let elements = w.elements();
                        let case = format!("{isa:?} {format} rows {rows} n {n} cols {cols}");
                        let run = |x: &[f32]| {
                            let width = n_blocks(cols);
                            let mut blocks = vec![Block::default(); n * width];
                            for (x, out) in x.chunks_exact(cols).zip(blocks.chunks_exact_mut(width)) {
                                to_blocks(isa, x, out);
                            }
                            let mut tile = vec![f32::NAN; n * rows];
                            dot_tile_nibbles(isa, w.stored(), &blocks, n, &mut tile);
                            tile
                        };
                        let whole = |i: usize| {
                            if i.is_multiple_of(128) { 8191.0 } else { (i * 7919 % 16_383) as f32 - 8191.0 }
                        };
                        let x: Vec<f32> = (0..n * cols).map(|i| whole(i % cols)).collect();
                        check(&elements, rows, &x, n, cols, &run(&x), &case);

                        let x = random(n * cols, 3 + cols as u32);
                        let tile = run(&x);
                        for (i, r) in (0..n).flat_map(|i| (0..rows).map(move |r| (i, r))) {
                            let row = &elements[r * cols..][..cols];
                            let terms =
                                row.iter().zip(&x[i * cols..]).map(|(w, x)| f64::from(*w) * f64::from(*x));
                            let size: f64 = row.iter().map(|w| f64::from(w.abs())).sum();
                            let error = (f64::from(tile[i * rows + r]) - terms.sum::<f64>()).abs();
                            assert!(error <= 6.5e-5 * size, "{case} [{i}, {r}]: {error:e} of {size:e}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn activations_that_are_no_number_stay_so() {
        for isa in Isa::available().into_iter().filter(|isa| isa.multiplies_nibbles()) {
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let w = ScaledRows::new(Format::Nvfp4, 1, 256);
                let (mut x, mut tile) = (vec![0.5; 256], [0.0]);
                x[200] = value;
                let mut blocks = [Block::default(); 2];
                to_blocks(isa, &x, &mut blocks);
                dot_tile_nibbles(isa, w.stored(), &blocks, 1, &mut tile);
                assert!(!tile[0].is_finite(), "{isa:?} {value}");
            }
        }
    }

    /// One column at a time: the value of each code, exactly.
    #[test]
    fn every_code_is_decoded_exactly_on_every_instruction_set() {
        for isa in Isa::available() {
            for format in SCALED {
                for cols in [256, 512] {
                    let w = ScaledRows::new(format, 1, cols);
                    let w = ScaledRows {
                        scales: match format {
                            Format::Fp8 => 1_f32.to_le_bytes().repeat(cols / 128),
                            Format::Nvfp4 => vec![0x38; cols / 16],
                            _ => vec![127; cols / 32],
                        },
                        globals: vec![1.0; w.globals.len()],
                        ..w
                    };
                    for (c, element) in w.elements().iter().enumerate() {
                        let mut x = vec![0.0; cols];
                        x[c] = 1.0;
                        let mut tile = [f32::NAN];
                        dot_tile_scaled(isa, w.stored(), &x, 1, &mut tile);
                        assert_eq!(tile[0], *element, "{isa:?} {format} column {c}");
                    }
                }
            }
        }
    }

    #[test]
    fn empty_shapes_are_nothing_to_do() {
        for isa in Isa::available() {
            dot_tile(isa, WeightRows::F32(&[]), 0, &[1.0, 2.0], 1, 2, &mut []);
            dot_tile(isa, WeightRows::F32(&[1.0, 2.0]), 1, &[], 0, 2, &mut []);
        }
    }

    #[test]
    #[should_panic(expected = "the tile is [1, 2]")]
    fn a_wrong_length_panics() {
        dot_tile(Isa::detect(), WeightRows::F32(&[0.0; 6]), 2, &[0.0; 3], 1, 3, &mut [0.0]);
    }

    #[test]
    fn rounding_is_that_of_half() {
        let corners =
            [0x7f80_0000, 0x7f80_0001, 0x7fff_ffff, 0x7f7f_ffff, 1, 0x8000, 0x8001, 0x1_8000, 0x007f_ffff];
        let sweep =
            (0..=u16::MAX).flat_map(|high| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| (high, low)));
        let bits = sweep.map(|(high, low)| u32::from(high) << 16 | low).chain(corners);
        let x: Vec<f32> = bits.map(f32::from_bits).collect();
        let mut out = vec![bf16::ZERO; x.len()];
        for isa in Isa::available() {
            to_bf16(isa, &x, &mut out);
            for (x, out) in x.iter().zip(&out) {
                assert_eq!(out.to_bits(), bf16::from_f32(*x).to_bits(), "{isa:?} {:#x}", x.to_bits());
            }
        }
    }

    #[test]
    fn attention_rows() {
        for isa in Isa::available() {
            for len in [1, 31, 64, 80, 128, 256] {
                let (q, k) = (random(len, 5), random(len, 6));
                let k_bf16: Vec<bf16> = k.iter().map(|&k| bf16::from_f32(k)).collect();
                let k_widened: Vec<f32> = k_bf16.iter().map(|k| k.to_f32()).collect();
                check(&k, 1, &q, 1, len, &[dot_kv(isa, &q, KvRow::F32(&k))], "f32 keys");
                check(&k_widened, 1, &q, 1, len, &[dot_kv(isa, &q, KvRow::Bf16(&k_bf16))], "bf16 keys");

                let (mut acc, mut acc_bf16) = (q.clone(), q.clone());
                axpy_kv(isa, 0.3, KvRow::F32(&k), &mut acc);
                axpy_kv(isa, 0.3, KvRow::Bf16(&k_bf16), &mut acc_bf16);
                for c in 0..len {
                    assert!((acc[c] - (q[c] + 0.3 * k[c])).abs() <= 1e-6, "{isa:?} f32 values [{c}]");
                    assert!(
                        (acc_bf16[c] - (q[c] + 0.3 * k_widened[c])).abs() <= 1e-6,
                        "{isa:?} bf16 values [{c}]"
                    );
                }
            }
        }
    }

    #[test]
    fn checksums_agree_and_see_every_byte() {
        for len in [0, 1, 7, 8, 9, 511, 512, 513, 1600] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 37 % 256) as u8).collect();
            let word = |chunk: &[u8]| chunk.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
            let expected = bytes.chunks(8).map(word).fold(0, |sum, word| sum ^ word);
            for isa in Isa::available() {
                assert_eq!(xor_words(isa, &bytes), expected, "{isa:?}, {len} bytes");
            }
        }
    }
}
