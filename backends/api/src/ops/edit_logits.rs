//! Sparse changes to logits before sampling: repetition, presence and frequency penalties.
//!
//! `l = logits[row, id]; l = (l > 0 ? l / repetition : l * repetition) - subtract`

use bytemuck::{Pod, Zeroable};

use super::{Binding, OpSpec, read, read_write, words};
use crate::View;

/// Applies a list of edits, no two to the same place.
#[derive(Debug, Clone)]
pub struct EditLogits {
    /// f32 `[n_rows, vocab]`, updated in place.
    pub logits: View,
    /// [`LogitEdit`] `[capacity]`; the list ends at the first edit with row -1.
    pub edits: View,
    /// Sizes.
    pub p: EditLogitsParams,
}

/// One change.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct LogitEdit {
    /// Row of the logits, or -1 at the end of the list.
    pub row: i32,
    /// Token.
    pub id: u32,
    /// Divides a positive logit and multiplies a negative one; 1 leaves it.
    pub repetition: f32,
    /// Subtracted afterwards.
    pub subtract: f32,
}

impl LogitEdit {
    /// The end of a list.
    pub const END: LogitEdit = LogitEdit { row: -1, id: 0, repetition: 1.0, subtract: 0.0 };

    /// The changed logit.
    pub fn apply(&self, logit: f32) -> f32 {
        let scaled = if logit > 0.0 { logit / self.repetition } else { logit * self.repetition };
        scaled - self.subtract
    }
}

/// Parameters of [`EditLogits`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct EditLogitsParams {
    /// Rows of the logits.
    pub n_rows: u32,
    /// Columns of the logits.
    pub vocab: u32,
    /// Edits that the list has room for.
    pub capacity: u32,
}

impl OpSpec for EditLogits {
    fn name(&self) -> &'static str {
        "edit_logits"
    }

    fn bindings(&self) -> Vec<Binding<'_>> {
        let edits = self.p.capacity as usize * size_of::<LogitEdit>();
        vec![
            read_write("logits", &self.logits, words(self.p.n_rows as usize * self.p.vocab as usize)),
            read("edits", &self.edits, edits),
        ]
    }

    fn params(&self) -> &[u8] {
        bytemuck::bytes_of(&self.p)
    }

    /// Of a full list.
    fn bytes(&self) -> u64 {
        self.p.capacity as u64 * (size_of::<LogitEdit>() as u64 + 8)
    }

    fn flops(&self) -> u64 {
        2 * self.p.capacity as u64
    }

    fn check_shape(&self) {}
}
