// out[n, r] (+)= activation(weight[r, :] . norm(x[n, :]) + bias[r]) for 2 to 16 rows of x.
//
// weight: row-major, from element `weight_at` of the binding on; of a GLU its gate rows, and the rows of `up` likewise. Rows hold
// a multiple of 8 elements and start at 16 bytes. A team computes four outputs at a time, of a GLU two, for all rows of x,
// so that each weight is read once: 4 columns a lane, as products of 4 x 4 matrices, one for each QUAD of rows. A workgroup
// computes OUTPUTS outputs. Squares are summed on the way and the norm's scale is applied to the sum.
// Bound by the bytes of the weight, near 16 rows by the loads of x.

override FORMAT: u32 = 1u;
override NORM: u32 = 3u;
override BIAS: u32 = 3u;
override GLU: bool = false;
override GATHER: bool = false;
override ACCUMULATE: bool = false;
// Rows of x in fours: 1, 2 or 4.
override QUADS: u32 = 1u;
override OUTPUTS: u32 = 32u;

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
    weight_at: u32,
    up_at: u32,
    bias_at: u32,
    up_bias_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> rows: array<i32>;
@group(0) @binding(3) var<storage, read> norm: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> up: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> bias: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read> up_bias: array<vec4<u32>>;

// The sums of four rows of x: column r, component n. Their squares.
struct Quad {
    sums: mat4x4<f32>,
    squares: vec4<f32>,
    // vec4s of x at which the rows start.
    rows: vec4<u32>,
}

fn columns(v: vec4<u32>, i: u32) -> vec4<f32> {
    if FORMAT == F32 {
        return bitcast<vec4<f32>>(v);
    }
    return decode_half(FORMAT, v, (i & 1u) == 1u);
}

// The vec4 of a row that holds columns 4 i .. 4 i + 4.
fn vec_of(format: u32, i: u32) -> u32 {
    return select(i / 2u, i, format == F32);
}

fn x_row(n: u32) -> u32 {
    // Rows behind the last repeat it.
    var row = min(n, p.n_rows - 1u);
    if GATHER {
        row = u32(rows[p.rows_at + row]);
    }
    return (p.x_at + row * p.in_features) / 4u;
}

fn quad(n: u32) -> Quad {
    var made: Quad;
    made.rows = vec4(x_row(n), x_row(n + 1u), x_row(n + 2u), x_row(n + 3u));
    return made;
}

fn add(q: ptr<function, Quad>, i: u32, w: mat4x4<f32>) {
    let rows_x = mat4x4(x[(*q).rows.x + i], x[(*q).rows.y + i], x[(*q).rows.z + i], x[(*q).rows.w + i]);
    (*q).sums += transpose(rows_x) * w;
    if NORM != NONE {
        (*q).squares += vec4(
            dot(rows_x[0], rows_x[0]),
            dot(rows_x[1], rows_x[1]),
            dot(rows_x[2], rows_x[2]),
            dot(rows_x[3], rows_x[3]),
        );
    }
}

fn finish_one(n: u32, output: u32, sum: f32, up_sum: f32) {
    if output >= p.n_outputs {
        return;
    }
    var y = sum;
    if BIAS != NONE {
        let b = p.bias_at + output;
        y += decode_element(BIAS, bias[b / per_vec(BIAS)], b);
    }
    if GLU {
        var y_up = up_sum;
        if BIAS != NONE {
            let b = p.up_bias_at + output;
            y_up += decode_element(BIAS, up_bias[b / per_vec(BIAS)], b);
        }
        y = y / (1.0 + exp(-y)) * y_up;
    }
    let place = p.out_at + n * p.out_features + p.first_output + output;
    if ACCUMULATE {
        y += out[place];
    }
    out[place] = y;
}

// Four lanes finish a row of x each.
fn finish(at: Invocation, q: Quad, first_n: u32, first: u32, inside: bool) {
    let sums_0 = team_sum(at, q.sums[0]);
    let sums_1 = team_sum(at, q.sums[1]);
    let sums_2 = team_sum(at, q.sums[2]);
    let sums_3 = team_sum(at, q.sums[3]);
    var scale = vec4(1.0);
    if NORM != NONE {
        scale = inverseSqrt(team_sum(at, q.squares) / f32(p.in_features) + p.eps);
    }
    let lane = lane_of(at);
    let n = first_n + lane;
    if lane >= 4u || n >= p.n_rows || !inside {
        return;
    }
    let sums = vec4(sums_0[lane], sums_1[lane], sums_2[lane], sums_3[lane]) * scale[lane];
    if GLU {
        finish_one(n, first, sums.x, sums.z);
        finish_one(n, first + 1u, sums.y, sums.w);
    } else {
        finish_one(n, first, sums.x, 0.0);
        finish_one(n, first + 1u, sums.y, 0.0);
        finish_one(n, first + 2u, sums.z, 0.0);
        finish_one(n, first + 3u, sums.w, 0.0);
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let block = (at.workgroup.y * at.workgroups.x + at.workgroup.x) * OUTPUTS;
    let outputs = select(4u, 2u, GLU);
    let last = p.n_outputs - 1u;
    for (var start = 0u; start < OUTPUTS; start += teams_of(at) * outputs) {
        let own = start + team_of(at) * outputs;
        let first = block + own;
        let starts = min(vec4(first, first + 1u, first + 2u, first + 3u), vec4(last)) * p.in_features;
        let at_gate = (p.weight_at + starts) / per_vec(FORMAT);
        let at_up = (p.up_at + starts) / per_vec(FORMAT);
        var quad_0 = quad(0u);
        var quad_1 = quad(4u);
        var quad_2 = quad(8u);
        var quad_3 = quad(12u);
        for (var i = lane_of(at); i < p.in_features / 4u; i += lanes_of(at)) {
            let v = vec_of(FORMAT, i);
            var w: mat4x4<f32>;
            if GLU {
                w = mat4x4(
                    columns(weight[at_gate.x + v], i),
                    columns(weight[at_gate.y + v], i),
                    columns(up[at_up.x + v], i),
                    columns(up[at_up.y + v], i),
                );
            } else {
                w = mat4x4(
                    columns(weight[at_gate.x + v], i),
                    columns(weight[at_gate.y + v], i),
                    columns(weight[at_gate.z + v], i),
                    columns(weight[at_gate.w + v], i),
                );
            }
            if NORM != NONE {
                let stored = norm[p.norm_at / per_vec(NORM) + vec_of(NORM, i)];
                var scale: vec4<f32>;
                if NORM == F32 {
                    scale = bitcast<vec4<f32>>(stored);
                } else {
                    scale = decode_half(NORM, stored, (i & 1u) == 1u);
                }
                w = mat4x4(w[0] * scale, w[1] * scale, w[2] * scale, w[3] * scale);
            }
            add(&quad_0, i, w);
            if QUADS > 1u {
                add(&quad_1, i, w);
            }
            if QUADS > 2u {
                add(&quad_2, i, w);
                add(&quad_3, i, w);
            }
        }
        let inside = own < OUTPUTS;
        finish(at, quad_0, 0u, first, inside);
        if QUADS > 1u {
            finish(at, quad_1, 4u, first, inside);
        }
        if QUADS > 2u {
            finish(at, quad_2, 8u, first, inside);
            finish(at, quad_3, 12u, first, inside);
        }
    }
}
