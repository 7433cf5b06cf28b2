//! See [`freetoken_backend::ShortConv`].

use freetoken_backend::{ShortConv, Span};

use super::{dot, row, silu};
use crate::memory::{slice, slice_mut};

pub(super) fn short_conv(op: &ShortConv) {
    let p = &op.p;
    let (channels, n_before) = (p.channels as usize, p.kernel as usize - 1);
    let (x, out) = (slice::<f32>(&op.x), slice_mut::<f32>(&op.out));
    for &Span { first, end, slot, resumes } in &slice::<Span>(&op.spans)[..p.n_sequences as usize] {
        let (first, n_rows) = (first as usize, (end - first) as usize);
        if n_rows == 0 {
            continue;
        }
        let state = &mut slice_mut::<f32>(&op.state)[slot as usize * n_before * channels..];
        for c in 0..channels {
            // The channel over time: the state, then the rows.
            let before = (0..n_before).map(|i| if resumes == 1 { state[i * channels + c] } else { 0.0 });
            let rows = (first..first + n_rows).map(|row| x[row * p.x_width as usize + c]);
            let line: Vec<f32> = before.chain(rows).collect();
            let weight = row(&op.weight, c);
            for t in 0..n_rows {
                out[(first + t) * channels + c] = silu(dot(&weight, &line[t..t + weight.len()]));
            }
            for (i, value) in line[n_rows..].iter().enumerate() {
                state[i * channels + c] = *value;
            }
        }
    }
}
