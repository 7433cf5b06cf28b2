// Rows of x as halves, for the kernels that multiply cooperative matrices.
//
// halves[n, :] = x[row(n), :] * norm * 2^k, the largest of a row between 2^14 and 2^15, so that rows of any size keep eleven bits of their
// larger elements; scales[n] takes the power back and is what else a whole row is multiplied with: 1 / rms of a norm, and `weights[n]`.
// A workgroup takes a row, twice: the second time it lies in a cache. Bound by bytes: 4 read and 2 written for an element.

override GATHER: bool = false;
override WEIGHTED: bool = false;

struct Params {
    n_rows: u32,
    n_columns: u32,
    eps: f32,
    x_at: u32,
    rows_at: u32,
    norm_at: u32,
    weights_at: u32,
}
var<immediate> p: Params;

// Pairs of pairs.
@group(0) @binding(0) var<storage, read_write> halves: array<vec2<u32>>;
@group(0) @binding(1) var<storage, read_write> scales: array<f32>;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> rows: array<i32>;
@group(0) @binding(4) var<storage, read> norm: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> weights: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let n = at.workgroup.y * at.workgroups.x + at.workgroup.x;
    if n >= p.n_rows {
        return;
    }
    var row = n;
    if GATHER {
        row = u32(rows[p.rows_at + n]);
    }
    let n_vecs = p.n_columns / 4u;
    let first = p.x_at / 4u + row * n_vecs;
    var most = vec4(0.0);
    var squares = 0.0;
    for (var v = at.thread; v < n_vecs; v += WORKGROUP) {
        let columns = x[first + v];
        squares += dot(columns, columns);
        most = max(most, abs(columns * norm_four(v)));
    }
    let largest = workgroup_max(at, max(max(most.x, most.y), max(most.z, most.w)));
    // Far from where a factor or its inverse is no normal number.
    let exponent = clamp(exponent_of(bitcast<u32>(largest)) - 14, -100, 100);
    let factor = power_of_two(-exponent);
    var scale = power_of_two(exponent);
    if NORM != NONE {
        scale *= inverseSqrt(workgroup_sum(at, squares) / f32(p.n_columns) + p.eps);
    }
    if WEIGHTED {
        scale *= weights[p.weights_at + n];
    }
    for (var v = at.thread; v < n_vecs; v += WORKGROUP) {
        let columns = x[first + v] * norm_four(v) * factor;
        halves[n * n_vecs + v] = vec2(pack2x16float(columns.xy), pack2x16float(columns.zw));
    }
    if at.thread == 0u {
        scales[n] = scale;
    }
}
