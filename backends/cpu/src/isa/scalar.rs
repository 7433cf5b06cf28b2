//! Plain Rust, short enough to trust by reading: the reference, and what a CPU without known instructions runs.
//!
//! `axpy`, `delta` and `to_bf16` need no intrinsics: the instruction sets compile them again with their features on.

use super::{
    DeltaRow, Kernels,
    scaled::{Fp8, Mxfp4, Nvfp4, dot_plain},
};
use half::{bf16, f16};

pub(super) const KERNELS: Kernels = Kernels {
    name: "scalar",
    multiplies_bf16: false,
    dot_f32: dot::<f32, f32>,
    dot_bf16: dot::<bf16, f32>,
    dot_f16: dot::<f16, f32>,
    dot_bf16_bf16: dot::<bf16, bf16>,
    dot_fp8: dot_plain::<Fp8>,
    dot_nvfp4: dot_plain::<Nvfp4>,
    dot_mxfp4: dot_plain::<Mxfp4>,
    nibbles: None,
    row_f32: row,
    row_bf16: row,
    axpy_f32: axpy::<f32>,
    axpy_bf16: axpy::<bf16>,
    delta,
    to_bf16,
    xor_words,
};

/// A stored number and its f32 value.
pub(super) trait Widen: Copy {
    fn widen(self) -> f32;
}

impl Widen for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Widen for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl Widen for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

fn dot<W: Widen, X: Widen>(w: &[W], rows: usize, x: &[X], n: usize, cols: usize, tile: &mut [f32]) {
    for i in 0..n {
        for r in 0..rows {
            tile[i * rows + r] = row(&x[i * cols..][..cols], &w[r * cols..][..cols]);
        }
    }
}

fn row<X: Widen, W: Widen>(x: &[X], w: &[W]) -> f32 {
    assert_eq!(x.len(), w.len(), "the rows have one length");
    x.iter().zip(w).map(|(x, w)| x.widen() * w.widen()).sum()
}

/// `acc[c] += p * v[c]`.
#[inline(always)]
pub(super) fn axpy<V: Widen>(p: f32, v: &[V], acc: &mut [f32]) {
    assert_eq!(v.len(), acc.len(), "value row and accumulator have one length");
    for (acc, v) in acc.iter_mut().zip(v) {
        *acc += p * v.widen();
    }
}

/// See [`super::delta`]. Columns are independent: a block of them stays in registers while the rows of the state pass twice.
#[inline(always)]
pub(super) fn delta(row: DeltaRow<'_>, state: &mut [f32], out: &mut [f32]) {
    const BLOCK: usize = 64;
    let blocks = out.len() / BLOCK * BLOCK;
    for column in (0..blocks).step_by(BLOCK) {
        delta_columns::<BLOCK>(row, column, state, out);
    }
    for column in blocks..out.len() {
        delta_columns::<1>(row, column, state, out);
    }
}

#[inline(always)]
fn delta_columns<const N: usize>(row: DeltaRow<'_>, column: usize, state: &mut [f32], out: &mut [f32]) {
    let DeltaRow { decay, beta, q, k, v } = row;
    let (width, columns) = (out.len(), column..column + N);
    let mut known = [0.0_f32; N];
    for (state, k) in state.chunks_exact(width).zip(k) {
        let state: &[f32; N] = state[columns.clone()].try_into().expect("a block of columns");
        known.iter_mut().zip(state).for_each(|(known, s)| *known += k * s);
    }
    let v: &[f32; N] = v[columns.clone()].try_into().expect("a block of columns");
    let u: [f32; N] = std::array::from_fn(|c| beta * (v[c] - decay * known[c]));
    let mut read = [0.0_f32; N];
    for (state, (k, q)) in state.chunks_exact_mut(width).zip(k.iter().zip(q)) {
        let state: &mut [f32; N] = (&mut state[columns.clone()]).try_into().expect("a block of columns");
        for (s, (u, read)) in state.iter_mut().zip(u.iter().zip(&mut read)) {
            *s = decay * *s + k * u;
            *read += q * *s;
        }
    }
    out[columns].copy_from_slice(&read);
}

/// Rounds to nearest, ties to even.
#[inline(always)]
pub(super) fn to_bf16(x: &[f32], out: &mut [bf16]) {
    assert_eq!(x.len(), out.len(), "input and output have one length");
    for (out, x) in out.iter_mut().zip(x) {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        // A NaN with a payload in the low half only would round to infinity: set its quiet bit instead.
        let bits = if x.is_nan() { bits | 0x0040_0000 } else { rounded };
        *out = bf16::from_bits((bits >> 16) as u16);
    }
}

/// The exclusive or of the little-endian words, the last one filled up with zeros.
pub(super) fn xor_words(bytes: &[u8]) -> u64 {
    let (words, tail) = bytes.as_chunks();
    let mut last = [0; 8];
    last[..tail.len()].copy_from_slice(tail);
    words.iter().chain([&last]).fold(0, |sum, word| sum ^ u64::from_le_bytes(*word))
}
