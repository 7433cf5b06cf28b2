// One half of the routed experts for many rows, on cooperative matrices: inner[route] = silu(gate . x) * (up . x), then, with DOWN,
// parts[route] = weight[route] * down . inner[route].
//
// Rows come as half_rows leaves them, with what a row is multiplied with in place of `weights`; routes sorted by expert in tiles of at
// most 64 ROWS, as expert_mlp_group leaves them. A workgroup computes a tile of routes times 32 COLUMNS outputs, half as many of gate and
// up. Experts outside of the window of chunks are left to other dispatches. Bound by the cooperative matrices.

override DOWN: bool = false;
// Of a workgroup: 32 COLUMNS, or half as many of gate and up.
override OUTPUTS: u32 = 64u;

@group(0) @binding(2) var<storage, read> routes: array<u32>;

// Row `j` of the tile of weights. Of gate and up, the 32 rows of a subgroup are 16 of gate, then the same of up.
fn tile_row(place: Place, first_output: u32, j: u32) -> Row {
    if DOWN {
        return weight_row(place, first_output + j);
    }
    let output = first_output + j / 32u * 16u + j % 16u;
    if j % 32u < 16u {
        return weight_row(place, output);
    }
    return up_row(place, output);
}

fn route_at(place: u32) -> u32 {
    return routes[1u + 3u * p.routes_at + place];
}

// Row of x that belongs to a route.
fn row_of_route(route: u32) -> u32 {
    return select(route / p.top_k, route, DOWN);
}

@compute @workgroup_size(THREADS)
fn main(at: Invocation) {
    if at.workgroup.y >= routes[0] {
        return;
    }
    let tile = 1u + 3u * at.workgroup.y;
    let place = place_of(routes[tile]);
    let first_place = routes[tile + 1u];
    let n_rows = routes[tile + 2u];
    if !place.inside {
        return;
    }
    let first_output = at.workgroup.x * OUTPUTS;
    var loads: Loads;
    for (var i = 0u; i < X_LOADS; i++) {
        let row = x_row_of(at, i);
        loads.inside[i] = row < n_rows;
        if row < n_rows {
            loads.x[i] = row_of_route(route_at(first_place + row)) * p.in_features;
        }
    }
    for (var i = 0u; i < WEIGHT_LOADS; i++) {
        loads.weights[i] = tile_row(place, first_output, weight_row_of(at, i));
    }
    var sums: Sums;
    let scale = tile_sums(at, &loads, &sums);
    for (var i = 0u; i < 4u; i++) {
        let to = 512u * at.subgroup;
        coopStoreT(sums.tile[2u * i], &results[to], 32u);
        coopStoreT(sums.tile[2u * i + 1u], &results[to + 16u], 32u);
        workgroupBarrier();
        let row = at.subgroup / COLUMNS * 64u + 16u * i;
        let width = select(16u, 32u, DOWN);
        let column = at.lane % width;
        let output = first_output + at.subgroup % COLUMNS * width + column;
        for (var r = at.lane / width; r < 16u; r += 32u / width) {
            if row + r >= n_rows || output >= p.out_features {
                continue;
            }
            let route = route_at(first_place + row + r);
            let factor = scale * weights[p.weights_at + row_of_route(route)];
            var y = results[to + 32u * r + column] * factor;
            if !DOWN {
                y = y / (1.0 + exp(-y)) * results[to + 32u * r + 16u + column] * factor;
            }
            out[p.out_at + route * p.out_features + output] = y;
        }
        workgroupBarrier();
    }
}
