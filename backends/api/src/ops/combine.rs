//! `x[n, :] += sum over k of parts[n, k, :]`, in the order of k, which is the order of expert ids, and then
//! `x[n, :] += gates[n] * rows[n, :]` of a shared expert. No atomics: where a route was computed changes the sum by that expert's
//! own rounding only.

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
    /// The expert that every row passes, where there is one.
    pub shared: Option<SharedExpert>,
    /// Sizes.
    pub p: CombineParams,
}

/// What an expert that every row passes gave.
#[derive(Debug, Clone)]
pub struct SharedExpert {
    /// f32 `[n_rows, hidden]`
    pub rows: View,
    /// f32 `[n_rows]`: what [`super::SharedGate`] left.
    pub gates: View,
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

impl Combine {
    /// Rows that are added to one row of the stream.
    fn n_parts(&self) -> usize {
        self.p.top_k as usize + self.shared.is_some() as usize
    }
}

impl OpSpec for Combine {
    fn name(&self) -> &'static str {
        "combine"
    }

    fn bindings(&self) -> Vec<Binding<'_>> {
        let (n, k, h) = (self.p.n_rows as usize, self.p.top_k as usize, self.p.hidden as usize);
        let mut bindings = vec![
            read_write("x", &self.x, words(n * h)),
            read("parts", &self.parts, words(n * k * h)),
            read("ids", &self.ids, words(n * k)),
        ];
        if let Some(SharedExpert { rows, gates }) = &self.shared {
            bindings.extend([read("shared.rows", rows, words(n * h)), read("shared.gates", gates, words(n))]);
        }
        bindings
    }

    fn params(&self) -> &[u8] {
        bytemuck::bytes_of(&self.p)
    }

    fn bytes(&self) -> u64 {
        words(self.p.n_rows as usize * (2 + self.n_parts()) * self.p.hidden as usize) as u64
    }

    fn flops(&self) -> u64 {
        self.p.n_rows as u64 * self.n_parts() as u64 * self.p.hidden as u64
    }

    fn check_shape(&self) {}
}
