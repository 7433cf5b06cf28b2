// One half of the routed experts for many rows, on cooperative matrices: inner[route] = silu(gate . x) * (up . x), then, with DOWN,
// parts[route] = weight[route] * down . inner[route].
//
// Rows come as half_rows leaves them, with what a row is multiplied with in place of `weights`; routes sorted by expert in tiles of at
// most 64, as expert_mlp_group leaves them. A workgroup computes a tile of routes times OUTPUTS outputs, of gate and up or of down.
// Experts outside of the window of chunks are left to other dispatches.

override DOWN: bool = false;
// Of a workgroup: as many as a tile has rows of weights, or half as many of gate and up.
override OUTPUTS: u32 = 64u;

@group(0) @binding(2) var<storage, read> routes: array<u32>;

// Whether the 32 rows of weights of a subgroup are 16 of gate, then the same of up.
fn is_paired() -> bool { return !DOWN; }

// Row `j` of the tile of weights.
fn tile_row(place: Place, first_output: u32, j: u32) -> Row {
    if !is_paired() {
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

// Nothing that `out` holds is needed.
fn held(place: u32) -> f32 { return 0.0; }

fn finished(output: u32, sum: f32, up_sum: f32, held: f32) -> f32 {
    if DOWN {
        return sum;
    }
    return sum / (1.0 + exp(-sum)) * up_sum;
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
    for (var i = at.thread; i < X_ROWS; i += THREADS) {
        row_places[i] = OUTSIDE;
        if i < n_rows {
            let route = route_at(first_place + i);
            row_places[i] = p.out_at + route * p.out_features;
            row_factors[i] = weights[p.weights_at + row_of_route(route)];
        }
    }
    var loads: Loads;
    for (var i = 0u; i < X_LOADS; i++) {
        let row = min(x_row_of(at, i), n_rows - 1u);
        loads.x[i] = row_of_route(route_at(first_place + row)) * p.in_features;
    }
    for (var i = 0u; i < WEIGHT_LOADS; i++) {
        loads.weights[i] = tile_row(place, first_output, weight_row_of(at, i));
    }
    compute(at, &loads, first_output, p.out_features);
}
