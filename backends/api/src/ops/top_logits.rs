//! The heavy part of sampling: the k largest logits of a row, and the log of the sum of all exponentials.

use bytemuck::{Pod, Zeroable};

use super::{Binding, OpSpec, read, words, write};
use crate::View;

/// Largest `k` of [`TopLogits`].
pub const MAX_TOP_LOGITS: usize = 256;

/// Reduces each row of the logits to what a sampler needs.
#[derive(Debug, Clone)]
pub struct TopLogits {
    /// i32 `[n_rows, k]`, by descending logit, equal ones by ascending id.
    pub ids: View,
    /// f32 `[n_rows, k]`: the logits of `ids`.
    pub values: View,
    /// f32 `[n_rows]`: `log(sum over the whole row of exp(logit * inverse_temperature))`.
    pub log_sum_exp: View,
    /// f32 `[n_rows, vocab]`
    pub logits: View,
    /// f32 `[n_rows]`
    pub inverse_temperatures: View,
    /// Sizes.
    pub p: TopLogitsParams,
}

/// Parameters of [`TopLogits`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct TopLogitsParams {
    /// Rows of the logits.
    pub n_rows: u32,
    /// Columns of the logits.
    pub vocab: u32,
    /// At most [`MAX_TOP_LOGITS`] and at most `vocab`.
    pub k: u32,
}

impl OpSpec for TopLogits {
    fn name(&self) -> &'static str {
        "top_logits"
    }

    fn bindings(&self) -> Vec<Binding<'_>> {
        let (n, k) = (self.p.n_rows as usize, self.p.k as usize);
        vec![
            write("ids", &self.ids, words(n * k)),
            write("values", &self.values, words(n * k)),
            write("log_sum_exp", &self.log_sum_exp, words(n)),
            read("logits", &self.logits, words(n * self.p.vocab as usize)),
            read("inverse_temperatures", &self.inverse_temperatures, words(n)),
        ]
    }

    fn params(&self) -> &[u8] {
        bytemuck::bytes_of(&self.p)
    }

    fn bytes(&self) -> u64 {
        words(self.p.n_rows as usize * (self.p.vocab + 2 * self.p.k) as usize) as u64
    }

    fn flops(&self) -> u64 {
        2 * self.p.n_rows as u64 * self.p.vocab as u64
    }

    fn check_shape(&self) {
        assert!(
            self.p.k as usize <= MAX_TOP_LOGITS && self.p.k <= self.p.vocab,
            "top_logits: k {}",
            self.p.k
        );
    }
}
