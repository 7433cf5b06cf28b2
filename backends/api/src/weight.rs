//! Weights on a device.

use crate::{Format, View};

/// A row-major matrix `[rows, cols]` in one piece, or a vector as `[1, cols]`.
#[derive(Debug, Clone)]
pub struct Weight {
    /// `rows * format.row_bytes(cols)` bytes.
    pub view: View,
    /// How its elements are stored.
    pub format: Format,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
}

impl Weight {
    /// Bytes it takes.
    pub fn bytes(&self) -> usize {
        self.rows * self.format.row_bytes(self.cols)
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
