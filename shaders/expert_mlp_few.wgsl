// One half of the routed experts where an expert has few routes: inner[route] = silu(gate . x) * (up . x), then, with DOWN,
// parts[route] = weight[route] * down . inner[route].
//
// A record lies in slot `table[layer, expert]` of the pool: gate, up and down, row-major; rows are wide. A workgroup computes OUTPUTS
// outputs of one expert for its routes. Where there is one row, each route has an expert of its own, and `routes` is ids. Else routes are
// SEARCHED: `routes` is ids, the first route that chose the expert leads and takes all that did, and the workgroups of the others leave. Or
// they are SORTED by expert in tiles, as expert_mlp_group leaves them. A team, or with SPLIT the whole workgroup, computes four outputs of
// down, or two of gate and up, and reads each weight once for every two routes. Experts outside of the window of chunks are left to other dispatches. Bound by the bytes of
// the experts; of 4-bit codes by what it takes to decode them.

override DOWN: bool = false;
override WALK: u32 = 0u;
override OUTPUTS: u32 = 32u;
override SPLIT: bool = false;

const SEARCHED: u32 = 1u;
const SORTED: u32 = 2u;

// Routes of a batch whose ids are searched, at most.
const MAX_ROUTES: u32 = 256u;

@group(0) @binding(2) var<storage, read> routes: array<u32>;

var<workgroup> n_before: atomic<u32>;
var<workgroup> n_matching: atomic<u32>;
var<workgroup> n_matched: vec2<u32>;
var<workgroup> matched: array<u32, select(1u, MAX_ROUTES, WALK == SEARCHED)>;

// x comes normed.
const NORM: u32 = NONE;

fn norm_four(v: u32) -> vec4<f32> {
    return vec4(1.0);
}

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

fn route_at(workgroup: vec3<u32>, place: u32) -> u32 {
    switch WALK {
        case SEARCHED: { return matched[place]; }
        case SORTED: { return routes[1u + 3u * p.routes_at + place]; }
        default: { return workgroup.y; }
    }
}

// vec4 of x at which a route's row starts.
fn x_row(route: u32) -> u32 {
    return (p.x_at + select(route / p.top_k, route, DOWN) * p.in_features) / 4u;
}

fn finish(route: u32, output: u32, sum: f32, up_sum: f32) {
    if output >= p.out_features {
        return;
    }
    var y = sum;
    if DOWN {
        y *= weights[p.weights_at + route];
    } else {
        y = sum / (1.0 + exp(-sum)) * up_sum;
    }
    out[p.out_at + route * p.out_features + output] = y;
}

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let tile = 1u + 3u * at.workgroup.y;
    var expert = -1;
    if WALK != SORTED {
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
    var n_places = 1u;
    if WALK == SORTED {
        first_place = routes[tile + 1u];
        n_places = routes[tile + 2u];
    } else if WALK == SEARCHED {
        n_places = collect(at.thread, at.workgroup.y, u32(expert));
    }
    let outputs = select(2u, 4u, DOWN);
    let teams = select(teams_of(at), 1u, SPLIT);
    let team = select(team_of(at), 0u, SPLIT);
    for (var start = 0u; start < OUTPUTS; start += teams * outputs) {
        let own = start + team * outputs;
        let first = at.workgroup.x * OUTPUTS + own;
        var rows = Four(weight_row(place, first), weight_row(place, first + 1u), weight_row(place, first + 2u), weight_row(place, first + 3u));
        if !DOWN {
            rows.c = up_row(place, first);
            rows.d = up_row(place, first + 1u);
        }
        for (var i = 0u; i < n_places; i += 2u) {
            let two = i + 1u < n_places;
            let route = route_at(at.workgroup, first_place + i);
            let other = route_at(at.workgroup, first_place + select(i, i + 1u, two));
            let sums = four_rows(at, rows, vec2(x_row(route), x_row(other)), two);
            // A thread finishes an output.
            let lane = select(lane_of(at), at.thread, SPLIT);
            if lane < outputs && own < OUTPUTS {
                finish(route, first + lane, sums.first[lane], sums.first[(lane + 2u) % 4u]);
                if two {
                    finish(other, first + lane, sums.second[lane], sums.second[(lane + 2u) % 4u]);
                }
            }
        }
    }
}
