// matmul for many rows, on cooperative matrices: x comes as half_rows leaves it, with what a row is multiplied with in place of `rows`.
//
// A workgroup computes 64 ROWS rows times 32 COLUMNS outputs, half as many with GLU. Bound by the cooperative matrices.

@group(0) @binding(2) var<storage, read> row_scales: array<f32>;

// Row `j` of the tile of weights. Of a GLU, the 32 rows of a subgroup are 16 of gate, then the same of up.
fn tile_row(first_output: u32, j: u32) -> Row {
    if GLU != TOGETHER {
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
    let first_row = at.workgroup.y * 64u * ROWS;
    let first_output = at.workgroup.x * select(32u, 16u, GLU == TOGETHER) * COLUMNS;
    var loads: Loads;
    for (var i = 0u; i < X_LOADS; i++) {
        let row = first_row + x_row_of(at, i);
        loads.x[i] = row * p.in_features;
        loads.inside[i] = row < p.n_rows;
    }
    for (var i = 0u; i < WEIGHT_LOADS; i++) {
        loads.weights[i] = tile_row(first_output, weight_row_of(at, i));
    }
    var sums: Sums;
    let scale = tile_sums(at, &loads, &sums);
    for (var i = 0u; i < 4u; i++) {
        let to = 512u * at.subgroup;
        coopStoreT(sums.tile[2u * i], &results[to], 32u);
        coopStoreT(sums.tile[2u * i + 1u], &results[to + 16u], 32u);
        workgroupBarrier();
        let row = first_row + at.subgroup / COLUMNS * 64u + 16u * i;
        let width = select(32u, 16u, GLU == TOGETHER);
        let column = at.lane % width;
        let output = first_output + at.subgroup % COLUMNS * width + column;
        for (var r = at.lane / width; r < 16u; r += 32u / width) {
            if row + r >= p.n_rows {
                continue;
            }
            let factor = scale * row_scales[row + r];
            var up = 0.0;
            if GLU == TOGETHER {
                up = results[to + 32u * r + 16u + column] * factor;
            }
            finish(row + r, output, results[to + 32u * r + column] * factor, up);
        }
        workgroupBarrier();
    }
}
