// What the kernels of matmul share: their parameters, what they bind, where rows lie, and how a sum becomes an output.
//
// out[n, r] (+)= activation(weight[r, :] . norm(x[n, :]) + bias[r]). Codes, scales and globals of the weight are bound apart, each from an
// offset of its own on. Of a GLU, gate and up are rows of the same weight; where they cannot be bound together, up is computed first,
// like any product, and gate finds it in `out`.

override BIAS: u32 = 3u;
override GLU: u32 = 0u;
override GATHER: bool = false;
override ACCUMULATE: bool = false;

// Of a GLU: both are read; or gate is, and `out` holds up.
const TOGETHER: u32 = 1u;
const APART: u32 = 2u;

struct Params {
    n_rows: u32,
    in_features: u32,
    out_features: u32,
    eps: f32,
    // The outputs of this dispatch: columns `first_output` .. `first_output + n_outputs` of `out`.
    first_output: u32,
    n_outputs: u32,
    out_at: u32,
    x_at: u32,
    rows_at: u32,
    norm_at: u32,
    // Elements, bytes and words.
    weight_at: u32,
    scales_at: u32,
    globals_at: u32,
    bias_at: u32,
    // Rows from a gate row to its up row.
    to_up: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> rows: array<i32>;
@group(0) @binding(3) var<storage, read> norm: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> scales: array<u32>;
@group(0) @binding(6) var<storage, read> globals: array<u32>;
@group(0) @binding(7) var<storage, read> bias: array<vec4<u32>>;

// A matrix is one chunk.

fn code_vec(chunk: u32, i: u32) -> vec4<u32> { return weight[i]; }
fn code_word(chunk: u32, i: u32) -> u32 { return weight[i / 4u][i % 4u]; }
fn scale_word(chunk: u32, i: u32) -> u32 { return scales[i]; }
fn global_word(chunk: u32, i: u32) -> u32 { return globals[i]; }

struct Two {
    first: vec4<u32>,
    second: vec4<u32>,
}

fn code_two(chunk: u32, i: u32) -> Two { return Two(weight[i], weight[i + 1u]); }

// The row of an output; those behind the last repeat it, so that every thread loads from where there is something.
fn weight_row(output: u32) -> Row {
    let banks = Banks(p.weight_at, p.scales_at, p.globals_at);
    return row_of(0u, 0u, banks, min(output, p.n_outputs - 1u), p.in_features);
}

// The same of up.
fn up_row(output: u32) -> Row {
    let banks = Banks(p.weight_at, p.scales_at, p.globals_at);
    return row_of(0u, 0u, banks, p.to_up + min(output, p.n_outputs - 1u), p.in_features);
}

// Element of x at which a row starts.
fn x_start(n: u32) -> u32 {
    var row = n;
    if GATHER {
        row = u32(rows[p.rows_at + n]);
    }
    return p.x_at + row * p.in_features;
}

fn biased(y: f32, r: u32) -> f32 {
    if BIAS == NONE {
        return y;
    }
    let at = p.bias_at + r;
    return y + decode_element(BIAS, bias[at / per_vec(BIAS)], at);
}

// Element of `out` at which the outputs of a row start.
fn out_start(n: u32) -> u32 {
    return p.out_at + n * p.out_features + p.first_output;
}

// What is needed of what `out` holds.
fn held(place: u32) -> f32 {
    if ACCUMULATE || GLU == APART {
        return out[place];
    }
    return 0.0;
}

// The output that a sum becomes.
fn finished(output: u32, sum: f32, up_sum: f32, held: f32) -> f32 {
    var y = biased(sum, output);
    if GLU == TOGETHER {
        y = y / (1.0 + exp(-y)) * biased(up_sum, p.to_up + output);
    } else if GLU == APART {
        y = y / (1.0 + exp(-y)) * held;
    }
    if ACCUMULATE {
        y += held;
    }
    return y;
}

// Writes an output, unless it lies behind the last.
fn finish(n: u32, output: u32, sum: f32, up_sum: f32) {
    if output < p.n_outputs {
        let place = out_start(n) + output;
        out[place] = finished(output, sum, up_sum, held(place));
    }
}
