// One half of the routed experts for many rows: inner[route] = silu(gate . x) * (up . x), then, with DOWN,
// parts[route] = weight[route] * down . inner[route].
//
// Routes come sorted by expert in tiles of at most 64, `routes` as expert_mlp_group leaves it; records as in
// expert_mlp_few. A workgroup computes a tile of routes times OUTPUTS outputs, gate in the lower half of the tile and up in the upper one.
// Experts outside of the window of chunks are left to other dispatches.

override DOWN: bool = false;
override OUTPUTS: u32 = 64u;
// Rows of the weight.
override WEIGHTS: u32 = select(2u * OUTPUTS, OUTPUTS, DOWN);

// x comes normed.
const NORM: u32 = NONE;

fn norm_of(c: u32) -> vec4<f32> {
    return vec4(1.0);
}

@group(0) @binding(2) var<storage, read> routes: array<u32>;

fn route_at(place: u32) -> u32 {
    return routes[1u + 3u * p.routes_at + place];
}

// Four outputs of a route.
fn finish_four(route: u32, output: u32, sums: vec4<f32>, up: vec4<f32>) {
    var y = sums;
    if DOWN {
        y *= weights[p.weights_at + route];
    } else {
        y = y / (1.0 + exp(-y)) * up;
    }
    let at = p.out_at + route * p.out_features + output;
    let n = p.out_features - output;
    out[at] = y.x;
    if n > 1u { out[at + 1u] = y.y; }
    if n > 2u { out[at + 2u] = y.z; }
    if n > 3u { out[at + 3u] = y.w; }
}

// Of the routes from `place` on, `n` at most.
fn finish_routes(place: u32, n: i32, output: u32, sums: mat4x4<f32>, up: mat4x4<f32>) {
    if output >= p.out_features {
        return;
    }
    if n > 0 { finish_four(route_at(place), output, sums[0], up[0]); }
    if n > 1 { finish_four(route_at(place + 1u), output, sums[1], up[1]); }
    if n > 2 { finish_four(route_at(place + 2u), output, sums[2], up[2]); }
    if n > 3 { finish_four(route_at(place + 3u), output, sums[3], up[3]); }
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    if workgroup.y >= routes[0] {
        return;
    }
    let tile = 1u + 3u * workgroup.y;
    let place = place_of(routes[tile]);
    let first_place = routes[tile + 1u];
    let n_rows = routes[tile + 2u];
    if !place.inside {
        return;
    }
    let first_output = workgroup.x * OUTPUTS;
    let own = weight_row_of(thread);
    var weight = weight_row(place, first_output + own);
    if !DOWN && own >= 64u {
        weight = up_row(place, first_output + own - 64u);
    }
    let inside = x_row_of(thread) < n_rows;
    var start = 0u;
    if inside {
        let route = route_at(first_place + x_row_of(thread));
        start = p.x_at + select(route / p.top_k, route, DOWN) * p.in_features;
    }
    let sums = product(thread, n_rows, start, inside, weight);
    let row = thread / 16u * 4u;
    let left = i32(n_rows) - i32(row);
    let output = first_output + thread % 16u * 4u;
    finish_routes(first_place + row, left, output, sums.low, sums.high);
    if DOWN {
        finish_routes(first_place + row, left, output + 64u, sums.high, sums.high);
    }
}
