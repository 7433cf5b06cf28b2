//! See [`freetoken_backend::ShortConv`].

use freetoken_backend::{ShortConv, Span};

use crate::{
    dispatch::{Call, Recorder, format_code},
    kernels::SHORT_CONV,
};

pub(super) fn record(op: &ShortConv, recorder: &mut Recorder<'_>) {
    let p = &op.p;
    let (n, channels, format) = (p.n_rows as usize, p.channels as usize, op.weight.format);
    let out = recorder.words(&op.out, n * channels);
    let state = recorder.words(&op.state, p.n_slots as usize * (p.kernel as usize - 1) * channels);
    let x = recorder.words(&op.x, n * p.x_width as usize);
    let weight = recorder.weight(&op.weight);
    let sequences = recorder.words(&op.sequences, n);
    let spans = recorder.slot(&op.spans, p.n_sequences as usize * size_of::<Span>());
    let params = [
        p.n_rows,
        p.channels,
        p.x_width,
        out.at(4),
        state.at(4),
        x.at(4),
        weight.at(format.row_bytes(1)),
        sequences.at(4),
        spans.at(4),
    ];
    recorder.call(Call {
        kernel: &SHORT_CONV,
        constants: vec![("FORMAT", format_code(format)), ("KERNEL", p.kernel)],
        slots: vec![out, state, x, weight, sequences, spans],
        chunks: &[],
        params: &params,
        workgroups: recorder.grid((n * channels).div_ceil(256)),
    });
}
