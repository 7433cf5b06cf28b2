//! The routed experts: `parts[n, k, :] = weights[n, k] * down . (silu(gate . x[n]) * (up . x[n]))` with the matrices of expert
//! `ids[n, k]`. Every route writes its own row, wherever it is computed; nothing is summed here.

use bytemuck::{Pod, Zeroable};

use super::{Binding, OpSpec, experts, read, words, write};
use crate::{Experts, View, Weight};

/// Runs routes through their experts.
#[derive(Debug, Clone)]
pub struct ExpertMlp {
    /// f32 `[n_rows, top_k, hidden]`; a route with id -1 writes nothing. Nobody else may read what a [`super::Combine`] directly behind
    /// takes: a backend may add it without writing it.
    pub parts: View,
    /// f32 `[n_rows, hidden]`
    pub x: View,
    /// i32 `[n_rows, top_k]`
    pub ids: View,
    /// f32 `[n_rows, top_k]`
    pub weights: View,
    /// The experts, and where they are. Routes to an expert of a pool that has no slot write nothing, unless `p.in_place`.
    pub experts: Experts,
    /// Sizes.
    pub p: ExpertMlpParams,
}

/// Parameters of [`ExpertMlp`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct ExpertMlpParams {
    /// Rows of the batch.
    pub n_rows: u32,
    /// Routes of a row.
    pub top_k: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Width inside an expert.
    pub intermediate: u32,
    /// Number of experts.
    pub n_experts: u32,
    /// 1 to read experts of a pool that have no slot from the host bank of their layer, where they lie.
    pub in_place: u32,
}

impl OpSpec for ExpertMlp {
    fn name(&self) -> &'static str {
        "expert_mlp"
    }

    fn bindings(&self) -> Vec<Binding<'_>> {
        let (n, k, h) = (self.p.n_rows as usize, self.p.top_k as usize, self.p.hidden as usize);
        let mut bindings = vec![
            write("parts", &self.parts, words(n * k * h)),
            read("x", &self.x, words(n * h)),
            read("ids", &self.ids, words(n * k)),
            read("weights", &self.weights, words(n * k)),
        ];
        bindings.extend(experts(&self.experts));
        bindings
    }

    fn params(&self) -> &[u8] {
        bytemuck::bytes_of(&self.p)
    }

    /// Expected under uniform routing: each distinct expert once.
    fn bytes(&self) -> u64 {
        let (n, e) = (self.p.n_rows as f64, self.p.n_experts as f64);
        let distinct = e * (1.0 - (1.0 - self.p.top_k as f64 / e).powf(n));
        let rows = words(self.p.n_rows as usize * (1 + self.p.top_k as usize) * self.p.hidden as usize);
        (distinct * self.experts.expert_bytes() as f64) as u64 + rows as u64
    }

    fn flops(&self) -> u64 {
        6 * self.p.n_rows as u64 * self.p.top_k as u64 * self.p.hidden as u64 * self.p.intermediate as u64
    }

    fn check_shape(&self) {
        let (hidden, intermediate) = (self.p.hidden as usize, self.p.intermediate as usize);
        assert_eq!(self.experts.n_experts(), self.p.n_experts as usize, "expert_mlp: experts");
        match &self.experts {
            Experts::InPlace(experts) => {
                for e in experts.iter() {
                    let up_shape = (intermediate, hidden);
                    assert!((e.gate.rows, e.gate.cols) == up_shape && (e.up.rows, e.up.cols) == up_shape);
                    assert_eq!((e.down.rows, e.down.cols), (hidden, intermediate), "expert_mlp: down");
                    assert!(
                        e.gate.format == e.up.format && e.gate.format == e.down.format,
                        "one format an expert"
                    );
                    [&e.gate, &e.up, &e.down].into_iter().for_each(Weight::check);
                }
            }
            Experts::Pool { pool, layer } => {
                assert_eq!(
                    (pool.record.hidden, pool.record.intermediate),
                    (hidden, intermediate),
                    "expert_mlp: record"
                );
                assert!((*layer as usize) < pool.n_layers, "expert_mlp: layer {layer} of {}", pool.n_layers);
                let has_bank = (*layer as usize) < pool.banks.len();
                assert!(
                    self.p.in_place == 0 || has_bank,
                    "expert_mlp: layer {layer} has no bank to read in place"
                );
            }
        }
    }
}
