//! `out[n, :] = table[ids[n], :]`

use bytemuck::{Pod, Zeroable};

use super::{Binding, OpSpec, read, weight, words, write};
use crate::{View, Weight};

/// Looks token embeddings up.
#[derive(Debug, Clone)]
pub struct Embed {
    /// f32 `[n_rows, hidden]`
    pub out: View,
    /// i32 `[n_rows]`, each below the table's rows.
    pub ids: View,
    /// `[vocab, hidden]`
    pub table: Weight,
    /// Sizes.
    pub p: EmbedParams,
}

/// Parameters of [`Embed`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct EmbedParams {
    /// Rows of the batch.
    pub n_rows: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Rows of the table.
    pub vocab: u32,
}

impl OpSpec for Embed {
    fn name(&self) -> &'static str {
        "embed"
    }

    fn bindings(&self) -> Vec<Binding<'_>> {
        let n = self.p.n_rows as usize;
        vec![
            write("out", &self.out, words(n * self.table.cols)),
            read("ids", &self.ids, words(n)),
            weight("table", &self.table),
        ]
    }

    fn params(&self) -> &[u8] {
        bytemuck::bytes_of(&self.p)
    }

    fn bytes(&self) -> u64 {
        let row = self.table.format.row_bytes(self.table.cols) + words(self.table.cols);
        self.p.n_rows as u64 * row as u64
    }

    fn flops(&self) -> u64 {
        0
    }

    fn check_shape(&self) {
        assert_eq!(
            (self.table.rows, self.table.cols),
            (self.p.vocab as usize, self.p.hidden as usize),
            "embed"
        );
        self.table.check_plain("embed: table");
    }
}
