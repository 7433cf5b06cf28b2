// matmul for many rows, on cooperative matrices: x comes as half_rows leaves it, and what a row is multiplied with in place of `rows`.
//
// A workgroup computes 64 rows times 128 outputs, half as many of a GLU whose halves are together.

@group(0) @binding(2) var<storage, read> row_scales: array<f32>;

// Whether the 32 rows of weights of a subgroup are 16 of gate, then the same of up.
fn is_paired() -> bool { return GLU == TOGETHER; }

// Row `j` of the tile of weights.
fn tile_row(first_output: u32, j: u32) -> Row {
    if !is_paired() {
        return weight_row(first_output + j);
    }
    let output = first_output + j / 32u * 16u + j % 16u;
    if j % 32u < 16u {
        return weight_row(output);
    }
    return up_row(output);
}

@compute @workgroup_size(THREADS)
fn main(at: Invocation) {
    let first_row = at.workgroup.y * X_ROWS;
    let first_output = at.workgroup.x * select(WEIGHT_ROWS, WEIGHT_ROWS / 2u, is_paired());
    for (var i = at.thread; i < X_ROWS; i += THREADS) {
        let row = first_row + i;
        row_places[i] = select(OUTSIDE, out_start(row), row < p.n_rows);
        row_factors[i] = row_scales[min(row, p.n_rows - 1u)];
    }
    var loads: Loads;
    for (var i = 0u; i < X_LOADS; i++) {
        loads.x[i] = min(first_row + x_row_of(at, i), p.n_rows - 1u) * p.in_features;
    }
    for (var i = 0u; i < WEIGHT_LOADS; i++) {
        loads.weights[i] = tile_row(first_output, weight_row_of(at, i));
    }
    compute(at, &loads, first_output, p.n_outputs);
}
