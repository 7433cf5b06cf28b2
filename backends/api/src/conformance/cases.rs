//! The table: every op, in the shapes where kernels go wrong (one row, remainders of every tile, padding, each format).

use half::bf16;

use super::{Arena, Case, Fill, Rng};
use crate::{
    Activation, Attention, AttentionGate, AttentionParams, Combine, CombineParams, EditLogits,
    EditLogitsParams, Embed, EmbedParams, ExpertMlp, ExpertMlpParams, ExpertPool, ExpertWeights, Experts,
    Format, GatedDelta, GatedDeltaParams, KvCache, LogitEdit, MatMul, MatMulParams, Matrix, Op, PAGE_TOKENS,
    Result, RopeCache, RopeCacheParams, Route, RouteParams, SharedExpert, SharedGate, ShortConv,
    ShortConvParams, Span, Stage, TopLogits, TopLogitsParams, View, Weight, record,
};

/// Formats that are codes only: every op takes them.
const PLAIN_FORMATS: [Format; 3] = [Format::F32, Format::Bf16, Format::F16];
/// Formats with scales, of matmuls and experts.
const QUANTISED: [Format; 3] = [Format::Fp8, Format::Nvfp4, Format::Mxfp4];
const EPS: f32 = 1e-6;
/// f32 against f32 in another order of summation.
const F32_BOUND: f64 = 1e-10;
/// Activations rounded to bf16 once or twice on the way.
const BF16_BOUND: f64 = 1e-4;

/// All cases of single ops, in the order of a step.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for format in PLAIN_FORMATS {
        cases.push(case(format!("embed/{format}"), move |a| embed(a, format)));
    }
    for format in PLAIN_FORMATS.into_iter().chain(QUANTISED) {
        for (n, rows, cols) in [
            (1, 64, 64),
            (1, 37, 200),
            (2, 96, 128),
            (5, 33, 72),
            (16, 130, 256),
            (67, 48, 320),
            (530, 130, 96),
        ] {
            let cols = if format.takes_cols(cols) { cols } else { cols.next_multiple_of(32) };
            let name = format!("matmul/{format} n={n} {rows}x{cols}");
            cases.push(case(name, move |a| matmul(a, MatMulCase { format, n, rows, cols, ..PLAIN })));
        }
    }
    for n in [1, 3, 20] {
        for (name, variant) in [
            ("norm", MatMulCase { norm: true, ..PLAIN }),
            ("norm glu", MatMulCase { norm: true, glu: true, ..PLAIN }),
            ("accumulate", MatMulCase { accumulate: true, ..PLAIN }),
            ("bias", MatMulCase { bias: true, ..PLAIN }),
            ("bias glu", MatMulCase { bias: true, glu: true, ..PLAIN }),
            ("three pieces", MatMulCase { pieces: 3, norm: true, ..PLAIN }),
            ("gathered rows", MatMulCase { gather: true, norm: true, ..PLAIN }),
            ("wide", MatMulCase { rows: 24, cols: 2048, norm: true, ..PLAIN }),
        ] {
            cases.push(case(format!("matmul/{name} n={n}"), move |a| matmul(a, MatMulCase { n, ..variant })));
            for format in QUANTISED {
                let name = format!("matmul/{format} {name} n={n}");
                cases.push(case(name, move |a| matmul(a, MatMulCase { format, n, ..variant })));
            }
        }
    }
    // Beyond what a half holds, on either side.
    for format in [Format::Bf16, Format::Fp8, Format::Nvfp4, Format::Mxfp4] {
        for (what, most_x, most_weight) in [
            ("large x", 1e6, 0.1),
            ("large weights", 1.0, 1e6),
            ("small x", 1e-8, 0.1),
            ("small weights", 1.0, 1e-8),
        ] {
            let name = format!("matmul/{format} {what}");
            let c = MatMulCase { format, n: 20, most_x, most_weight, ..PLAIN };
            cases.push(case(name, move |a| matmul(a, c)));
        }
    }
    // Outputs enough for a device to choose its largest tiles, and few enough for one that binds little.
    let tiles = MatMulCase { n: 17, rows: 30720, cols: 8, norm: true, ..PLAIN };
    cases.push(case("matmul/many tiles n=17 30720x8".into(), move |a| matmul(a, tiles)));
    for (format, name) in [(Format::F32, "f32"), (Format::Bf16, "bf16")] {
        for (n, norm, rotary_dim) in [(1, true, 32), (5, true, 32), (5, false, 32), (17, true, 8)] {
            let name = format!("rope_cache/{name} n={n} norm={norm} rotary={rotary_dim}");
            cases.push(case(name, move |a| rope_cache(a, format, n, norm, rotary_dim, false)));
        }
        for n in [1, 17] {
            let name = format!("rope_cache/{name} n={n} gated");
            cases.push(case(name, move |a| rope_cache(a, format, n, true, 8, true)));
        }
        for (kind, lengths) in [
            ("decode", vec![(0, 1), (1, 16), (2, 17), (3, 100)]),
            ("decode padded", vec![(0, 33), (-1, 1), (-1, 1)]),
            ("prefill", (0..40).map(|i| (0, i + 1)).collect()),
            ("prefill behind a prefix", (0..9).map(|i| (1, 70 + i)).collect()),
            ("prefill of several", several_prompts()),
            ("long decode", vec![(2, 1999)]),
            ("long decode beside a short one", vec![(1, 1200), (3, 5)]),
        ] {
            for (heads, kv_heads, head_dim) in [(4, 2, 32), (8, 1, 64), (3, 3, 16), (8, 2, 128)] {
                let lengths = lengths.clone();
                let name = format!("attention/{kind} {name} {heads}:{kv_heads}x{head_dim}");
                cases.push(case(name, move |a| {
                    attention(a, &AttentionCase { rows: &lengths, heads, kv_heads, head_dim, ..of(format) })
                }));
            }
        }
        for (kind, lengths) in [
            ("decode", vec![(0, 33), (-1, 1), (3, 100)]),
            ("long decode", vec![(2, 1999)]),
            ("prefill", (0..40).map(|i| (0, i + 1)).collect()),
        ] {
            for (heads, kv_heads, head_dim) in [(4, 2, 32), (8, 1, 256)] {
                let lengths = lengths.clone();
                let name = format!("attention/gated {kind} {name} {heads}:{kv_heads}x{head_dim}");
                cases.push(case(name, move |a| {
                    let gated = AttentionCase { gated: true, ..of(format) };
                    attention(a, &AttentionCase { rows: &lengths, heads, kv_heads, head_dim, ..gated })
                }));
            }
        }
        cases.push(case(format!("attention/long prefill {name} 8:1x128"), move |a| {
            let rows = &[several_prompts(), (0..70).map(|i| (3, 300 + i)).collect()].concat();
            attention(a, &AttentionCase { rows, heads: 8, kv_heads: 1, head_dim: 128, ..of(format) })
        }));
    }
    // Beyond what a half holds, on either side, and both in one sequence.
    for (what, most) in [("large", Some(1e6)), ("small", Some(1e-8)), ("uneven", None)] {
        for (heads, kv_heads, head_dim) in [(2, 2, 64), (8, 1, 128), (8, 1, 256)] {
            let name = format!("attention/prefill of several {what} bf16 {heads}:{kv_heads}x{head_dim}");
            cases.push(case(name, move |a| {
                let rows = &several_prompts();
                attention(a, &AttentionCase { rows, heads, kv_heads, head_dim, most, ..of(Format::Bf16) })
            }));
        }
    }
    for (kind, spans) in spans() {
        for (channels, kernel, format) in [(96, 4, Format::Bf16), (33, 2, Format::F32), (64, 8, Format::F16)]
        {
            let spans = spans.clone();
            let name = format!("short_conv/{format} {kind} {channels}x{kernel}");
            cases.push(case(name, move |a| short_conv(a, &spans, channels, kernel, format)));
        }
        for shape in [
            DeltaShape { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 16, ..DELTA },
            DeltaShape { key_heads: 1, value_heads: 3, key_dim: 32, value_dim: 24, ..DELTA },
            DELTA,
            DeltaShape { forgets: false, ..DELTA },
        ] {
            let spans = spans.clone();
            let DeltaShape { key_heads, value_heads, key_dim, value_dim, forgets } = shape;
            let memory = if forgets { "" } else { " long memory" };
            let name = format!("gated_delta/{kind} {key_heads}:{value_heads} {key_dim}x{value_dim}{memory}");
            cases.push(case(name, move |a| gated_delta(a, &spans, shape)));
        }
    }
    for (n, experts, top_k) in [(1, 8, 2), (5, 32, 4), (3, 128, 8), (33, 60, 1), (70, 200, 4), (2, 6, 6)] {
        for renormalize in [0, 1] {
            let name = format!("route/n={n} {top_k} of {experts} renormalize={renormalize}");
            cases.push(case(name, move |a| route(a, n, experts, top_k, renormalize, false)));
        }
        let name = format!("route/n={n} {top_k} of {experts} with a shared expert");
        cases.push(case(name, move |a| route(a, n, experts, top_k, 1, true)));
    }
    for format in PLAIN_FORMATS.into_iter().chain(QUANTISED) {
        for pool in [false, true] {
            for (n, hidden, intermediate, top_k) in [
                (1, 64, 32, 2),
                (1, 192, 64, 4),
                (7, 64, 48, 3),
                (40, 96, 33, 2),
                (900, 64, 40, 2),
                (5, 8, 8, 1),
            ] {
                let whole =
                    |cols: usize| if format.takes_cols(cols) { cols } else { cols.next_multiple_of(32) };
                let (hidden, intermediate) = (whole(hidden), whole(intermediate));
                let shape = ExpertShape { format, pool, n, hidden, intermediate, top_k, experts: 10 };
                let place = if pool { "pool" } else { "in place" };
                let name = format!("expert_mlp/{format} {place} n={n} k={top_k} {hidden}x{intermediate}");
                cases.push(case(name, move |a| one(expert_mlp(a, shape)?)));
            }
        }
        let shape =
            ExpertShape { format, pool: true, n: 90, hidden: 64, intermediate: 32, top_k: 2, experts: 10 };
        cases.push(case(format!("expert_mlp/{format} large x"), move |a| {
            let x = a.input(shape.n * shape.hidden, Fill::Uniform(1e4))?;
            one(ExpertMlp { x, ..expert_mlp(a, shape)? })
        }));
    }
    for n in [1, 6] {
        cases.push(case(format!("combine/n={n}"), move |a| combine_alone(a, n, 96, 4, false)));
        let name = format!("combine/n={n} with a shared expert");
        cases.push(case(name, move |a| combine_alone(a, n, 96, 4, true)));
    }
    // Devices may add experts' rows as soon as they have them.
    for format in PLAIN_FORMATS.into_iter().chain(QUANTISED) {
        for (n, top_k, shared) in [(1, 3, false), (1, 8, false), (1, 8, true), (4, 3, false)] {
            let shape =
                ExpertShape { format, pool: true, n, hidden: 96, intermediate: 64, top_k, experts: 10 };
            let name = format!("expert_mlp/{format} then combine n={n} k={top_k} shared={shared}");
            cases.push(case(name, move |a| expert_mlp_then_combine(a, shape, shared)));
        }
    }
    cases.push(case("edit_logits".into(), edit_logits));
    for (n, vocab, k) in [(1, 320, 256), (3, 1000, 256), (2, 40, 40), (1, 30_000, 256), (2, 5000, 1)] {
        cases.push(case(format!("top_logits/n={n} {k} of {vocab}"), move |a| top_logits(a, n, vocab, k)));
    }
    cases
}

fn case(name: String, build: impl Fn(&mut Arena<'_>) -> Result<Vec<Stage>> + 'static) -> Case {
    Case { name, bound: F32_BOUND, bound_auto: BF16_BOUND, build: Box::new(build) }
}

fn one(op: impl Into<Op>) -> Result<Vec<Stage>> {
    Ok(vec![Stage::Ops(vec![op.into()])])
}

fn embed(a: &mut Arena<'_>, format: Format) -> Result<Vec<Stage>> {
    let (n, vocab, hidden) = (7, 50, 72);
    one(Embed {
        out: a.output(n * hidden)?,
        ids: a.input(n, Fill::Below(vocab as i32))?,
        table: a.weight(format, vocab, hidden, 1.0)?,
        p: EmbedParams { n_rows: n as u32, hidden: hidden as u32, vocab: vocab as u32 },
    })
}

#[derive(Clone, Copy)]
struct MatMulCase {
    format: Format,
    n: usize,
    rows: usize,
    cols: usize,
    pieces: usize,
    norm: bool,
    glu: bool,
    bias: bool,
    accumulate: bool,
    gather: bool,
    most_x: f32,
    most_weight: f32,
}

const PLAIN: MatMulCase = MatMulCase {
    format: Format::Bf16,
    n: 1,
    rows: 50,
    cols: 96,
    pieces: 1,
    norm: false,
    glu: false,
    bias: false,
    accumulate: false,
    gather: false,
    most_x: 1.0,
    most_weight: 0.1,
};

fn matmul(a: &mut Arena<'_>, c: MatMulCase) -> Result<Vec<Stage>> {
    let pieces = if c.glu { 2 } else { c.pieces };
    let mut weights = Vec::new();
    let mut biases = Vec::new();
    for _ in 0..pieces {
        weights.push(a.weight(c.format, c.rows, c.cols, c.most_weight)?);
        if c.bias {
            let format = if c.format.group().is_some() { Format::Bf16 } else { c.format };
            biases.push(a.weight(format, 1, c.rows, 1.0)?);
        }
    }
    let out_features = if c.glu { c.rows } else { c.rows * pieces };
    let x_rows = if c.gather { c.n + 11 } else { c.n };
    one(MatMul {
        out: if c.accumulate {
            a.updated(c.n * out_features, Fill::Uniform(1.0))?
        } else {
            a.output(c.n * out_features)?
        },
        x: a.input(x_rows * c.cols, Fill::Uniform(c.most_x))?,
        rows: if c.gather { Some(a.input(c.n, Fill::Below(x_rows as i32))?) } else { None },
        norm: if c.norm { Some(a.norm(c.cols)?) } else { None },
        weight: Matrix::new(weights),
        bias: if c.bias { Some(biases) } else { None },
        p: MatMulParams {
            n_rows: c.n as u32,
            in_features: c.cols as u32,
            out_features: out_features as u32,
            activation: if c.glu { Activation::SiluGlu } else { Activation::None } as u32,
            accumulate: c.accumulate as u32,
            eps: EPS,
        },
    })
}

fn rope_cache(
    a: &mut Arena<'_>,
    format: Format,
    n: usize,
    norm: bool,
    rotary_dim: usize,
    gated: bool,
) -> Result<Vec<Stage>> {
    let (heads, kv_heads, d, max_positions, n_pages) = (4, 2, 32, 64, 3);
    let slots: Vec<i32> = (0..n as i32).map(|i| (i * 5) % 32 + 16).collect();
    // Written bf16 is compared through attention: here a rounding on the edge may differ between devices.
    let kv = match format {
        Format::F32 => {
            a.updated(n_pages * KvCache::page_bytes(format, kv_heads, d) / 4, Fill::Uniform(0.0))?
        }
        _ => a.input(n_pages * KvCache::page_bytes(format, kv_heads, d) / 4, Fill::Below(1))?,
    };
    let kv = KvCache { view: kv, format, n_pages };
    let q = a.output(n * heads * d)?;
    let prepare = RopeCache {
        q: q.clone(),
        kv: kv.clone(),
        qkv: a.input(n * (heads * (1 + gated as usize) + 2 * kv_heads) * d, Fill::Uniform(1.0))?,
        gated,
        q_norm: if norm { Some(a.norm(d)?) } else { None },
        k_norm: if norm { Some(a.norm(d)?) } else { None },
        rotary: a.input(max_positions * rotary_dim, Fill::Uniform(1.0))?,
        positions: a.input(n, Fill::Below(max_positions as i32))?,
        kv_slots: a.fixed(&slots)?,
        p: RopeCacheParams {
            n_rows: n as u32,
            n_heads: heads as u32,
            n_kv_heads: kv_heads as u32,
            head_dim: d as u32,
            rotary_dim: rotary_dim as u32,
            max_positions: max_positions as u32,
            eps: EPS,
        },
    };
    let attend = Attention {
        out: a.output(heads * d)?,
        q,
        kv,
        block_table: a.fixed(&[1, 2])?,
        sequences: a.fixed(&[0])?,
        positions: a.fixed(&[31])?,
        gate: None,
        p: AttentionParams {
            n_rows: 1,
            n_sequences: 1,
            max_pages: 2,
            n_heads: heads as u32,
            n_kv_heads: kv_heads as u32,
            head_dim: d as u32,
            scale: 0.2,
        },
    };
    Ok(vec![Stage::Ops(vec![prepare.into(), attend.into()])])
}

struct AttentionCase<'a> {
    format: Format,
    /// (sequence or -1, number of positions attended).
    rows: &'a [(i32, i32)],
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    gated: bool,
    /// The largest key and value; `None` where pages of bf16 differ.
    most: Option<f32>,
}

/// The rest of a case.
fn of(format: Format) -> AttentionCase<'static> {
    AttentionCase { format, rows: &[], heads: 1, kv_heads: 1, head_dim: 16, gated: false, most: Some(1.0) }
}

fn attention(a: &mut Arena<'_>, c: &AttentionCase<'_>) -> Result<Vec<Stage>> {
    let &AttentionCase { format, rows, heads, kv_heads, head_dim, .. } = c;
    let longest = rows.iter().map(|row| row.1 as usize).max().unwrap_or(0);
    let (n, n_sequences, max_pages) = (rows.len(), 4, longest.div_ceil(PAGE_TOKENS).max(7));
    let n_pages = 1 + n_sequences * max_pages;
    // Pages of a sequence lie apart and out of order.
    let table: Vec<i32> = (0..n_pages - 1).map(|i| 1 + (i * 11 % (n_pages - 1)) as i32).collect();
    let view = match c.most {
        Some(most) => a.weight(format, n_pages * 2 * kv_heads * PAGE_TOKENS, head_dim, most)?.view,
        None => uneven_cache(a, n_pages, kv_heads * PAGE_TOKENS * head_dim)?,
    };
    one(Attention {
        out: a.output(n * heads * head_dim)?,
        q: a.input(n * heads * head_dim, Fill::Uniform(1.0))?,
        kv: KvCache { view, format, n_pages },
        block_table: a.fixed(&table)?,
        sequences: a.fixed(&rows.iter().map(|r| r.0).collect::<Vec<_>>())?,
        positions: a.fixed(&rows.iter().map(|r| r.1 - 1).collect::<Vec<_>>())?,
        gate: match c.gated {
            // Keys and values stand behind the gates.
            true => {
                let width = (2 * heads + 2 * kv_heads) * head_dim;
                Some(AttentionGate { rows: a.input(n * width, Fill::Uniform(3.0))?, width: width as u32 })
            }
            false => None,
        },
        p: AttentionParams {
            n_rows: n as u32,
            n_sequences: n_sequences as u32,
            max_pages: max_pages as u32,
            n_heads: heads as u32,
            n_kv_heads: kv_heads as u32,
            head_dim: head_dim as u32,
            // Scores are of one size, whatever the size of keys.
            scale: 1.0 / ((head_dim as f32).sqrt() * c.most.unwrap_or(1.0)),
        },
    })
}

/// Pages of keys, and of values, in bf16 that are large or small; so many elements each.
fn uneven_cache(a: &mut Arena<'_>, n_pages: usize, elements: usize) -> Result<View> {
    let mut rng = Rng::new(1);
    let mut values = Vec::new();
    for page in 0..n_pages {
        for most in [[1.0, 1e-6, 16.0][page % 3], [1e-4, 1e-12, 1.0, 1e6][page % 4]] {
            values.extend((0..elements).map(|_| bf16::from_f32(rng.symmetric(most)).to_bits()));
        }
    }
    a.fixed(&values)
}

/// Rows of three sequences, one of them behind a prefix, and padding between: more of them than a block takes.
fn several_prompts() -> Vec<(i32, i32)> {
    let rows = |sequence: i32, lengths: std::ops::Range<i32>| lengths.map(move |length| (sequence, length));
    rows(0, 1..36).chain(rows(2, 131..201)).chain(rows(-1, 1..4)).chain(rows(1, 1..46)).collect()
}

/// Spans of (first row, end, slot, resumes), and how many rows there are.
type Spans = (Vec<(i32, i32, i32, i32)>, usize);

/// Slots are in no order, and one of them belongs to nobody.
const N_SLOTS: usize = 6;

/// Decode and prefill, from zeros and from a state, with padding behind and between; around the chunks that kernels compute in.
fn spans() -> Vec<(&'static str, Spans)> {
    let one = |n: i32, resumes: i32| (vec![(0, n, 3, resumes)], n as usize);
    vec![
        ("decode", one(1, 1)),
        ("first token", one(1, 0)),
        ("decode n=4", (vec![(0, 1, 2, 1), (1, 2, 5, 0), (2, 3, 1, 1), (3, 4, 4, 1)], 4)),
        ("decode padded", (vec![(0, 1, 4, 1), (1, 2, 1, 1), (2, 2, 0, 0), (2, 2, 0, 0)], 4)),
        ("two rows", one(2, 1)),
        ("prefill n=63", one(63, 0)),
        ("prefill n=64", one(64, 1)),
        ("prefill n=65", one(65, 1)),
        ("prefill n=200", one(200, 0)),
        ("prefill padded", (vec![(0, 41, 5, 1), (41, 41, 0, 0)], 64)),
        ("two prompts", (vec![(0, 70, 2, 0), (70, 72, 1, 1), (75, 145, 5, 1)], 150)),
    ]
}

fn fixed_spans(a: &mut Arena<'_>, (spans, _): &Spans) -> Result<View> {
    let span = |&(first, end, slot, resumes): &(i32, i32, i32, i32)| Span { first, end, slot, resumes };
    a.fixed(&spans.iter().map(span).collect::<Vec<_>>())
}

fn short_conv(
    a: &mut Arena<'_>,
    spans: &Spans,
    channels: usize,
    kernel: usize,
    format: Format,
) -> Result<Vec<Stage>> {
    let (n, x_width) = (spans.1, channels + 40);
    let span_of = |row: i32| spans.0.iter().position(|span| (span.0..span.1).contains(&row));
    let sequences: Vec<i32> = (0..n as i32).map(|row| span_of(row).map_or(-1, |span| span as i32)).collect();
    one(ShortConv {
        out: a.output(n * channels)?,
        state: a.updated(N_SLOTS * (kernel - 1) * channels, Fill::Uniform(1.0))?,
        x: a.input(n * x_width, Fill::Uniform(1.0))?,
        weight: a.weight(format, channels, kernel, 1.0)?,
        sequences: a.fixed(&sequences)?,
        spans: fixed_spans(a, spans)?,
        p: ShortConvParams {
            n_rows: n as u32,
            n_sequences: spans.0.len() as u32,
            n_slots: N_SLOTS as u32,
            channels: channels as u32,
            x_width: x_width as u32,
            kernel: kernel as u32,
        },
    })
}

#[derive(Clone, Copy)]
struct DeltaShape {
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    /// Whether a state is gone after some rows.
    forgets: bool,
}

const DELTA: DeltaShape =
    DeltaShape { key_heads: 2, value_heads: 4, key_dim: 128, value_dim: 128, forgets: true };

fn gated_delta(a: &mut Arena<'_>, spans: &Spans, s: DeltaShape) -> Result<Vec<Stage>> {
    let n = spans.1;
    let z_width = s.value_heads * (s.value_dim + 2) + 5;
    // b and a behind z, as one projection gives them, and by themselves.
    let projected = a.input(n * z_width, Fill::Uniform(2.0))?;
    let (ba, ba_width, ba_start) = match s.forgets {
        true => (projected.clone(), z_width, s.value_heads * s.value_dim + 3),
        false => (a.input(n * 2 * s.value_heads, Fill::Uniform(2.0))?, 2 * s.value_heads, 0),
    };
    let n_constants = 2 * s.value_heads + s.value_dim;
    let constants = if s.forgets { Fill::Uniform(1.0) } else { Fill::Around(-4.0) };
    let p = GatedDeltaParams {
        n_rows: n as u32,
        n_sequences: spans.0.len() as u32,
        n_slots: N_SLOTS as u32,
        n_key_heads: s.key_heads as u32,
        n_value_heads: s.value_heads as u32,
        key_dim: s.key_dim as u32,
        value_dim: s.value_dim as u32,
        z_width: z_width as u32,
        z_start: 3,
        ba_width: ba_width as u32,
        ba_start: ba_start as u32,
        eps: EPS,
    };
    one(GatedDelta {
        out: a.output(n * s.value_heads * s.value_dim)?,
        state: a.updated(N_SLOTS * p.state_values() as usize, Fill::Uniform(0.5))?,
        qkv: a.input(n * p.qkv_width() as usize, Fill::Uniform(1.0))?,
        z: projected,
        ba,
        constants: Weight::plain(a.input(n_constants, constants)?, Format::F32, 1, n_constants),
        spans: fixed_spans(a, spans)?,
        p,
    })
}

fn route(
    a: &mut Arena<'_>,
    n: usize,
    experts: usize,
    top_k: usize,
    renormalize: u32,
    shared: bool,
) -> Result<Vec<Stage>> {
    let hidden = 96;
    let sequences: Vec<i32> = (0..n as i32).map(|i| if i % 4 == 3 { -1 } else { i }).collect();
    let weights = a.updated(n * top_k, Fill::Uniform(0.0))?;
    one(Route {
        ids: a.output_i32(n * top_k)?,
        weights,
        normed: a.output(n * hidden)?,
        x: a.input(n * hidden, Fill::Uniform(1.0))?,
        norm: a.norm(hidden)?,
        router: a.weight(Format::Bf16, experts, hidden, 0.5)?,
        sequences: a.fixed(&sequences)?,
        shared_gate: match shared {
            true => Some(SharedGate { out: a.output(n)?, weight: a.weight(Format::Bf16, 1, hidden, 0.5)? }),
            false => None,
        },
        p: RouteParams {
            n_rows: n as u32,
            hidden: hidden as u32,
            n_experts: experts as u32,
            top_k: top_k as u32,
            renormalize,
            eps: EPS,
        },
    })
}

#[derive(Clone, Copy)]
pub(super) struct ExpertShape {
    pub(super) format: Format,
    pub(super) pool: bool,
    pub(super) n: usize,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) top_k: usize,
    pub(super) experts: usize,
}

fn expert_mlp(a: &mut Arena<'_>, s: ExpertShape) -> Result<ExpertMlp> {
    let experts = if s.pool { pooled_experts(a, s)? } else { experts_in_place(a, s)? };
    let ids: Vec<i32> = (0..s.n).flat_map(|row| routes(row, s)).collect();
    Ok(ExpertMlp {
        parts: a.updated(s.n * s.top_k * s.hidden, Fill::Uniform(0.5))?,
        x: a.input(s.n * s.hidden, Fill::Uniform(1.0))?,
        ids: a.fixed(&ids)?,
        weights: a.input(s.n * s.top_k, Fill::Uniform(1.0))?,
        experts,
        p: expert_params(s),
    })
}

pub(super) fn expert_params(s: ExpertShape) -> ExpertMlpParams {
    ExpertMlpParams {
        n_rows: s.n as u32,
        top_k: s.top_k as u32,
        hidden: s.hidden as u32,
        intermediate: s.intermediate as u32,
        n_experts: s.experts as u32,
        in_place: 0,
    }
}

/// Ascending ids, some experts popular, every fifth row padding.
pub(super) fn routes(row: usize, s: ExpertShape) -> Vec<i32> {
    if row % 5 == 4 {
        return vec![-1; s.top_k];
    }
    let stride = 1 + row % 3;
    let mut ids: Vec<i32> = (0..s.top_k).map(|k| ((row + k * stride) % s.experts) as i32).collect();
    ids.sort_unstable();
    ids
}

fn experts_in_place(a: &mut Arena<'_>, s: ExpertShape) -> Result<Experts> {
    if !a.backend().caps().host_memory {
        return Err(crate::Error::Unsupported {
            backend: a.backend().caps().backend,
            op: "expert_mlp",
            why: "experts in place need host memory".into(),
        });
    }
    let mut weights = Vec::new();
    for _ in 0..s.experts {
        weights.push(ExpertWeights {
            gate: a.weight(s.format, s.intermediate, s.hidden, 0.2)?,
            up: a.weight(s.format, s.intermediate, s.hidden, 0.2)?,
            down: a.weight(s.format, s.hidden, s.intermediate, 0.2)?,
        });
    }
    Ok(Experts::InPlace(weights.into()))
}

/// Every expert resident, in slots that are not in the order of ids, in chunks of three.
fn pooled_experts(a: &mut Arena<'_>, s: ExpertShape) -> Result<Experts> {
    let record = record(s.format, s.hidden, s.intermediate);
    let slots_per_chunk = 3;
    let n_chunks = s.experts.div_ceil(slots_per_chunk);
    let mut chunks = Vec::new();
    for _ in 0..n_chunks {
        chunks.push(a.records(&record, slots_per_chunk, 0.2)?);
    }
    // The second of two layers.
    let slots = (0..2 * s.experts).map(|i| if i < s.experts { -1 } else { (i * 7 % s.experts) as i32 });
    let table: View = a.fixed(&slots.collect::<Vec<i32>>())?;
    let pool = ExpertPool {
        record,
        n_layers: 2,
        n_experts: s.experts,
        chunks,
        slots_per_chunk,
        table,
        banks: Vec::new(),
    };
    Ok(Experts::Pool { pool: pool.into(), layer: 1 })
}

/// What an expert gives is not compared: who adds it need not write it.
fn expert_mlp_then_combine(a: &mut Arena<'_>, s: ExpertShape, shared: bool) -> Result<Vec<Stage>> {
    let parts = a.input(s.n * s.top_k * s.hidden, Fill::Uniform(1.0))?;
    let mut ids: Vec<i32> = (0..s.n).flat_map(|row| routes(row, s)).collect();
    ids[1] = -1;
    let ids = a.fixed(&ids)?;
    let mlp = ExpertMlp { parts: parts.clone(), ids: ids.clone(), ..expert_mlp(a, s)? };
    let combine = combine(a, parts, ids, s.n, s.hidden, s.top_k, shared)?;
    Ok(vec![Stage::Ops(vec![mlp.into(), combine.into()])])
}

fn combine_alone(
    a: &mut Arena<'_>,
    n: usize,
    hidden: usize,
    top_k: usize,
    shared: bool,
) -> Result<Vec<Stage>> {
    let ids: Vec<i32> = (0..n * top_k).map(|i| if i % 7 == 6 { -1 } else { i as i32 }).collect();
    let parts = a.input(n * top_k * hidden, Fill::Uniform(1.0))?;
    let ids = a.fixed(&ids)?;
    one(combine(a, parts, ids, n, hidden, top_k, shared)?)
}

fn combine(
    a: &mut Arena<'_>,
    parts: View,
    ids: View,
    n: usize,
    hidden: usize,
    top_k: usize,
    shared: bool,
) -> Result<Combine> {
    Ok(Combine {
        x: a.updated(n * hidden, Fill::Uniform(1.0))?,
        parts,
        ids,
        shared: match shared {
            true => Some(SharedExpert {
                rows: a.input(n * hidden, Fill::Uniform(1.0))?,
                gates: a.input(n, Fill::Uniform(1.0))?,
            }),
            false => None,
        },
        p: CombineParams { n_rows: n as u32, top_k: top_k as u32, hidden: hidden as u32 },
    })
}

fn edit_logits(a: &mut Arena<'_>) -> Result<Vec<Stage>> {
    let (n, vocab) = (3, 200);
    let edit = |row, id, repetition, subtract| LogitEdit { row, id, repetition, subtract };
    let edits = [
        edit(0, 5, 1.3, 0.0),
        edit(0, 6, 1.0, 0.7),
        edit(2, 199, 2.0, 0.25),
        edit(1, 0, 0.5, -1.0),
        LogitEdit::END,
        edit(0, 7, 9.0, 9.0),
    ];
    one(EditLogits {
        logits: a.updated(n * vocab, Fill::Uniform(4.0))?,
        edits: a.fixed(&edits)?,
        p: EditLogitsParams { n_rows: n as u32, vocab: vocab as u32, capacity: edits.len() as u32 },
    })
}

fn top_logits(a: &mut Arena<'_>, n: usize, vocab: usize, k: usize) -> Result<Vec<Stage>> {
    let inverse_temperatures: Vec<f32> = (0..n).map(|i| 1.0 / (0.5 + i as f32)).collect();
    // bf16 values make ties, which must go to the lower id.
    let tied = (0..n * vocab).map(|i| bf16::from_f32((i as f32 * 0.37).sin() * 8.0).to_f32());
    one(TopLogits {
        ids: a.output_i32(n * k)?,
        values: a.output(n * k)?,
        log_sum_exp: a.output(n)?,
        logits: if vocab < 2000 {
            a.fixed(&tied.collect::<Vec<_>>())?
        } else {
            a.input(n * vocab, Fill::Uniform(8.0))?
        },
        inverse_temperatures: a.fixed(&inverse_temperatures)?,
        p: TopLogitsParams { n_rows: n as u32, vocab: vocab as u32, k: k as u32 },
    })
}
