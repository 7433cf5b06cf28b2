//! See [`freetoken_backend::MatMul`].

use freetoken_backend::MatMul;

use super::{dot, rms_norm, row, silu};
use crate::memory::{slice, slice_mut};

pub(super) fn matmul(op: &MatMul) {
    let (n, width, out_width) = (op.p.n_rows as usize, op.p.in_features as usize, op.p.out_features as usize);
    let x = slice::<f32>(&op.x);
    let out = slice_mut::<f32>(&op.out);
    for i in 0..n {
        let from = op.rows.as_ref().map_or(i, |rows| slice::<i32>(rows)[i] as usize);
        let mut x = x[from * width..][..width].to_vec();
        if let Some(norm) = &op.norm {
            x = rms_norm(&x, &row(norm, 0), op.p.eps);
        }
        let mut y = Vec::new();
        for (p, piece) in op.weight.pieces().iter().enumerate() {
            let bias = op.bias.as_ref().map(|bias| row(&bias[p], 0));
            y.extend(
                (0..piece.rows).map(|r| dot(&row(piece, r), &x) + bias.as_ref().map_or(0.0, |bias| bias[r])),
            );
        }
        if op.is_glu() {
            y = (0..out_width).map(|r| silu(y[r]) * y[out_width + r]).collect();
        }
        for (out, y) in out[i * out_width..][..out_width].iter_mut().zip(y) {
            *out = if op.p.accumulate == 1 { *out + y } else { y };
        }
    }
}
