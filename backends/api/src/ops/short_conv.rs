//! A causal convolution of each channel over the rows of its sequence, then silu:
//! `out[t, c] = silu(sum over i of weight[c, i] * x[t - (kernel - 1) + i, c])`, without a bias. Rows before the first one of a span
//! come from the state, which ends as the last `kernel - 1` raw inputs.
//!
//! Whoever reads a channel's state of a span must be who writes it; all else is independent.

use bytemuck::{Pod, Zeroable};

use super::{Binding, OpSpec, read, read_write, weight, words, write};
use crate::{View, Weight};

/// Widest kernel.
pub const MAX_CONV_KERNEL: usize = 8;

/// The rows of one sequence in a batch, and its recurrent state. Spans follow each other and do not meet; a row in none of them is
/// padding. Spans that are not empty have slots of their own; an empty one has nothing, and its slot is not looked at.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Span {
    /// Its first row.
    pub first: i32,
    /// One behind its last row.
    pub end: i32,
    /// Where its state lies.
    pub slot: i32,
    /// 1 to go on from the state; 0 to begin with zeros, whatever is in the slot.
    pub resumes: i32,
}

/// Convolves the input of a recurrent layer.
#[derive(Debug, Clone)]
pub struct ShortConv {
    /// f32 `[n_rows, channels]`; padded rows are left alone.
    pub out: View,
    /// f32 `[n_slots, kernel - 1, channels]`: the raw inputs in front of the next row, oldest first.
    pub state: View,
    /// f32 `[n_rows, x_width]`, of which the first `channels` columns are read.
    pub x: View,
    /// `[channels, kernel]`; the last column meets the row itself.
    pub weight: Weight,
    /// i32 `[n_rows]`: the span of a row, -1 for padding.
    pub sequences: View,
    /// [`Span`] `[n_sequences]`
    pub spans: View,
    /// Sizes.
    pub p: ShortConvParams,
}

/// Parameters of [`ShortConv`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct ShortConvParams {
    /// Rows of the batch.
    pub n_rows: u32,
    /// Number of spans.
    pub n_sequences: u32,
    /// Slots of the state.
    pub n_slots: u32,
    /// Columns of `out`.
    pub channels: u32,
    /// Columns of `x`.
    pub x_width: u32,
    /// Taps, from 2 to [`MAX_CONV_KERNEL`].
    pub kernel: u32,
}

impl OpSpec for ShortConv {
    fn name(&self) -> &'static str {
        "short_conv"
    }

    fn bindings(&self) -> Vec<Binding<'_>> {
        let p = &self.p;
        let (n, channels) = (p.n_rows as usize, p.channels as usize);
        vec![
            write("out", &self.out, words(n * channels)),
            read_write("state", &self.state, words(p.n_slots as usize * (p.kernel as usize - 1) * channels)),
            read("x", &self.x, words(n * p.x_width as usize)),
            weight("weight", &self.weight),
            read("sequences", &self.sequences, words(n)),
            read("spans", &self.spans, p.n_sequences as usize * size_of::<Span>()),
        ]
    }

    fn params(&self) -> &[u8] {
        bytemuck::bytes_of(&self.p)
    }

    /// Of as many sequences as there can be.
    fn bytes(&self) -> u64 {
        let p = &self.p;
        let state = 2 * p.n_rows.min(p.n_sequences) * (p.kernel - 1);
        (self.weight.bytes() + words(((2 * p.n_rows + state) * p.channels) as usize)) as u64
    }

    fn flops(&self) -> u64 {
        2 * self.p.n_rows as u64 * self.p.channels as u64 * self.p.kernel as u64
    }

    fn check_shape(&self) {
        let p = &self.p;
        assert!((2..=MAX_CONV_KERNEL).contains(&(p.kernel as usize)), "short_conv: {} taps", p.kernel);
        assert!(p.channels <= p.x_width, "short_conv: {} channels of {} columns", p.channels, p.x_width);
        assert_eq!(
            (self.weight.rows, self.weight.cols),
            (p.channels as usize, p.kernel as usize),
            "short_conv: weight"
        );
        self.weight.check_plain("short_conv: weight");
    }
}
