//! A weight as bytes in memory: codes, and the scales and globals that its format has, which may lie anywhere.

use std::ops::Range;

use freetoken_backend::{Banks, Format, Weight};

use crate::memory::slice;

/// Rows of a weight.
#[derive(Clone, Copy)]
pub(crate) struct Stored<'a> {
    pub(crate) format: Format,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// `[rows, format.row_bytes(cols)]`
    pub(crate) codes: &'a [u8],
    /// `[rows, format.scale_row_bytes(cols)]`
    pub(crate) scales: &'a [u8],
    /// `[rows]`, or empty.
    pub(crate) globals: &'a [f32],
}

impl<'a> Stored<'a> {
    /// All rows of a weight.
    pub(crate) fn of(weight: &'a Weight) -> Self {
        Stored {
            format: weight.format,
            rows: weight.rows,
            cols: weight.cols,
            codes: &slice(&weight.view)[..weight.code_bytes()],
            scales: weight.scales.as_ref().map_or(&[], |scales| &slice(scales)[..weight.scale_bytes()]),
            globals: weight.globals.as_ref().map_or(&[], |globals| &slice(globals)[..weight.rows]),
        }
    }

    /// All rows of a matrix in a record.
    pub(crate) fn in_record(
        record: &'a [u8],
        banks: &Banks,
        format: Format,
        rows: usize,
        cols: usize,
    ) -> Self {
        Stored {
            format,
            rows,
            cols,
            codes: &record[banks.codes.clone()],
            scales: &record[banks.scales.clone()],
            globals: bytemuck::cast_slice(&record[banks.globals.clone()]),
        }
    }

    /// Some of the rows.
    pub(crate) fn part(&self, rows: Range<usize>) -> Self {
        let of = |bytes: &'a [u8], row_bytes: usize| &bytes[rows.start * row_bytes..rows.end * row_bytes];
        Stored {
            format: self.format,
            rows: rows.len(),
            cols: self.cols,
            codes: of(self.codes, self.format.row_bytes(self.cols)),
            scales: of(self.scales, self.format.scale_row_bytes(self.cols)),
            globals: if self.globals.is_empty() { self.globals } else { &self.globals[rows] },
        }
    }
}
