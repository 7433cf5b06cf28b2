//! The scalar reference of every op: one thread, sums in f64, no cleverness. What other kernels are held against.

mod attention;
mod combine;
mod edit_logits;
mod embed;
mod expert_mlp;
mod gated_delta;
mod matmul;
mod rope_cache;
mod route;
mod short_conv;
mod top_logits;

use freetoken_backend::{Format, Op, Weight, e2m1, e4m3};
use half::{bf16, f16};

pub(crate) use combine::combine;
pub(crate) use edit_logits::edit_logits;
pub(crate) use gated_delta::log_decay;
pub(crate) use rope_cache::rope_cache;
pub(crate) use route::choose;
pub(crate) use top_logits::order;

use crate::stored::Stored;

/// Runs one op.
pub(crate) fn run(op: &Op) {
    match op {
        Op::Embed(op) => embed::embed(op),
        Op::MatMul(op) => matmul::matmul(op),
        Op::RopeCache(op) => rope_cache(op),
        Op::Attention(op) => attention::attention(op),
        Op::ShortConv(op) => short_conv::short_conv(op),
        Op::GatedDelta(op) => gated_delta::gated_delta(op),
        Op::Route(op) => route::route(op),
        Op::ExpertMlp(op) => expert_mlp::expert_mlp(op),
        Op::Combine(op) => combine(op),
        Op::EditLogits(op) => edit_logits(op),
        Op::TopLogits(op) => top_logits::top_logits(op),
    }
}

/// Row `row` of a weight, as f32.
pub(crate) fn row(weight: &Weight, row: usize) -> Vec<f32> {
    row_of(&Stored::of(weight), row)
}

/// The same of a weight in memory.
pub(crate) fn row_of(weight: &Stored<'_>, row: usize) -> Vec<f32> {
    let Stored { format, cols, codes, scales, globals, .. } = weight.part(row..row + 1);
    let global = globals.first().copied().unwrap_or(1.0);
    let scaled = |code: &dyn Fn(usize) -> f32| -> Vec<f32> {
        let group = format.group().expect("a format with scales");
        (0..cols).map(|c| code(c) * format.scale(scales, c / group) * global).collect()
    };
    match format {
        Format::F32 => bytemuck::cast_slice(codes).to_vec(),
        Format::Bf16 => bytemuck::cast_slice::<_, bf16>(codes).iter().map(|v| v.to_f32()).collect(),
        Format::F16 => bytemuck::cast_slice::<_, f16>(codes).iter().map(|v| v.to_f32()).collect(),
        Format::Fp8 => scaled(&|c| e4m3(codes[c])),
        Format::Nvfp4 | Format::Mxfp4 => scaled(&|c| e2m1(codes[c / 2] >> (c % 2 * 4))),
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(&a, &b)| a as f64 * b as f64).sum::<f64>() as f32
}

/// `x / sqrt(mean(x^2) + eps) * weight`
fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let scale = rms_scale(x, eps);
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

/// `1 / sqrt(mean(x^2) + eps)`
pub(crate) fn rms_scale(x: &[f32], eps: f32) -> f32 {
    let mut lanes = [0.0_f64; 8];
    for chunk in x.chunks(8) {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &v)| *lane += v as f64 * v as f64);
    }
    let mean = lanes.iter().sum::<f64>() / x.len() as f64;
    (1.0 / (mean + eps as f64).sqrt()) as f32
}

/// `x * sigmoid(x)`
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// `1 / (1 + exp(-x))`
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}
