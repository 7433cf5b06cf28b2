//! Memory that fast paths write on the way. It grows when an op is recorded, and never in a step.

use std::ops::Range;

use freetoken_backend::{Format, Op};
use half::bf16;

use super::{attention, gated_delta, top_logits};
use crate::isa::{Block, n_blocks};

/// Activations as bf16, or as whole numbers.
#[derive(Default)]
pub(super) struct Rounded {
    pub(super) halves: Vec<bf16>,
    pub(super) blocks: Vec<Block>,
}

impl Rounded {
    fn reserve(&mut self, format: Format, n_rows: usize, width: usize) {
        match format {
            Format::Bf16 => grow(&mut self.halves, n_rows * width),
            Format::Nvfp4 | Format::Mxfp4 => grow(&mut self.blocks, n_rows * n_blocks(width)),
            Format::F32 | Format::F16 | Format::Fp8 => {}
        }
    }
}

/// Buffers shared by all ops of a backend: one op runs at a time.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Normed or gathered activations, `[n_rows, in_features]`; an expert's output rows in order of expert; what the delta rule
    /// takes.
    pub(super) rows: Vec<f32>,
    /// The same, rounded.
    pub(super) rounded: Rounded,
    /// Activations inside the experts, `[routes, intermediate]`.
    pub(super) inner: Vec<f32>,
    /// The same, rounded.
    pub(super) inner_rounded: Rounded,
    /// A norm's weight, or a convolution's.
    pub(super) norm: Vec<f32>,
    /// Router logits `[n_rows, n_experts]`, attention's partial sums, partial sums of exponentials.
    pub(super) partial: Vec<f32>,
    /// (expert, weight) `[n_rows, top_k]`
    pub(super) chosen: Vec<(i32, f32)>,
    /// Candidates of `top_logits`.
    pub(super) keys: Vec<u64>,
    /// Routes in order of expert.
    pub(super) order: Vec<u32>,
    /// Place of a route in that order.
    pub(super) place: Vec<u32>,
    /// Where each group of routes begins.
    pub(super) groups: Vec<usize>,
    /// The expert of each group.
    pub(super) experts: Vec<u32>,
    /// First place of each expert, while routes are sorted.
    pub(super) starts: Vec<u32>,
    /// Rows of each sequence.
    pub(super) row_spans: Vec<Range<usize>>,
    /// Slots of their states.
    pub(super) slot_spans: Vec<Range<usize>>,
    /// Ids of a route point without what the host computes.
    pub(crate) ids: Vec<i32>,
}

fn grow<T: Clone + Default>(buffer: &mut Vec<T>, n: usize) {
    if buffer.len() < n {
        buffer.resize(n, T::default());
    }
}

impl Scratch {
    /// Makes room for an op.
    pub(crate) fn reserve(&mut self, op: &Op, n_workers: usize) {
        match op {
            Op::MatMul(op) => {
                let (n_rows, width) = (op.p.n_rows as usize, op.p.in_features as usize);
                grow(&mut self.rows, n_rows * width);
                self.rounded.reserve(op.weight.format(), n_rows, width);
                grow(&mut self.norm, op.p.in_features as usize);
            }
            Op::Route(op) => {
                grow(&mut self.norm, op.p.hidden as usize);
                grow(&mut self.partial, (op.p.n_rows * op.p.n_experts) as usize);
                grow(&mut self.chosen, (op.p.n_rows * op.p.top_k) as usize);
            }
            Op::ExpertMlp(op) => {
                let routes = (op.p.n_rows * op.p.top_k) as usize;
                let (hidden, inner) = (op.p.hidden as usize, op.p.intermediate as usize);
                grow(&mut self.rows, routes * hidden);
                self.rounded.reserve(op.experts.format(), routes, hidden);
                grow(&mut self.inner, routes * inner);
                self.inner_rounded.reserve(op.experts.format(), routes, inner);
                grow(&mut self.order, routes);
                grow(&mut self.place, routes);
                grow(&mut self.ids, routes);
                let n_experts = op.p.n_experts as usize;
                grow(&mut self.starts, n_experts + 1);
                self.groups.reserve((n_experts + 1).saturating_sub(self.groups.len()));
                self.experts.reserve(n_experts.saturating_sub(self.experts.len()));
            }
            Op::Attention(op) => grow(&mut self.partial, attention::scratch_values(op, n_workers)),
            Op::ShortConv(op) => grow(&mut self.norm, (op.p.channels * op.p.kernel) as usize),
            Op::GatedDelta(op) => {
                grow(&mut self.rows, gated_delta::scratch_values(op));
                for spans in [&mut self.row_spans, &mut self.slot_spans] {
                    spans.reserve((op.p.n_sequences as usize).saturating_sub(spans.len()));
                }
            }
            Op::TopLogits(op) => {
                grow(&mut self.partial, top_logits::scratch_values(op));
                self.keys.reserve(top_logits::MAX_KEYS.saturating_sub(self.keys.len()));
            }
            Op::Embed(_) | Op::RopeCache(_) | Op::Combine(_) | Op::EditLogits(_) => {}
        }
    }
}
