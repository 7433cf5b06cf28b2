//! Launch of [`TopLogits`].

use freetoken_backend::{MAX_TOP_LOGITS, OpSpec, TopLogits};

use super::{Scratch, launch, params};
use crate::launch::{Arg, Launch, N_COUNTERS, Unsupported};

/// Logits that one block looks at.
const SEGMENT: u32 = 8192;
/// Blocks of a row whose finds one block can merge.
const MAX_SEGMENTS: u32 = 64;

pub(super) fn launches(op: &TopLogits) -> Result<(Vec<Launch>, usize), Unsupported> {
    let p = &op.p;
    let n_segments = p.vocab.div_ceil(SEGMENT);
    if n_segments > MAX_SEGMENTS {
        return Err(Unsupported(format!("a vocabulary of {}; at most {}", p.vocab, MAX_SEGMENTS * SEGMENT)));
    }
    if p.n_rows as usize > N_COUNTERS {
        return Err(Unsupported(format!("{} rows; at most {N_COUNTERS}", p.n_rows)));
    }
    let mut scratch = Scratch::default();
    let blocks = p.n_rows as usize * n_segments as usize;
    let args = vec![
        params(op.params()),
        Arg::View(op.ids.clone()),
        Arg::View(op.values.clone()),
        Arg::View(op.log_sum_exp.clone()),
        Arg::View(op.logits.clone()),
        Arg::View(op.inverse_temperatures.clone()),
        scratch.place(8 * blocks * MAX_TOP_LOGITS),
        scratch.place(8 * blocks),
        Arg::Counters,
    ];
    Ok((vec![launch("top_logits", [n_segments, p.n_rows, 1], 1024, args).early()], scratch.bytes))
}
