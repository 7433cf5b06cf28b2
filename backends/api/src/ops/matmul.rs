//! `out[n, :] (+)= activation(weight . norm(x[row(n), :]) + bias)`: every dense projection of a model.
//!
//! The norm in front and what follows behind belong to the op, so that a decode step needs few kernels: q, k and v with
//! the input norm are one op, gate and up with the post-attention norm and SwiGLU are one, and so is the output head.

use bytemuck::{Pod, Zeroable};

use super::{Binding, OpSpec, matrix, read, read_write, weight, words, write};
use crate::{Matrix, View, Weight};

/// What follows a projection.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    None = 0,
    /// `silu(gate) * up`, the upper half of the rows being gate and the lower half up.
    SiluGlu = 1,
}

/// Multiplies activations with a weight.
#[derive(Debug, Clone)]
pub struct MatMul {
    /// f32 `[n_rows, out_features]`; added to with `accumulate`.
    pub out: View,
    /// f32 `[*, in_features]`
    pub x: View,
    /// i32 `[n_rows]`: the row of `x` that row n takes; row n itself where absent.
    pub rows: Option<View>,
    /// RMS norm of `x` in front, `[1, in_features]`: `x / sqrt(mean(x^2) + eps) * norm`.
    pub norm: Option<Weight>,
    /// `[out_features, in_features]`, twice the rows with a GLU activation; of any format.
    pub weight: Matrix,
    /// `[1, rows]` over the weight's rows, added before the activation, in as many pieces as the weight.
    pub bias: Option<Vec<Weight>>,
    /// Sizes.
    pub p: MatMulParams,
}

/// Parameters of [`MatMul`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct MatMulParams {
    /// Rows of the batch.
    pub n_rows: u32,
    /// Columns of the weight.
    pub in_features: u32,
    /// Columns of `out`.
    pub out_features: u32,
    /// An [`Activation`].
    pub activation: u32,
    /// 1 to add to `out` instead of writing it.
    pub accumulate: u32,
    /// Of the norm.
    pub eps: f32,
}

impl MatMul {
    /// Whether a GLU halves the rows of the weight.
    pub fn is_glu(&self) -> bool {
        self.p.activation == Activation::SiluGlu as u32
    }
}

impl OpSpec for MatMul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn bindings(&self) -> Vec<Binding<'_>> {
        let n = self.p.n_rows as usize;
        let out_bytes = words(n * self.p.out_features as usize);
        // With `rows` the data decides how much of `x` is read: one row at least.
        let x_rows = if self.rows.is_some() { 1 } else { n };
        let mut bindings = vec![
            if self.p.accumulate == 1 { read_write } else { write }("out", &self.out, out_bytes),
            read("x", &self.x, words(x_rows * self.p.in_features as usize)),
        ];
        bindings.extend(self.rows.as_ref().map(|rows| read("rows", rows, words(n))));
        bindings.extend(self.norm.as_ref().map(|norm| weight("norm", norm)));
        bindings.extend(matrix("weight", &self.weight));
        bindings.extend(self.bias.iter().flatten().map(|bias| weight("bias", bias)));
        bindings
    }

    fn params(&self) -> &[u8] {
        bytemuck::bytes_of(&self.p)
    }

    fn bytes(&self) -> u64 {
        let (n, p) = (self.p.n_rows as usize, &self.p);
        (self.weight.bytes() + words(n * (p.in_features + p.out_features) as usize)) as u64
    }

    fn flops(&self) -> u64 {
        2 * self.p.n_rows as u64 * (self.weight.rows() * self.weight.cols()) as u64
    }

    fn check_shape(&self) {
        let (rows, cols) = (self.weight.rows(), self.weight.cols());
        let out = if self.is_glu() { rows / 2 } else { rows };
        assert_eq!(
            (out, cols),
            (self.p.out_features as usize, self.p.in_features as usize),
            "matmul: weight"
        );
        assert!(!self.is_glu() || rows.is_multiple_of(2), "matmul: a GLU has as many gate rows as up rows");
        self.weight.pieces().iter().for_each(Weight::check);
        if let Some(norm) = &self.norm {
            assert_eq!(norm.cols, cols, "matmul: norm");
            norm.check_plain("matmul: norm");
        }
        if let Some(bias) = &self.bias {
            let pieces = self.weight.pieces();
            assert!(bias.len() == pieces.len(), "matmul: bias in as many pieces as the weight");
            assert!(bias.iter().zip(pieces).all(|(b, w)| b.rows == 1 && b.cols == w.rows), "matmul: bias");
            bias.iter().for_each(|bias| bias.check_plain("matmul: bias"));
        }
    }
}
