// Down of the routed experts, and what combine does with it: x[n] += sum over k of weight[n, k] * down . inner[n, k], in the order of k.
// Routes with id -1 are left out.
//
// A workgroup is OUTPUTS outputs of a row. A team computes four of them of a route at a time, and the routes meet in workgroup memory in
// place of memory, so that each row of `x` is read and written once. Rows of weights are wide, and without scales. Bound by the bytes of the
// experts.

override TOP_K: u32 = 8u;
override OUTPUTS: u32 = 4u;

@group(0) @binding(2) var<storage, read> ids: array<i32>;

// inner comes without a norm, and teams do not share it.
const NORM: u32 = NONE;
const SPLIT: bool = false;

fn norm_four(v: u32) -> vec4<f32> {
    return vec4(1.0);
}

// Of each four outputs, of each route.
var<workgroup> parts: array<vec4<f32>, OUTPUTS / 4u * TOP_K>;

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let row = at.workgroup.y;
    let block = at.workgroup.x * OUTPUTS;
    let own = block + at.thread;
    let finishes = at.thread < OUTPUTS && own < p.out_features;
    let place = p.out_at + row * p.out_features + own;
    var sum = 0.0;
    if finishes {
        sum = out[place];
    }
    let n_parts = OUTPUTS / 4u * TOP_K;
    for (var start = 0u; start < n_parts; start += teams_of(at)) {
        // Who has no part left repeats the last: all meet in the sums.
        let part = min(start + team_of(at), n_parts - 1u);
        let route = row * TOP_K + part % TOP_K;
        let first = block + part / TOP_K * 4u;
        let expert = ids[p.routes_at + route];
        let weight = weights[p.weights_at + route];
        let place = place_of(u32(max(expert, 0)));
        let rows = Four(weight_row(place, first), weight_row(place, first + 1u), weight_row(place, first + 2u), weight_row(place, first + 3u));
        let inner = (p.x_at + route * p.in_features) / 4u;
        let sums = four_rows(at, rows, vec2(inner), false).first;
        if lane_of(at) == 0u {
            parts[part] = select(vec4(0.0), weight * sums, expert >= 0);
        }
    }
    workgroupBarrier();
    if finishes {
        for (var k = 0u; k < TOP_K; k++) {
            sum += parts[at.thread / 4u * TOP_K + k][at.thread % 4u];
        }
        out[place] = sum;
    }
}
