//! Rows of x as halves with a power of two each: what kernels of cooperative matrices multiply. Belongs to matmul and to expert_mlp.

use freetoken_backend::Weight;

use super::matmul::THREADS;
use crate::{
    dispatch::{Call, Recorder},
    kernels::HALF_ROWS,
    memory::Slot,
};

/// What to make halves of.
pub(super) struct Rows<'a> {
    pub(super) n: u32,
    /// A multiple of 4, of rows that start at 16 bytes.
    pub(super) cols: u32,
    pub(super) x: &'a Slot,
    /// The row of `x` that each is; they follow each other where absent.
    pub(super) gathered: Option<&'a Slot>,
    pub(super) norm: Option<&'a Weight>,
    /// Of the norm.
    pub(super) eps: f32,
    /// What each is multiplied with.
    pub(super) weights: Option<&'a Slot>,
}

/// f16 `[n, cols]`, and f32 `[n]`: what products of a row are multiplied with. Until the next ones are made.
pub(super) struct HalfRows {
    pub(super) halves: Slot,
    pub(super) scales: Slot,
}

pub(super) fn record(rows: &Rows<'_>, recorder: &mut Recorder<'_>) -> HalfRows {
    let &Rows { n, cols, x, gathered, norm, eps, weights } = rows;
    let bytes = [2 * n as usize * cols as usize, 4 * n as usize];
    let halves = recorder.scratch.get(recorder.gpu, "half_rows.halves", bytes[0]);
    let scales = recorder.scratch.get(recorder.gpu, "half_rows.scales", bytes[1]);
    let made = HalfRows { halves: Slot::whole(&halves), scales: Slot::whole(&scales) };
    let (norm, norm_at, norm_format) = recorder.optional(norm);
    let or_nothing = |slot: Option<&Slot>| slot.cloned().unwrap_or_else(|| recorder.nothing());
    let (gather, weighted) = (gathered.is_some() as u32, weights.is_some() as u32);
    let (gathered, weights) = (or_nothing(gathered), or_nothing(weights));
    recorder.call(Call {
        kernel: &HALF_ROWS,
        constants: vec![
            ("WORKGROUP", THREADS),
            ("NORM", norm_format),
            ("GATHER", gather),
            ("WEIGHTED", weighted),
        ],
        params: &[n, cols, eps.to_bits(), x.at(4), gathered.at(4), norm_at, weights.at(4)],
        slots: vec![made.halves.clone(), made.scales.clone(), x.clone(), gathered, norm, weights],
        chunks: &[],
        workgroups: recorder.grid(n as usize),
    });
    made
}
