//! `x[n, :] += sum over k of parts[n, k, :]`, in the order of k, which is the order of expert ids. No atomics: where a route was
//! computed changes the sum by that expert's own rounding only.

use bytemuck::{Pod, Zeroable};

use super::{Binding, OpSpec, read, read_write, words};
use crate::View;

/// Adds the experts' rows to the residual stream.
#[derive(Debug, Clone)]
pub struct Combine {
    /// f32 `[n_rows, hidden]`, updated in place.
    pub x: View,
    /// f32 `[n_rows, top_k, hidden]`
    pub parts: View,
    /// i32 `[n_rows, top_k]`: routes with -1 are left out.
    pub ids: View,
    /// Sizes.
    pub p: CombineParams,
}

/// Parameters of [`Combine`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct CombineParams {
    /// Rows of the batch.
    pub n_rows: u32,
    /// Routes of a row.
    pub top_k: u32,
    /// Width of the residual stream.
    pub hidden: u32,
}

impl OpSpec for Combine {
    fn name(&self) -> &'static str {
        "combine"
    }

    fn bindings(&self) -> Vec<Binding<'_>> {
        let (n, k, h) = (self.p.n_rows as usize, self.p.top_k as usize, self.p.hidden as usize);
        vec![
            read_write("x", &self.x, words(n * h)),
            read("parts", &self.parts, words(n * k * h)),
            read("ids", &self.ids, words(n * k)),
        ]
    }

    fn params(&self) -> &[u8] {
        bytemuck::bytes_of(&self.p)
    }

    fn bytes(&self) -> u64 {
        words(self.p.n_rows as usize * (2 + self.p.top_k as usize) * self.p.hidden as usize) as u64
    }

    fn flops(&self) -> u64 {
        self.p.n_rows as u64 * self.p.top_k as u64 * self.p.hidden as u64
    }

    fn check_shape(&self) {}
}
