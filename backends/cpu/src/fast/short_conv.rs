//! The short convolution in tiles of channels; then the state, a copy of the last rows.

use freetoken_backend::{MAX_CONV_KERNEL, ShortConv, Span, Weight};

use super::{Fast, Scratch, widen};
use crate::{
    memory::{slice, slice_mut},
    parallel::{MAX_TILE_COLS, Rows, for_each_tile, tile_cols},
    reference::silu,
};

pub(super) fn short_conv(fast: &Fast, op: &ShortConv, scratch: &mut Scratch) {
    let p = &op.p;
    let (n, channels, width) = (p.n_rows as usize, p.channels as usize, p.x_width as usize);
    let (kernel, n_before) = (p.kernel as usize, p.kernel as usize - 1);
    let (x, sequences) = (slice::<f32>(&op.x), slice::<i32>(&op.sequences));
    let spans = &slice::<Span>(&op.spans)[..p.n_sequences as usize];
    let weight = &mut scratch.norm[..channels * kernel];
    widen(&Weight::plain(op.weight.view.clone(), op.weight.format, 1, channels * kernel), 0, weight);

    let (weight, state) = (&*weight, slice::<f32>(&op.state));
    let out = &mut slice_mut::<f32>(&op.out)[..n * channels];
    let cols = tile_cols(&fast.pool, channels, 1);
    for_each_tile(&fast.pool, out, channels, Rows::All(n), cols, |_, mut tile| {
        let cols = tile.cols.clone();
        // [kernel, columns of the tile]
        let mut taps = [0.0; MAX_CONV_KERNEL * MAX_TILE_COLS];
        for (i, taps) in taps.chunks_exact_mut(cols.len()).enumerate().take(kernel) {
            taps.iter_mut().zip(cols.clone()).for_each(|(tap, c)| *tap = weight[c * kernel + i]);
        }
        for row in (0..n).filter(|&row| sequences[row] >= 0) {
            let Span { first, slot, resumes, .. } = spans[sequences[row] as usize];
            let out = tile.row(row);
            out.fill(0.0);
            for (i, taps) in taps.chunks_exact(cols.len()).enumerate().take(kernel) {
                // Counted from the state's first row.
                let place = row - first as usize + i;
                let input = match place.checked_sub(n_before) {
                    Some(place) => &x[(first as usize + place) * width..],
                    None if resumes == 1 => &state[(slot as usize * n_before + place) * channels..],
                    None => continue,
                };
                let input = &input[cols.clone()];
                out.iter_mut().zip(taps.iter().zip(input)).for_each(|(out, (tap, x))| *out += tap * x);
            }
            out.iter_mut().for_each(|out| *out = silu(*out));
        }
    });

    let state = slice_mut::<f32>(&op.state);
    for &Span { first, end, slot, resumes } in spans.iter().filter(|span| span.first < span.end) {
        let state = &mut state[slot as usize * n_before * channels..][..n_before * channels];
        let n_rows = (end - first) as usize;
        // A row moves towards the front, so that none is overwritten before it has moved.
        for i in 0..n_before {
            let to = i * channels..(i + 1) * channels;
            match (n_rows + i).checked_sub(n_before) {
                Some(place) => {
                    state[to].copy_from_slice(&x[(first as usize + place) * width..][..channels]);
                }
                None if resumes == 1 => {
                    let from = (n_rows + i) * channels;
                    state.copy_within(from..from + channels, to.start);
                }
                None => state[to].fill(0.0),
            }
        }
    }
}
