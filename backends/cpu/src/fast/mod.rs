//! The fast paths: the pool's threads, the best instructions the CPU has, each weight read once for all rows of a batch.

mod attention;
mod embed;
mod expert_mlp;
mod matmul;
mod route;
mod scratch;
mod top_logits;

use std::ops::Range;

use freetoken_backend::{Format, Op, Weight};
use half::{bf16, f16};

pub(crate) use scratch::Scratch;

use crate::{
    experts::{Matrices, find},
    isa::{self, Isa, WeightRows},
    memory::slice,
    parallel::for_each_row,
    pool::Pool,
    reference,
};

/// Rows of a batch that a task multiplies before it turns to the next ones: their activations stay in L2.
const ROW_BLOCK: usize = 32;

/// How ops are run fast.
pub(crate) struct Fast {
    pub(crate) pool: Pool,
    pub(crate) isa: Isa,
    /// Whether activations may be rounded to bf16 in front of bf16 weights.
    pub(crate) bf16: bool,
}

/// Rows that a weight multiplies, one after the other.
#[derive(Clone, Copy)]
enum Activations<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl Activations<'_> {
    /// Some of the rows.
    fn rows(&self, rows: Range<usize>, width: usize) -> Self {
        let range = rows.start * width..rows.end * width;
        match self {
            Activations::F32(x) => Activations::F32(&x[range]),
            Activations::Bf16(x) => Activations::Bf16(&x[range]),
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

    /// Whether a weight of this format takes bf16 activations.
    fn takes_bf16(&self, format: Format) -> bool {
        self.bf16 && format == Format::Bf16
    }

    /// Activations as a weight of this format takes them.
    fn activations<'a>(
        &self,
        format: Format,
        x: &'a [f32],
        width: usize,
        rounded: &'a mut [bf16],
    ) -> Activations<'a> {
        if !self.takes_bf16(format) {
            return Activations::F32(x);
        }
        let rounded = &mut rounded[..x.len()];
        for_each_row(&self.pool, rounded, width, |row, out| {
            isa::to_bf16(self.isa, &x[row * width..][..width], out);
        });
        Activations::Bf16(rounded)
    }

    /// `tile[i * rows + r] = weight[r] . x[i]` for some rows of a weight that lies in `bytes`.
    fn dot(
        &self,
        format: Format,
        bytes: &[u8],
        rows: Range<usize>,
        cols: usize,
        x: Activations<'_>,
        tile: &mut [f32],
    ) {
        let bytes = &bytes[rows.start * format.row_bytes(cols)..rows.end * format.row_bytes(cols)];
        let n = tile.len() / rows.len();
        match x {
            Activations::Bf16(x) => {
                let w: &[bf16] = bytemuck::cast_slice(bytes);
                isa::dot_tile_bf16(self.isa, w, rows.len(), x, n, cols, tile);
            }
            Activations::F32(x) => {
                let w = match format {
                    Format::F32 => WeightRows::F32(bytemuck::cast_slice(bytes)),
                    Format::Bf16 => WeightRows::Bf16(bytemuck::cast_slice(bytes)),
                    Format::F16 => WeightRows::F16(bytemuck::cast_slice(bytes)),
                };
                isa::dot_tile(self.isa, w, rows.len(), x, n, cols, tile);
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

/// Row `row` of a weight as f32.
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
    }
}
