// out[r] (+)= activation(weight[r, :] . norm(x) + bias[r]) for one row of x.
//
// weight: row-major, from element `weight_at` of the binding on; of a GLU its gate rows, and the rows of `up` likewise. Rows hold
// a multiple of 8 elements and start at 16 bytes. A team computes two outputs at a time, of a GLU one, 8 columns a lane; a
// workgroup computes OUTPUTS of them. The norm's scale is the same for the whole row: squares are summed on the way and
// applied to the sum. Bound by the bytes of the weight.

override FORMAT: u32 = 1u;
override NORM: u32 = 3u;
override BIAS: u32 = 3u;
override GLU: bool = false;
override GATHER: bool = false;
override ACCUMULATE: bool = false;
override OUTPUTS: u32 = 16u;

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

fn weight_eight(at: u32, i: u32) -> Eight {
    if FORMAT == F32 {
        return Eight(bitcast<vec4<f32>>(weight[at + 2u * i]), bitcast<vec4<f32>>(weight[at + 2u * i + 1u]));
    }
    let v = weight[at + i];
    return Eight(decode_half(FORMAT, v, false), decode_half(FORMAT, v, true));
}

fn up_eight(at: u32, i: u32) -> Eight {
    if FORMAT == F32 {
        return Eight(bitcast<vec4<f32>>(up[at + 2u * i]), bitcast<vec4<f32>>(up[at + 2u * i + 1u]));
    }
    let v = up[at + i];
    return Eight(decode_half(FORMAT, v, false), decode_half(FORMAT, v, true));
}

fn norm_eight(i: u32) -> Eight {
    let at = p.norm_at / per_vec(NORM);
    if NORM == F32 {
        return Eight(bitcast<vec4<f32>>(norm[at + 2u * i]), bitcast<vec4<f32>>(norm[at + 2u * i + 1u]));
    }
    let v = norm[at + i];
    return Eight(decode_half(NORM, v, false), decode_half(NORM, v, true));
}

// Of the second row: another output, or the same one's up.
fn second_eight(at: u32, i: u32) -> Eight {
    if GLU {
        return up_eight(at, i);
    }
    return weight_eight(at, i);
}

// What columns 8 i .. 8 i + 8 add to both outputs and to the squares of x; nothing where they are not inside.
fn products(a: Eight, b: Eight, x_first: u32, i: u32, inside: bool) -> vec4<f32> {
    var low = x[x_first + 2u * i];
    var high = x[x_first + 2u * i + 1u];
    var squares = 0.0;
    if NORM != NONE {
        squares = dot(low, low) + dot(high, high);
        let scale = norm_eight(i);
        low *= scale.low;
        high *= scale.high;
    }
    let sums = vec4(dot(low, a.low) + dot(high, a.high), dot(low, b.low) + dot(high, b.high), squares, 0.0);
    return select(vec4(0.0), sums, inside);
}

fn finish(output: u32, sum: f32, up_sum: f32) {
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
    let place = p.out_at + p.first_output + output;
    if ACCUMULATE {
        y += out[place];
    }
    out[place] = y;
}

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let block = (at.workgroup.y * at.workgroups.x + at.workgroup.x) * OUTPUTS;
    let outputs = select(2u, 1u, GLU);
    var x_first = p.x_at / 4u;
    if GATHER {
        x_first += u32(rows[p.rows_at]) * p.in_features / 4u;
    }
    for (var start = 0u; start < OUTPUTS; start += teams_of(at) * outputs) {
        let own = start + team_of(at) * outputs;
        let first = block + own;
        // Outputs behind the last repeat it: every thread loads from where there is something.
        let row = (p.weight_at + min(first, p.n_outputs - 1u) * p.in_features) / per_vec(FORMAT);
        var second = (p.weight_at + min(first + 1u, p.n_outputs - 1u) * p.in_features) / per_vec(FORMAT);
        if GLU {
            second = (p.up_at + min(first, p.n_outputs - 1u) * p.in_features) / per_vec(FORMAT);
        }
        // Four steps at a time keep eight loads on their way; steps behind the last column load it again and add nothing.
        let n = p.in_features / 8u;
        let lanes = lanes_of(at);
        var sums = vec4(0.0);
        for (var i = lane_of(at); i < n; i += 4u * lanes) {
            let i_1 = min(i + lanes, n - 1u);
            let i_2 = min(i + 2u * lanes, n - 1u);
            let i_3 = min(i + 3u * lanes, n - 1u);
            let a_0 = weight_eight(row, i);
            let b_0 = second_eight(second, i);
            let a_1 = weight_eight(row, i_1);
            let b_1 = second_eight(second, i_1);
            let a_2 = weight_eight(row, i_2);
            let b_2 = second_eight(second, i_2);
            let a_3 = weight_eight(row, i_3);
            let b_3 = second_eight(second, i_3);
            sums += products(a_0, b_0, x_first, i, true);
            sums += products(a_1, b_1, x_first, i_1, i + lanes < n);
            sums += products(a_2, b_2, x_first, i_2, i + 2u * lanes < n);
            sums += products(a_3, b_3, x_first, i_3, i + 3u * lanes < n);
        }
        sums = team_sum(at, sums);
        if NORM != NONE {
            sums *= inverseSqrt(sums.z / f32(p.in_features) + p.eps);
        }
        if lane_of(at) == 0u && own < OUTPUTS {
            finish(first, sums.x, sums.y);
            if !GLU {
                finish(first + 1u, sums.y, 0.0);
            }
        }
    }
}
