// One half of the routed experts for one row: inner[route] = silu(gate . x) * (up . x), then, with DOWN,
// parts[route] = weight[route] * down . inner[route].
//
// A record lies in slot `table[layer, expert]` of the pool: gate, up and down, row-major, rows of a multiple of 8 elements. The
// routes of one row are different experts: a workgroup computes OUTPUTS outputs of one route, a team one of gate and up, or
// two of down. Experts outside of the window of chunks are left to other dispatches. Bound by the bytes of the experts.

override FORMAT: u32 = 1u;
override DOWN: bool = false;
override OUTPUTS: u32 = 8u;

@group(0) @binding(2) var<storage, read> ids: array<i32>;

fn eight(chunk: u32, at: u32, i: u32) -> Eight {
    if FORMAT == F32 {
        let two = chunk_two(chunk, at + 2u * i);
        return Eight(bitcast<vec4<f32>>(two.first), bitcast<vec4<f32>>(two.second));
    }
    let v = chunk_vec(chunk, at + i);
    return Eight(decode_half(FORMAT, v, false), decode_half(FORMAT, v, true));
}

// What columns 8 i .. 8 i + 8 add to both outputs; nothing where they are not inside.
fn products(a: Eight, b: Eight, x_first: u32, i: u32, inside: bool) -> vec4<f32> {
    let low = x[x_first + 2u * i];
    let high = x[x_first + 2u * i + 1u];
    let sums = vec4(dot(low, a.low) + dot(high, a.high), dot(low, b.low) + dot(high, b.high), 0.0, 0.0);
    return select(vec4(0.0), sums, inside);
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
    let chunk = place.chunk;
    let record = place.record;
    let x_first = (p.x_at + select(0u, route * p.in_features, DOWN)) / 4u;
    let outputs = select(1u, 2u, DOWN);
    let last = p.out_features - 1u;
    for (var start = 0u; start < OUTPUTS; start += teams_of(at) * outputs) {
        let own = start + team_of(at) * outputs;
        let first = at.workgroup.x * OUTPUTS + own;
        let row = record + (p.weight_start + min(first, last) * p.in_features) / per_vec(FORMAT);
        var second = record + (p.up_start + min(first, last) * p.in_features) / per_vec(FORMAT);
        if DOWN {
            second = record + (p.weight_start + min(first + 1u, last) * p.in_features) / per_vec(FORMAT);
        }
        // Four steps at a time keep eight loads on their way; steps behind the last column load it again and add nothing.
        let n = p.in_features / 8u;
        let lanes = lanes_of(at);
        var sums = vec4(0.0);
        for (var i = lane_of(at); i < n; i += 4u * lanes) {
            let i_1 = min(i + lanes, n - 1u);
            let i_2 = min(i + 2u * lanes, n - 1u);
            let i_3 = min(i + 3u * lanes, n - 1u);
            let a_0 = eight(chunk, row, i);
            let b_0 = eight(chunk, second, i);
            let a_1 = eight(chunk, row, i_1);
            let b_1 = eight(chunk, second, i_1);
            let a_2 = eight(chunk, row, i_2);
            let b_2 = eight(chunk, second, i_2);
            let a_3 = eight(chunk, row, i_3);
            let b_3 = eight(chunk, second, i_3);
            sums += products(a_0, b_0, x_first, i, true);
            sums += products(a_1, b_1, x_first, i_1, i + lanes < n);
            sums += products(a_2, b_2, x_first, i_2, i + 2u * lanes < n);
            sums += products(a_3, b_3, x_first, i_3, i + 3u * lanes < n);
        }
        sums = team_sum(at, sums);
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
