// out[n, r] (+)= activation(weight[r, :] . norm(x[n, :]) + bias[r]) for many rows of x.
//
// A workgroup of 16 x 16 threads computes 64 rows of x times 64 outputs, walking the columns DEPTH at a time through
// workgroup memory; a thread computes every 16th row times every 16th output of the tile. Tiles lie in workgroup memory with
// one vec4 of padding a row, so that neighbouring rows use other banks; the next columns are loaded while these are
// multiplied. The norm's scale is the same for a whole row and is applied at the end. Bound by f32 multiply-adds.

override FORMAT: u32 = 1u;
override NORM: u32 = 3u;
override BIAS: u32 = 3u;
override GLU: bool = false;
override GATHER: bool = false;
override ACCUMULATE: bool = false;
// Rows start at 16 bytes and hold a multiple of 8 elements.
override WIDE: bool = true;
override TILE: u32 = 64u;

const DEPTH: u32 = 16u;
const STRIDE: u32 = DEPTH / 4u + 1u;
const THREADS: u32 = 256u;

struct Params {
    n_rows: u32,
    in_features: u32,
    out_features: u32,
    eps: f32,
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

var<workgroup> x_tile: array<vec4<f32>, TILE * STRIDE>;
var<workgroup> weight_tile: array<vec4<f32>, TILE * STRIDE>;
var<workgroup> up_tile: array<vec4<f32>, select(1u, TILE * STRIDE, GLU)>;
// Of a row's squares: the sums of the threads that load it.
var<workgroup> squares: array<f32, TILE * 4u>;

// A quarter of DEPTH columns of one row, from column `c` on.
fn load_x(n: u32, c: u32) -> vec4<f32> {
    if n >= p.n_rows || c >= p.in_features {
        return vec4(0.0);
    }
    var row = n;
    if GATHER {
        row = u32(rows[p.rows_at + n]);
    }
    let at = p.x_at + row * p.in_features + c;
    if WIDE {
        return x[at / 4u];
    }
    var v = vec4(0.0);
    for (var i = 0u; i < min(4u, p.in_features - c); i++) {
        v[i] = x[(at + i) / 4u][(at + i) % 4u];
    }
    return v;
}

fn load_norm(c: u32) -> vec4<f32> {
    var v = vec4(0.0);
    for (var i = 0u; i < 4u; i++) {
        if c + i < p.in_features {
            let at = p.norm_at + c + i;
            v[i] = decode_element(NORM, norm[at / per_vec(NORM)], at);
        }
    }
    return v;
}

fn decode_four(v: vec4<u32>, at: u32) -> vec4<f32> {
    if FORMAT == F32 {
        return bitcast<vec4<f32>>(v);
    }
    return decode_half(FORMAT, v, (at & 4u) != 0u);
}

fn load_weight(r: u32, c: u32) -> vec4<f32> {
    if r >= p.n_outputs || c >= p.in_features {
        return vec4(0.0);
    }
    let at = p.weight_at + r * p.in_features + c;
    if WIDE {
        return decode_four(weight[at / per_vec(FORMAT)], at);
    }
    var v = vec4(0.0);
    for (var i = 0u; i < min(4u, p.in_features - c); i++) {
        v[i] = decode_element(FORMAT, weight[(at + i) / per_vec(FORMAT)], at + i);
    }
    return v;
}

fn load_up(r: u32, c: u32) -> vec4<f32> {
    if r >= p.n_outputs || c >= p.in_features {
        return vec4(0.0);
    }
    let at = p.up_at + r * p.in_features + c;
    if WIDE {
        return decode_four(up[at / per_vec(FORMAT)], at);
    }
    var v = vec4(0.0);
    for (var i = 0u; i < min(4u, p.in_features - c); i++) {
        v[i] = decode_element(FORMAT, up[(at + i) / per_vec(FORMAT)], at + i);
    }
    return v;
}

fn biased(y: f32, r: u32) -> f32 {
    if BIAS == NONE {
        return y;
    }
    let at = p.bias_at + r;
    return y + decode_element(BIAS, bias[at / per_vec(BIAS)], at);
}

fn biased_up(y: f32, r: u32) -> f32 {
    if BIAS == NONE {
        return y;
    }
    let at = p.up_bias_at + r;
    return y + decode_element(BIAS, up_bias[at / per_vec(BIAS)], at);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first_row = workgroup.y * TILE;
    let first_output = workgroup.x * TILE;
    // Loading: a thread takes a quarter of DEPTH columns of every 64th row.
    let quarter = thread % 4u;
    let loaded = thread / 4u;
    var x_next: array<vec4<f32>, 2>;
    var weight_next: array<vec4<f32>, 2>;
    var up_next: array<vec4<f32>, 2>;
    var own_squares: array<f32, 2>;
    var sums: array<f32, 64>;
    var up_sums: array<f32, 64>;
    for (var i = 0u; i < TILE / 64u; i++) {
        x_next[i] = load_x(first_row + loaded + 64u * i, 4u * quarter);
    }
    for (var i = 0u; i < TILE / 64u; i++) {
        weight_next[i] = load_weight(first_output + loaded + 64u * i, 4u * quarter);
        if GLU {
            up_next[i] = load_up(first_output + loaded + 64u * i, 4u * quarter);
        }
    }
    for (var c = 4u * quarter; c < p.in_features + 4u * quarter; c += DEPTH) {
        var scale = vec4(1.0);
        if NORM != NONE {
            scale = load_norm(c);
        }
        for (var i = 0u; i < TILE / 64u; i++) {
            if NORM != NONE {
                own_squares[i] += dot(x_next[i], x_next[i]);
            }
            x_tile[(loaded + 64u * i) * STRIDE + quarter] = x_next[i] * scale;
        }
        for (var i = 0u; i < TILE / 64u; i++) {
            weight_tile[(loaded + 64u * i) * STRIDE + quarter] = weight_next[i];
            if GLU {
                up_tile[(loaded + 64u * i) * STRIDE + quarter] = up_next[i];
            }
        }
        workgroupBarrier();
        for (var i = 0u; i < TILE / 64u; i++) {
            x_next[i] = load_x(first_row + loaded + 64u * i, c + DEPTH);
        }
        for (var i = 0u; i < TILE / 64u; i++) {
            weight_next[i] = load_weight(first_output + loaded + 64u * i, c + DEPTH);
            if GLU {
                up_next[i] = load_up(first_output + loaded + 64u * i, c + DEPTH);
            }
        }
        for (var k = 0u; k < DEPTH / 4u; k++) {
            var xs: array<vec4<f32>, 8>;
            for (var i = 0u; i < TILE / 16u; i++) {
                xs[i] = x_tile[(thread / 16u + 16u * i) * STRIDE + k];
            }
            for (var j = 0u; j < TILE / 16u; j++) {
                let w = weight_tile[(thread % 16u + 16u * j) * STRIDE + k];
                for (var i = 0u; i < TILE / 16u; i++) {
                    sums[i * (TILE / 16u) + j] += dot(xs[i], w);
                }
                if GLU {
                    let u = up_tile[(thread % 16u + 16u * j) * STRIDE + k];
                    for (var i = 0u; i < TILE / 16u; i++) {
                        up_sums[i * (TILE / 16u) + j] += dot(xs[i], u);
                    }
                }
            }
        }
        workgroupBarrier();
    }
    if NORM != NONE {
        for (var i = 0u; i < TILE / 64u; i++) {
            squares[(loaded + 64u * i) * 4u + quarter] = own_squares[i];
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < TILE / 16u; i++) {
        let row = thread / 16u + 16u * i;
        var scale = 1.0;
        if NORM != NONE {
            let sum = squares[4u * row] + squares[4u * row + 1u] + squares[4u * row + 2u] + squares[4u * row + 3u];
            scale = inverseSqrt(sum / f32(p.in_features) + p.eps);
        }
        for (var j = 0u; j < TILE / 16u; j++) {
            let output = first_output + thread % 16u + 16u * j;
            if first_row + row >= p.n_rows || output >= p.n_outputs {
                continue;
            }
            var y = biased(sums[i * (TILE / 16u) + j] * scale, output);
            if GLU {
                y = y / (1.0 + exp(-y)) * biased_up(up_sums[i * (TILE / 16u) + j] * scale, output);
            }
            let place = p.out_at + (first_row + row) * p.out_features + p.first_output + output;
            if ACCUMULATE {
                y += out[place];
            }
            out[place] = y;
        }
    }
}
