//! The gated delta rule: each value head keeps a matrix S `[key_dim, value_dim]` that forgets, is corrected towards the value of a
//! key, and is asked with the query. Value head `h` takes key head `h / (n_value_heads / n_key_heads)`. For each row of a span:
//!
//! ```text
//! q = q / sqrt(sum q^2 + 1e-6) / sqrt(key_dim)        k = k / sqrt(sum k^2 + 1e-6)
//! beta = sigmoid(b)                                   g = -exp(A_log) * softplus(a + dt_bias)
//! S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = S^T q
//! out = o / sqrt(mean(o^2) + eps) * norm * silu(z)    over value_dim
//! ```
//!
//! Many rows at a time, in chunks of C rows with `G_i = g_1 + ... + g_i` and the state S in front of the chunk, which is the same:
//!
//! ```text
//! A_ij = beta_i exp(G_i - G_j) (k_i . k_j) for j < i, else 0;     M = (I + A)^-1, by forward substitution
//! V' = M diag(beta) V - M diag(beta exp(G)) K S
//! O = diag(exp(G)) Q S + tril(exp(G_i - G_j) (q_i . k_j)) V'      the diagonal included
//! S = exp(G_C) S + sum over i of exp(G_C - G_i) k_i V'_i^T
//! ```

use bytemuck::{Pod, Zeroable};

use super::{Binding, OpSpec, Span, read, read_write, weight, words, write};
use crate::{View, Weight};

/// Runs the recurrence of a layer over the rows of each span, and what stands around it.
#[derive(Debug, Clone)]
pub struct GatedDelta {
    /// f32 `[n_rows, n_value_heads, value_dim]`; padded rows are left alone.
    pub out: View,
    /// f32 `[n_slots, n_value_heads, key_dim, value_dim]`
    pub state: View,
    /// f32 `[n_rows, 2 * n_key_heads * key_dim + n_value_heads * value_dim]`: q, then k, then v, as [`super::ShortConv`] gives them.
    pub qkv: View,
    /// f32 `[n_rows, z_width]`: from column `z_start` on, z `[n_value_heads, value_dim]`.
    pub z: View,
    /// f32 `[n_rows, ba_width]`: from column `ba_start` on, b and then a, `[n_value_heads]` each. May be the same memory as `z`.
    pub ba: View,
    /// f32 `[1, 2 * n_value_heads + value_dim]`: A_log, then dt_bias, then the norm's weight.
    pub constants: Weight,
    /// [`Span`] `[n_sequences]`
    pub spans: View,
    /// Sizes.
    pub p: GatedDeltaParams,
}

/// Parameters of [`GatedDelta`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct GatedDeltaParams {
    /// Rows of the batch.
    pub n_rows: u32,
    /// Number of spans.
    pub n_sequences: u32,
    /// Slots of the state.
    pub n_slots: u32,
    /// Heads of q and k; divides `n_value_heads`.
    pub n_key_heads: u32,
    /// Heads of v, and of the state.
    pub n_value_heads: u32,
    /// Width of a head of q and k.
    pub key_dim: u32,
    /// Width of a head of v.
    pub value_dim: u32,
    /// Columns of `z`.
    pub z_width: u32,
    /// First of them that is read.
    pub z_start: u32,
    /// Columns of `ba`.
    pub ba_width: u32,
    /// First of them that is read.
    pub ba_start: u32,
    /// Of the norm.
    pub eps: f32,
}

impl GatedDeltaParams {
    /// Columns of `qkv`.
    pub fn qkv_width(&self) -> u32 {
        2 * self.n_key_heads * self.key_dim + self.n_value_heads * self.value_dim
    }

    /// f32 values of a slot.
    pub fn state_values(&self) -> u32 {
        self.n_value_heads * self.key_dim * self.value_dim
    }
}

impl OpSpec for GatedDelta {
    fn name(&self) -> &'static str {
        "gated_delta"
    }

    fn bindings(&self) -> Vec<Binding<'_>> {
        let p = &self.p;
        let n = p.n_rows as usize;
        vec![
            write("out", &self.out, words(n * (p.n_value_heads * p.value_dim) as usize)),
            read_write("state", &self.state, words(p.n_slots as usize * p.state_values() as usize)),
            read("qkv", &self.qkv, words(n * p.qkv_width() as usize)),
            read("z", &self.z, words(n * p.z_width as usize)),
            read("ba", &self.ba, words(n * p.ba_width as usize)),
            weight("constants", &self.constants),
            read("spans", &self.spans, p.n_sequences as usize * size_of::<Span>()),
        ]
    }

    fn params(&self) -> &[u8] {
        bytemuck::bytes_of(&self.p)
    }

    /// Of as many sequences as there can be.
    fn bytes(&self) -> u64 {
        let p = &self.p;
        let row = p.qkv_width() + 2 * p.n_value_heads * (p.value_dim + 1);
        let state = 2 * p.n_rows.min(p.n_sequences) as usize * p.state_values() as usize;
        words(p.n_rows as usize * row as usize + state) as u64
    }

    /// Of the recurrence.
    fn flops(&self) -> u64 {
        7 * self.p.n_rows as u64 * self.p.state_values() as u64
    }

    fn check_shape(&self) {
        let p = &self.p;
        let (heads, d) = (p.n_value_heads, p.value_dim);
        assert!(p.n_key_heads > 0 && heads.is_multiple_of(p.n_key_heads), "gated_delta: heads");
        assert!(p.z_start + heads * d <= p.z_width, "gated_delta: z");
        assert!(p.ba_start + 2 * heads <= p.ba_width, "gated_delta: b and a");
        assert_eq!(
            (self.constants.format, self.constants.cols),
            (crate::Format::F32, (2 * heads + d) as usize),
            "gated_delta: constants"
        );
    }
}
