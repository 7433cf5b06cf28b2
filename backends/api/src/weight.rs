//! Weights on a device, and where the parts of one lie in a run of bytes.

use std::ops::Range;

use crate::{Format, View};

/// Codes, scales and globals start at a multiple of this many bytes.
const BANK_ALIGN: usize = 256;

/// A row-major matrix `[rows, cols]`, or a vector as `[1, cols]`. Its codes are in one piece, and so are its scales and its
/// globals; where a checkpoint is mapped the three lie apart, on a device they follow each other ([`Banks`]).
#[derive(Debug, Clone)]
pub struct Weight {
    /// Codes: `rows * format.row_bytes(cols)` bytes.
    pub view: View,
    /// Scales, where the format has groups: `rows * format.scale_row_bytes(cols)` bytes.
    pub scales: Option<View>,
    /// f32 `[rows]`, where the format has a global factor.
    pub globals: Option<View>,
    /// How its elements are stored.
    pub format: Format,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
}

impl Weight {
    /// A weight that is codes only. Asserts that its format is.
    pub fn plain(view: View, format: Format, rows: usize, cols: usize) -> Self {
        assert!(format.group().is_none(), "{format} has scales");
        Weight { view, scales: None, globals: None, format, rows, cols }
    }

    /// A weight whose parts lie in `view` as `banks` says.
    pub fn in_banks(view: &View, banks: &Banks, format: Format, rows: usize, cols: usize) -> Self {
        let part = |bytes: &Range<usize>| (!bytes.is_empty()).then(|| view.slice(bytes.clone()));
        let (scales, globals) = (part(&banks.scales), part(&banks.globals));
        Weight { view: view.slice(banks.codes.clone()), scales, globals, format, rows, cols }
    }

    /// Bytes of its codes.
    pub fn code_bytes(&self) -> usize {
        self.rows * self.format.row_bytes(self.cols)
    }

    /// Bytes of its scales.
    pub fn scale_bytes(&self) -> usize {
        self.rows * self.format.scale_row_bytes(self.cols)
    }

    /// Bytes of its globals.
    pub fn global_bytes(&self) -> usize {
        self.rows * self.format.global_row_bytes()
    }

    /// Bytes it takes: codes, scales and globals.
    pub fn bytes(&self) -> usize {
        self.code_bytes() + self.scale_bytes() + self.global_bytes()
    }

    /// Asserts that it has the parts that its format asks for, and whole groups of columns.
    pub(crate) fn check(&self) {
        let Weight { format, cols, .. } = self;
        assert!(format.takes_cols(*cols), "{cols} columns of {format}");
        assert_eq!(self.scales.is_some(), self.scale_bytes() > 0, "scales of {format}");
        assert_eq!(self.globals.is_some(), self.global_bytes() > 0, "globals of {format}");
    }

    /// Asserts that it is codes only.
    pub(crate) fn check_plain(&self, what: &str) {
        assert!(self.format.group().is_none(), "{what}: {} is for matmul and experts", self.format);
    }
}

/// Where the parts of a matrix lie in a run of bytes: codes, scales, globals, each at a multiple of 256 bytes. What a format does
/// not have is empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Banks {
    /// Codes.
    pub codes: Range<usize>,
    /// Scales.
    pub scales: Range<usize>,
    /// Globals.
    pub globals: Range<usize>,
}

impl Banks {
    /// Of a matrix `[rows, cols]` that starts at `start`, a multiple of 256.
    pub fn new(start: usize, format: Format, rows: usize, cols: usize) -> Self {
        assert!(start.is_multiple_of(BANK_ALIGN), "banks start at a multiple of {BANK_ALIGN}");
        let mut end = start;
        let mut bank = |row_bytes: usize| {
            let start = end.next_multiple_of(BANK_ALIGN);
            if row_bytes > 0 {
                end = start + rows * row_bytes;
            }
            start..start + rows * row_bytes
        };
        let codes = bank(format.row_bytes(cols));
        let scales = bank(format.scale_row_bytes(cols));
        Banks { codes, scales, globals: bank(format.global_row_bytes()) }
    }

    /// The end of its last byte.
    pub fn end(&self) -> usize {
        [&self.codes, &self.scales, &self.globals]
            .iter()
            .filter(|b| !b.is_empty())
            .map(|b| b.end)
            .max()
            .unwrap_or(0)
    }

    /// Where the next matrix may start.
    pub fn next(&self) -> usize {
        self.end().next_multiple_of(BANK_ALIGN)
    }

    /// Bytes without the padding between.
    pub fn weight_bytes(&self) -> usize {
        self.codes.len() + self.scales.len() + self.globals.len()
    }

    /// Some of its rows, which are `rows` in all.
    pub fn rows(&self, part: Range<usize>, rows: usize) -> Self {
        let of = |bank: &Range<usize>| {
            let row_bytes = bank.len() / rows;
            bank.start + part.start * row_bytes..bank.start + part.end * row_bytes
        };
        Banks { codes: of(&self.codes), scales: of(&self.scales), globals: of(&self.globals) }
    }
}

/// Weights stacked by rows that one matmul multiplies: q over k over v, gate over up.
///
/// A checkpoint keeps them apart. Where device memory is host memory they stay apart, mapped and not copied; elsewhere
/// the loader brings them together into a matrix of one piece.
#[derive(Debug, Clone)]
pub struct Matrix {
    pieces: Vec<Weight>,
}

impl Matrix {
    /// Stacks the pieces. Asserts that there is one at least and that all have the same number of columns and format.
    pub fn new(pieces: Vec<Weight>) -> Self {
        let first = pieces.first().expect("a matrix has at least one piece");
        assert!(
            pieces.iter().all(|w| w.cols == first.cols && w.format == first.format),
            "pieces of one shape"
        );
        Matrix { pieces }
    }

    /// The pieces, top to bottom.
    pub fn pieces(&self) -> &[Weight] {
        &self.pieces
    }

    /// Rows of all pieces.
    pub fn rows(&self) -> usize {
        self.pieces.iter().map(|w| w.rows).sum()
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.pieces[0].cols
    }

    /// How its elements are stored.
    pub fn format(&self) -> Format {
        self.pieces[0].format
    }

    /// Bytes it takes.
    pub fn bytes(&self) -> usize {
        self.pieces.iter().map(Weight::bytes).sum()
    }
}

impl From<Weight> for Matrix {
    fn from(weight: Weight) -> Self {
        Matrix::new(vec![weight])
    }
}
