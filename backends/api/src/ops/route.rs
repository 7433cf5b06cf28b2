//! The router of a MoE layer: norm, gate, softmax over all experts, top-k; and the gate of a shared expert.

use bytemuck::{Pod, Zeroable};

use super::{Binding, OpSpec, read, weight, words, write};
use crate::{View, Weight};

/// Chooses experts. Each row's routes come in ascending order of expert id, the order in which [`super::Combine`] adds them;
/// equal scores choose the lower id. Computed in f32 on every backend.
#[derive(Debug, Clone)]
pub struct Route {
    /// i32 `[n_rows, top_k]`; padded rows become -1.
    pub ids: View,
    /// f32 `[n_rows, top_k]`: softmax over all experts, divided by the sum over the chosen with `renormalize`.
    pub weights: View,
    /// f32 `[n_rows, hidden]`: the normed row, which the experts multiply.
    pub normed: View,
    /// f32 `[n_rows, hidden]`
    pub x: View,
    /// RMS norm of `x`, `[1, hidden]`.
    pub norm: Weight,
    /// `[n_experts, hidden]`
    pub router: Weight,
    /// i32 `[n_rows]`: -1 for padding.
    pub sequences: View,
    /// The gate of an expert that every row passes, where there is one.
    pub shared_gate: Option<SharedGate>,
    /// Sizes.
    pub p: RouteParams,
}

/// How much of a shared expert a row takes.
#[derive(Debug, Clone)]
pub struct SharedGate {
    /// f32 `[n_rows]`: `sigmoid(weight . normed[n])`, of padded rows too.
    pub out: View,
    /// `[1, hidden]`
    pub weight: Weight,
}

/// Parameters of [`Route`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct RouteParams {
    /// Rows of the batch.
    pub n_rows: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Rows of the router.
    pub n_experts: u32,
    /// Experts a row.
    pub top_k: u32,
    /// 1 to make the chosen weights sum to one.
    pub renormalize: u32,
    /// Of the norm.
    pub eps: f32,
}

impl OpSpec for Route {
    fn name(&self) -> &'static str {
        "route"
    }

    fn bindings(&self) -> Vec<Binding<'_>> {
        let (n, k, h) = (self.p.n_rows as usize, self.p.top_k as usize, self.p.hidden as usize);
        let mut bindings = vec![
            write("ids", &self.ids, words(n * k)),
            write("weights", &self.weights, words(n * k)),
            write("normed", &self.normed, words(n * h)),
        ];
        bindings.extend(self.shared_gate.as_ref().map(|gate| write("shared_gate.out", &gate.out, words(n))));
        bindings.extend([
            read("x", &self.x, words(n * h)),
            weight("norm", &self.norm),
            weight("router", &self.router),
            read("sequences", &self.sequences, words(n)),
        ]);
        bindings.extend(self.shared_gate.as_ref().map(|gate| weight("shared_gate.weight", &gate.weight)));
        bindings
    }

    fn params(&self) -> &[u8] {
        bytemuck::bytes_of(&self.p)
    }

    fn bytes(&self) -> u64 {
        (self.router.bytes() + words(2 * self.p.n_rows as usize * self.p.hidden as usize)) as u64
    }

    fn flops(&self) -> u64 {
        2 * self.p.n_rows as u64 * self.p.hidden as u64 * self.p.n_experts as u64
    }

    fn check_shape(&self) {
        let p = &self.p;
        assert_eq!(
            (self.router.rows, self.router.cols),
            (p.n_experts as usize, p.hidden as usize),
            "route: router"
        );
        assert_eq!(self.norm.cols, p.hidden as usize, "route: norm");
        self.norm.check_plain("route: norm");
        self.router.check_plain("route: router");
        if let Some(gate) = &self.shared_gate {
            assert_eq!((gate.weight.rows, gate.weight.cols), (1, p.hidden as usize), "route: shared gate");
            gate.weight.check_plain("route: shared gate");
        }
        assert!(p.top_k >= 1 && p.top_k <= p.n_experts, "route: top_k {} of {}", p.top_k, p.n_experts);
    }
}
