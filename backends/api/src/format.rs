//! How a weight is stored. A property of the weight: no model, op or type is named after one.

use std::fmt;

/// Storage format of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE 754 binary32.
    F32,
    /// The upper half of binary32.
    Bf16,
    /// IEEE 754 binary16.
    F16,
}

impl Format {
    /// Bytes of one row of `cols` elements.
    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            Format::F32 => cols * 4,
            Format::Bf16 | Format::F16 => cols * 2,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::F32 => "f32",
            Format::Bf16 => "bf16",
            Format::F16 => "f16",
        })
    }
}
