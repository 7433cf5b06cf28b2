//! The fast paths: the pool's threads, the best instructions the CPU has, each weight read once for all rows of a batch.

mod attention;
mod embed;
mod expert_mlp;
mod gated_delta;
mod matmul;
mod route;
mod scratch;
mod short_conv;
mod top_logits;

use std::ops::Range;

use freetoken_backend::{Format, Op, Weight};
use half::{bf16, f16};

use scratch::Rounded;
pub(crate) use scratch::Scratch;

use crate::{
    experts::{Matrices, find},
    isa::{self, Block, Isa, WeightRows, n_blocks},
    memory::slice,
    parallel::for_each_row,
    pool::Pool,
    reference,
    stored::Stored,
};

/// Rows of a batch that a task multiplies before it turns to the next ones: their activations stay in L2.
const ROW_BLOCK: usize = 32;

/// How ops are run fast.
pub(crate) struct Fast {
    pub(crate) pool: Pool,
    pub(crate) isa: Isa,
    /// Whether activations may be rounded to bf16 in front of bf16 weights.
    pub(crate) bf16: bool,
    /// Whether they may be rounded to whole numbers in front of 4-bit codes.
    pub(crate) nibbles: bool,
}

/// Rows that a weight multiplies, one after the other.
#[derive(Clone, Copy)]
enum Activations<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    /// As many blocks a row as its columns fill.
    Blocks(&'a [Block]),
}

impl Activations<'_> {
    /// Some of the rows.
    fn rows(&self, rows: Range<usize>, width: usize) -> Self {
        let range = rows.start * width..rows.end * width;
        match self {
            Activations::F32(x) => Activations::F32(&x[range]),
            Activations::Bf16(x) => Activations::Bf16(&x[range]),
            Activations::Blocks(x) => {
                let n = n_blocks(width);
                Activations::Blocks(&x[rows.start * n..rows.end * n])
            }
        }
    }
}

impl Fast {
    /// Runs one op.
    pub(crate) fn run(&self, op: &Op, scratch: &mut Scratch) {
        match op {
            Op::Embed(op) => embed::embed(self, op),
            Op::MatMul(op) => matmul::matmul(self, op, scratch),
            Op::RopeCache(op) => reference::rope_cache(op),
            Op::Attention(op) => attention::attention(self, op, scratch),
            Op::ShortConv(op) => short_conv::short_conv(self, op, scratch),
            Op::GatedDelta(op) => gated_delta::gated_delta(self, op, scratch),
            Op::Route(op) => route::route(self, op, scratch),
            Op::ExpertMlp(op) => {
                expert_mlp::expert_mlp(self, op, slice(&op.ids), &|id| find(op, id), scratch)
            }
            Op::Combine(op) => reference::combine(op),
            Op::EditLogits(op) => reference::edit_logits(op),
            Op::TopLogits(op) => top_logits::top_logits(self, op, scratch),
        }
    }

    /// The experts of a route point, those that have matrices.
    pub(crate) fn expert_mlp<'a>(
        &self,
        op: &freetoken_backend::ExpertMlp,
        ids: &[i32],
        find: &(dyn Fn(usize) -> Option<Matrices<'a>> + Sync),
        scratch: &mut Scratch,
    ) {
        expert_mlp::expert_mlp(self, op, ids, find, scratch);
    }

    /// Rows rounded to what a weight of this format multiplies fastest; `None` where that is f32.
    fn rounded<'a>(
        &self,
        format: Format,
        n_rows: usize,
        width: usize,
        row: impl Fn(usize) -> &'a [f32] + Sync,
        into: &'a mut Rounded,
    ) -> Option<Activations<'a>> {
        match format {
            Format::Bf16 if self.bf16 => {
                let halves = &mut into.halves[..n_rows * width];
                for_each_row(&self.pool, halves, width, |i, out| isa::to_bf16(self.isa, row(i), out));
                Some(Activations::Bf16(halves))
            }
            Format::Nvfp4 | Format::Mxfp4 if self.nibbles => {
                let blocks = &mut into.blocks[..n_rows * n_blocks(width)];
                let width = n_blocks(width);
                for_each_row(&self.pool, blocks, width, |i, out| isa::to_blocks(self.isa, row(i), out));
                Some(Activations::Blocks(blocks))
            }
            _ => None,
        }
    }

    /// Rows as a weight of this format takes them.
    fn activations<'a>(
        &self,
        format: Format,
        x: &'a [f32],
        width: usize,
        into: &'a mut Rounded,
    ) -> Activations<'a> {
        let row = |i: usize| &x[i * width..][..width];
        self.rounded(format, x.len() / width, width, row, into).unwrap_or(Activations::F32(x))
    }

    /// `tile[i * rows + r] = weight[r] . x[i]`.
    fn dot(&self, w: Stored<'_>, x: Activations<'_>, tile: &mut [f32]) {
        let n = tile.len() / w.rows;
        match x {
            Activations::Bf16(x) => {
                isa::dot_tile_bf16(self.isa, bytemuck::cast_slice(w.codes), w.rows, x, n, w.cols, tile);
            }
            Activations::Blocks(x) => isa::dot_tile_nibbles(self.isa, w, x, n, tile),
            Activations::F32(x) => {
                let plain = match w.format {
                    Format::F32 => WeightRows::F32(bytemuck::cast_slice(w.codes)),
                    Format::Bf16 => WeightRows::Bf16(bytemuck::cast_slice(w.codes)),
                    Format::F16 => WeightRows::F16(bytemuck::cast_slice(w.codes)),
                    Format::Fp8 | Format::Nvfp4 | Format::Mxfp4 => {
                        return isa::dot_tile_scaled(self.isa, w, x, n, tile);
                    }
                };
                isa::dot_tile(self.isa, plain, w.rows, x, n, w.cols, tile);
            }
        }
    }
}

/// `out = x / sqrt(mean(x^2) + eps) * weight`
fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = reference::rms_scale(x, eps);
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * w;
    }
}

/// Row `row` of a weight that is codes only, as f32.
fn widen(weight: &Weight, row: usize, out: &mut [f32]) {
    let range = row * weight.cols..(row + 1) * weight.cols;
    match weight.format {
        Format::F32 => out.copy_from_slice(&slice::<f32>(&weight.view)[range]),
        Format::Bf16 => {
            out.iter_mut().zip(&slice::<bf16>(&weight.view)[range]).for_each(|(out, v)| *out = v.to_f32());
        }
        Format::F16 => {
            out.iter_mut().zip(&slice::<f16>(&weight.view)[range]).for_each(|(out, v)| *out = v.to_f32());
        }
        Format::Fp8 | Format::Nvfp4 | Format::Mxfp4 => unreachable!("refused by the op's check"),
    }
}
