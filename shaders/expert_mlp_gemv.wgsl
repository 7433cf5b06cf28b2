// One half of the routed experts for one row: inner[route] = silu(gate . x) * (up . x), then, with DOWN,
// parts[route] = weight[route] * down . inner[route].
//
// A record lies in slot `table[layer, expert]` of the pool: gate, up and down, row-major; rows are wide. The
// routes of one row are different experts: a workgroup computes OUTPUTS outputs of one route, a team one of gate and up, or
// two of down. Experts outside of the window of chunks are left to other dispatches. Bound by the bytes of the experts.

override DOWN: bool = false;
override OUTPUTS: u32 = 8u;

@group(0) @binding(2) var<storage, read> ids: array<i32>;

// vec4 of x at which the route's row starts.
var<private> x_first: u32;

// x comes normed.
const NORM: u32 = NONE;

fn norm_four(v: u32) -> vec4<f32> {
    return vec4(1.0);
}

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let route = at.workgroup.y;
    let expert = ids[p.routes_at + route];
    if expert < 0 {
        return;
    }
    let place = place_of(u32(expert));
    if !place.inside {
        return;
    }
    x_first = (p.x_at + select(0u, route * p.in_features, DOWN)) / 4u;
    let outputs = select(1u, 2u, DOWN);
    let last = p.out_features - 1u;
    for (var start = 0u; start < OUTPUTS; start += teams_of(at) * outputs) {
        let own = start + team_of(at) * outputs;
        let first = at.workgroup.x * OUTPUTS + own;
        var second: Row;
        if DOWN {
            second = weight_row(place, first + 1u);
        } else {
            second = up_row(place, first);
        }
        let sums = two_rows(at, weight_row(place, first), second);
        if lane_of(at) == 0u && own < OUTPUTS && first <= last {
            let output = p.out_at + route * p.out_features + first;
            if DOWN {
                let weight = weights[p.weights_at + route];
                out[output] = weight * sums.x;
                if first < last {
                    out[output + 1u] = weight * sums.y;
                }
            } else {
                out[output] = sums.x / (1.0 + exp(-sums.x)) * sums.y;
            }
        }
    }
}
