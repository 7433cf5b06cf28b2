// matmul for many rows of x: a workgroup computes a tile of 64 rows times OUTPUTS outputs, of a GLU 64 of gate in the lower half of the tile
// and 64 of up in the upper one. The norm's scale is the same for a whole row and is applied at the end.

override OUTPUTS: u32 = 64u;
// Rows of the weight.
override WEIGHTS: u32 = select(OUTPUTS, 2u * OUTPUTS, GLU == TOGETHER);

// Columns c .. c + 4 of the norm.
fn norm_of(c: u32) -> vec4<f32> {
    if NORM == NONE || c >= p.in_features {
        return vec4(1.0);
    }
    if WIDE {
        return norm_four(c / 4u);
    }
    var v = vec4(1.0);
    for (var i = 0u; i < min(4u, p.in_features - c); i++) {
        let at = p.norm_at + c + i;
        v[i] = decode_element(NORM, norm[at / per_vec(NORM)], at);
    }
    return v;
}

fn scale_of_row(row: u32) -> f32 {
    if NORM == NONE {
        return 1.0;
    }
    return inverseSqrt(squares_of(row) / f32(p.in_features) + p.eps);
}

// Four outputs of a row of the tile.
fn finish_four(first_row: u32, row: u32, output: u32, sums: vec4<f32>, up_sums: vec4<f32>) {
    if first_row + row >= p.n_rows {
        return;
    }
    let scale = scale_of_row(row);
    let y = sums * scale;
    let up = up_sums * scale;
    finish(first_row + row, output, y.x, up.x);
    finish(first_row + row, output + 1u, y.y, up.y);
    finish(first_row + row, output + 2u, y.z, up.z);
    finish(first_row + row, output + 3u, y.w, up.w);
}

fn finish_rows(first_row: u32, row: u32, output: u32, sums: mat4x4<f32>, up: mat4x4<f32>) {
    finish_four(first_row, row, output, sums[0], up[0]);
    finish_four(first_row, row + 1u, output, sums[1], up[1]);
    finish_four(first_row, row + 2u, output, sums[2], up[2]);
    finish_four(first_row, row + 3u, output, sums[3], up[3]);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first_row = workgroup.y * ROWS;
    let first_output = workgroup.x * OUTPUTS;
    let own = weight_row_of(thread);
    var weight = weight_row(first_output + own);
    if GLU == TOGETHER && own >= 64u {
        weight = up_row(first_output + own - 64u);
    }
    let n_rows = min(ROWS, p.n_rows - first_row);
    let inside = x_row_of(thread) < n_rows;
    var start = 0u;
    if inside {
        start = x_start(first_row + x_row_of(thread));
    }
    let sums = product(thread, n_rows, start, inside, weight);
    let row = thread / 16u * 4u;
    let output = first_output + thread % 16u * 4u;
    finish_rows(first_row, row, output, sums.low, sums.high);
    if OUTPUTS > 64u {
        finish_rows(first_row, row, output + 64u, sums.high, sums.high);
    }
}
