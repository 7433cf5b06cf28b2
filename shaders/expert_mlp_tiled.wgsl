// One half of the routed experts for many rows: inner[route] = silu(gate . x) * (up . x), then, with DOWN,
// parts[route] = weight[route] * down . inner[route].
//
// Routes come sorted by expert in tiles of at most TILE, `routes` as expert_mlp_group leaves it; records as in
// expert_mlp_few. A workgroup computes a tile of routes times OUTPUTS outputs as in matmul_tiled. Experts outside of the window
// of chunks are left to other dispatches. Bound by f32 multiply-adds; each load of weights chooses a chunk, which is not free, so that
// eight columns come at a time.

override DOWN: bool = false;
override WIDE: bool = true;
// Routes of a tile.
override TILE: u32 = 64u;
override OUTPUTS: u32 = 64u;

const DEPTH: u32 = 16u;
const STRIDE: u32 = DEPTH / 4u + 1u;

@group(0) @binding(2) var<storage, read> routes: array<u32>;

var<workgroup> x_tile: array<vec4<f32>, TILE * STRIDE>;
var<workgroup> weight_tile: array<vec4<f32>, OUTPUTS * STRIDE>;
var<workgroup> up_tile: array<vec4<f32>, select(OUTPUTS * STRIDE, 1u, DOWN)>;

// Columns c .. c + 8 of a row, as they lie there; f32 where rows are not wide.
fn load_row(row: Row, c: u32) -> Two {
    if c >= p.in_features {
        return Two(vec4(0u), vec4(0u));
    }
    if WIDE {
        return stored_eight(row, c);
    }
    var v: Two;
    for (var i = 0u; i < min(8u, p.in_features - c); i++) {
        let column = bitcast<u32>(element(row, c + i));
        if i < 4u {
            v.first[i] = column;
        } else {
            v.second[i - 4u] = column;
        }
    }
    return v;
}

fn decode(v: Two) -> Eight {
    if WIDE {
        return decode_eight(v);
    }
    return Eight(bitcast<vec4<f32>>(v.first), bitcast<vec4<f32>>(v.second));
}

// Columns c .. c + 4 of the row that starts at element `row`.
fn load_x(row: u32, inside: bool, c: u32) -> vec4<f32> {
    if !inside || c >= p.in_features {
        return vec4(0.0);
    }
    let at = row + c;
    if WIDE {
        return x[at / 4u];
    }
    var v = vec4(0.0);
    for (var i = 0u; i < min(4u, p.in_features - c); i++) {
        v[i] = x[(at + i) / 4u][(at + i) % 4u];
    }
    return v;
}

fn route_at(place: u32) -> u32 {
    return routes[1u + 3u * p.routes_at + place];
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
    let quarter = thread % 4u;
    let loaded = thread / 4u;
    var x_row: u32;
    let x_inside = loaded < n_rows;
    if x_inside {
        let route = route_at(first_place + loaded);
        x_row = p.x_at + select(route / p.top_k, route, DOWN) * p.in_features;
    }
    var sums: array<f32, 16>;
    var up_sums: array<f32, 16>;
    var x_next = vec4(0.0);
    if loaded < TILE {
        x_next = load_x(x_row, x_inside, 4u * quarter);
    }
    // Weights come for two steps of DEPTH columns at a time, eight columns a thread; half of the threads hold those of a step.
    let weight = weight_row(place, first_output + loaded);
    let up = up_row(place, first_output + loaded);
    var weight_next = load_row(weight, 8u * quarter);
    var up_next: Two;
    if !DOWN {
        up_next = load_row(up, 8u * quarter);
    }
    for (var c = 0u; c < p.in_features; c += DEPTH) {
        let is_second = (c & DEPTH) != 0u;
        if loaded < TILE {
            x_tile[loaded * STRIDE + quarter] = x_next;
        }
        if (quarter >= 2u) == is_second {
            let to = loaded * STRIDE + 2u * (quarter & 1u);
            let columns = decode(weight_next);
            weight_tile[to] = columns.low;
            weight_tile[to + 1u] = columns.high;
            if !DOWN {
                let up_columns = decode(up_next);
                up_tile[to] = up_columns.low;
                up_tile[to + 1u] = up_columns.high;
            }
        }
        workgroupBarrier();
        x_next = load_x(x_row, x_inside, c + DEPTH + 4u * quarter);
        if is_second {
            let first = c + DEPTH + 8u * quarter;
            weight_next = load_row(weight, first);
            if !DOWN {
                up_next = load_row(up, first);
            }
        }
        for (var k = 0u; k < DEPTH / 4u; k++) {
            var xs: array<vec4<f32>, 4>;
            for (var i = 0u; i < TILE / 16u; i++) {
                xs[i] = x_tile[(thread / 16u + 16u * i) * STRIDE + k];
            }
            for (var j = 0u; j < OUTPUTS / 16u; j++) {
                let w = weight_tile[(thread % 16u + 16u * j) * STRIDE + k];
                for (var i = 0u; i < TILE / 16u; i++) {
                    sums[i * (OUTPUTS / 16u) + j] += dot(xs[i], w);
                }
                if !DOWN {
                    let u = up_tile[(thread % 16u + 16u * j) * STRIDE + k];
                    for (var i = 0u; i < TILE / 16u; i++) {
                        up_sums[i * (OUTPUTS / 16u) + j] += dot(xs[i], u);
                    }
                }
            }
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < TILE / 16u; i++) {
        let row = thread / 16u + 16u * i;
        if row >= n_rows {
            continue;
        }
        let route = route_at(first_place + row);
        for (var j = 0u; j < OUTPUTS / 16u; j++) {
            let output = first_output + thread % 16u + 16u * j;
            if output >= p.out_features {
                continue;
            }
            var y = sums[i * (OUTPUTS / 16u) + j];
            if DOWN {
                y *= weights[p.weights_at + route];
            } else {
                y = y / (1.0 + exp(-y)) * up_sums[i * (OUTPUTS / 16u) + j];
            }
            out[p.out_at + route * p.out_features + output] = y;
        }
    }
}
