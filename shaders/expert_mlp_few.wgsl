// One half of the routed experts where an expert has few routes: inner[route] = silu(gate . x) * (up . x), then, with DOWN,
// parts[route] = weight[route] * down . inner[route].
//
// Records as in expert_mlp_gemv. A workgroup computes OUTPUTS outputs of one expert for up to MAX_ROUTES routes. With GROUPED the
// routes come sorted by expert in tiles, `routes` as expert_mlp_group leaves it; else `routes` is ids, the first route that
// chose the expert leads and takes all that did, and the workgroups of the others leave. A team computes four outputs of
// down, or two of gate and up, 4 columns a lane, as products of 4 x 4 matrices, and reads each weight once for every four
// routes. Experts outside of the window of chunks are left to other dispatches. Bound by the bytes of the experts.

override DOWN: bool = false;
override GROUPED: bool = false;
override OUTPUTS: u32 = 32u;

// Routes of a batch whose ids are searched, at most.
const MAX_ROUTES: u32 = 256u;

@group(0) @binding(2) var<storage, read> routes: array<u32>;

var<workgroup> n_before: atomic<u32>;
var<workgroup> n_matching: atomic<u32>;
var<workgroup> n_matched: vec2<u32>;
var<workgroup> matched: array<u32, MAX_ROUTES>;

// Collects the routes that chose an expert; how many there are, or none where another route leads.
fn collect(thread: u32, route: u32, expert: u32) -> u32 {
    if thread == 0u {
        atomicStore(&n_before, 0u);
        atomicStore(&n_matching, 0u);
    }
    workgroupBarrier();
    for (var other = thread; other < p.n_routes; other += WORKGROUP) {
        if routes[p.routes_at + other] == expert {
            if other < route {
                atomicAdd(&n_before, 1u);
            } else {
                matched[atomicAdd(&n_matching, 1u)] = other;
            }
        }
    }
    workgroupBarrier();
    if thread == 0u {
        n_matched = vec2(atomicLoad(&n_before), atomicLoad(&n_matching));
    }
    let counts = workgroupUniformLoad(&n_matched);
    return select(counts.y, 0u, counts.x > 0u);
}

fn route_at(place: u32) -> u32 {
    if !GROUPED {
        return matched[place];
    }
    return routes[1u + 3u * p.routes_at + place];
}

// vec4 of x at which a route's row starts.
fn x_row(route: u32) -> u32 {
    return (p.x_at + select(route / p.top_k, route, DOWN) * p.in_features) / 4u;
}

fn finish(route: u32, output: u32, sum: f32, up_sum: f32) {
    if output >= p.out_features {
        return;
    }
    var y = sum * weights[p.weights_at + route];
    if !DOWN {
        y = sum / (1.0 + exp(-sum)) * up_sum;
    }
    out[p.out_at + route * p.out_features + output] = y;
}

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let tile = 1u + 3u * at.workgroup.y;
    var expert = -1;
    if !GROUPED {
        expert = bitcast<i32>(routes[p.routes_at + at.workgroup.y]);
    } else if at.workgroup.y < routes[0] {
        expert = i32(routes[tile]);
    }
    if expert < 0 {
        return;
    }
    let place = place_of(u32(expert));
    if !place.inside {
        return;
    }
    var first_place = 0u;
    var n_places: u32;
    if GROUPED {
        first_place = routes[tile + 1u];
        n_places = routes[tile + 2u];
    } else {
        n_places = collect(at.thread, at.workgroup.y, u32(expert));
    }
    let outputs = select(2u, 4u, DOWN);
    for (var start = 0u; start < OUTPUTS; start += teams_of(at) * outputs) {
        let own = start + team_of(at) * outputs;
        let first = at.workgroup.x * OUTPUTS + own;
        let row_0 = weight_row(place, first);
        let row_1 = weight_row(place, first + 1u);
        var row_2: Row;
        var row_3: Row;
        if DOWN {
            row_2 = weight_row(place, first + 2u);
            row_3 = weight_row(place, first + 3u);
        } else {
            row_2 = up_row(place, first);
            row_3 = up_row(place, first + 1u);
        }
        for (var quad = 0u; quad < n_places; quad += 4u) {
            // Routes behind the last repeat it.
            let places = first_place + min(vec4(quad, quad + 1u, quad + 2u, quad + 3u), vec4(n_places - 1u));
            let taken = vec4(route_at(places.x), route_at(places.y), route_at(places.z), route_at(places.w));
            let rows = vec4(x_row(taken.x), x_row(taken.y), x_row(taken.z), x_row(taken.w));
            // Column r, component n.
            var sums: mat4x4<f32>;
            for (var i = lane_of(at); i < p.in_features / 4u; i += lanes_of(at)) {
                let c = 4u * i;
                let w = mat4x4(four(row_0, c), four(row_1, c), four(row_2, c), four(row_3, c));
                sums += transpose(mat4x4(x[rows.x + i], x[rows.y + i], x[rows.z + i], x[rows.w + i])) * w;
            }
            let sums_0 = team_sum(at, sums[0]);
            let sums_1 = team_sum(at, sums[1]);
            let sums_2 = team_sum(at, sums[2]);
            let sums_3 = team_sum(at, sums[3]);
            let lane = lane_of(at);
            if lane < 4u && quad + lane < n_places && own < OUTPUTS {
                if DOWN {
                    finish(taken[lane], first, sums_0[lane], 0.0);
                    finish(taken[lane], first + 1u, sums_1[lane], 0.0);
                    finish(taken[lane], first + 2u, sums_2[lane], 0.0);
                    finish(taken[lane], first + 3u, sums_3[lane], 0.0);
                } else {
                    finish(taken[lane], first, sums_0[lane], sums_2[lane]);
                    finish(taken[lane], first + 1u, sums_1[lane], sums_3[lane]);
                }
            }
        }
    }
}
