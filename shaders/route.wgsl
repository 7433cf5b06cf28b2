// The router: norm, gate, softmax over all experts, the top_k largest in ascending order of id; equal scores choose the lower id.
//
// A workgroup is one row; a team computes four scores at a time, 8 columns a lane. An expert's rank is the number of experts
// before it in the order (score descending, id ascending), so that ranks all differ whatever the scores are. All in f32.
// Bound by the latency of one workgroup that reads the router.

override ROUTER: u32 = 1u;
override NORM: u32 = 1u;
override RENORMALIZE: bool = true;
// Rows start at 16 bytes and hold a multiple of 8 elements.
override WIDE: bool = true;
override EXPERTS: u32 = 128u;

struct Params {
    n_rows: u32,
    hidden: u32,
    top_k: u32,
    eps: f32,
    ids_at: u32,
    weights_at: u32,
    normed_at: u32,
    x_at: u32,
    norm_at: u32,
    router_at: u32,
    sequences_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> ids: array<i32>;
@group(0) @binding(1) var<storage, read_write> weights: array<f32>;
@group(0) @binding(2) var<storage, read_write> normed: array<f32>;
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> norm: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> router: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> sequences: array<i32>;

var<workgroup> scores: array<f32, EXPERTS>;
// Of rank 0, 1 ...
var<workgroup> chosen: array<u32, EXPERTS>;

// Grows with the score; negative zero equals zero.
fn order(score: f32) -> u32 {
    let bits = bitcast<u32>(select(score, 0.0, score == 0.0));
    return select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);
}

fn x_element(i: u32) -> f32 {
    return x[i / 4u][i % 4u];
}

fn norm_element(i: u32) -> f32 {
    let at = p.norm_at + i;
    return decode_element(NORM, norm[at / per_vec(NORM)], at);
}

fn router_element(expert: u32, i: u32) -> f32 {
    let at = p.router_at + expert * p.hidden + i;
    return decode_element(ROUTER, router[at / per_vec(ROUTER)], at);
}

// Columns 8 i .. 8 i + 8; 0 behind the last.

fn x_eight(row: u32, i: u32) -> Eight {
    if WIDE {
        return Eight(x[row / 4u + 2u * i], x[row / 4u + 2u * i + 1u]);
    }
    var v: Eight;
    for (var c = 0u; c < 4u; c++) {
        let low = 8u * i + c;
        if low < p.hidden {
            v.low[c] = x_element(row + low);
        }
        if low + 4u < p.hidden {
            v.high[c] = x_element(row + low + 4u);
        }
    }
    return v;
}

fn norm_eight(i: u32) -> Eight {
    let at = p.norm_at / per_vec(NORM);
    if WIDE && NORM == F32 {
        return Eight(bitcast<vec4<f32>>(norm[at + 2u * i]), bitcast<vec4<f32>>(norm[at + 2u * i + 1u]));
    }
    if WIDE {
        let v = norm[at + i];
        return Eight(decode_half(NORM, v, false), decode_half(NORM, v, true));
    }
    var v: Eight;
    for (var c = 0u; c < 4u; c++) {
        let low = 8u * i + c;
        if low < p.hidden {
            v.low[c] = norm_element(low);
        }
        if low + 4u < p.hidden {
            v.high[c] = norm_element(low + 4u);
        }
    }
    return v;
}

fn router_eight(expert: u32, i: u32) -> Eight {
    let at = (p.router_at + expert * p.hidden) / per_vec(ROUTER);
    if WIDE && ROUTER == F32 {
        return Eight(bitcast<vec4<f32>>(router[at + 2u * i]), bitcast<vec4<f32>>(router[at + 2u * i + 1u]));
    }
    if WIDE {
        let v = router[at + i];
        return Eight(decode_half(ROUTER, v, false), decode_half(ROUTER, v, true));
    }
    var v: Eight;
    for (var c = 0u; c < 4u; c++) {
        let low = 8u * i + c;
        if low < p.hidden {
            v.low[c] = router_element(expert, low);
        }
        if low + 4u < p.hidden {
            v.high[c] = router_element(expert, low + 4u);
        }
    }
    return v;
}

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let n = at.workgroup.y * at.workgroups.x + at.workgroup.x;
    if n >= p.n_rows {
        return;
    }
    let row = p.x_at + n * p.hidden;
    let last = EXPERTS - 1u;
    // Each team reads all of x and knows its scale without the others.
    var scale: f32;
    for (var first = 0u; first < EXPERTS; first += 4u * teams_of(at)) {
        let e = first + 4u * team_of(at);
        let experts = min(vec4(e, e + 1u, e + 2u, e + 3u), vec4(last));
        var sums = vec4(0.0);
        var squares = 0.0;
        for (var i = lane_of(at); i < (p.hidden + 7u) / 8u; i += lanes_of(at)) {
            let w_0 = router_eight(experts.x, i);
            let w_1 = router_eight(experts.y, i);
            let w_2 = router_eight(experts.z, i);
            let w_3 = router_eight(experts.w, i);
            let v = x_eight(row, i);
            let weight = norm_eight(i);
            squares += dot(v.low, v.low) + dot(v.high, v.high);
            sums += (v.low * weight.low) * mat4x4(w_0.low, w_1.low, w_2.low, w_3.low);
            sums += (v.high * weight.high) * mat4x4(w_0.high, w_1.high, w_2.high, w_3.high);
        }
        squares = team_sum(at, vec4(squares, 0.0, 0.0, 0.0)).x;
        scale = inverseSqrt(squares / f32(p.hidden) + p.eps);
        sums = team_sum(at, sums) * scale;
        if lane_of(at) < 4u && e + lane_of(at) <= last {
            scores[e + lane_of(at)] = sums[lane_of(at)];
        }
    }
    for (var i = at.thread; i < p.hidden; i += WORKGROUP) {
        normed[p.normed_at + n * p.hidden + i] = x_element(row + i) * scale * norm_element(i);
    }
    if sequences[p.sequences_at + n] < 0 {
        for (var k = at.thread; k < p.top_k; k += WORKGROUP) {
            ids[p.ids_at + n * p.top_k + k] = -1;
            weights[p.weights_at + n * p.top_k + k] = 0.0;
        }
        return;
    }
    workgroupBarrier();
    for (var e = at.thread; e < EXPERTS; e += WORKGROUP) {
        let own = order(scores[e]);
        var rank = 0u;
        for (var other = 0u; other < EXPERTS; other++) {
            let score = order(scores[other]);
            rank += select(0u, 1u, score > own || (score == own && other < e));
        }
        chosen[rank] = e;
    }
    workgroupBarrier();
    let most = scores[chosen[0]];
    var part = 0.0;
    if RENORMALIZE {
        for (var k = at.thread; k < p.top_k; k += WORKGROUP) {
            part += exp(scores[chosen[k]] - most);
        }
    } else {
        for (var e = at.thread; e < EXPERTS; e += WORKGROUP) {
            part += exp(scores[e] - most);
        }
    }
    let sum = workgroup_sum(at, part);
    for (var k = at.thread; k < p.top_k; k += WORKGROUP) {
        let expert = chosen[k];
        var place = 0u;
        for (var other = 0u; other < p.top_k; other++) {
            place += select(0u, 1u, chosen[other] < expert);
        }
        ids[p.ids_at + n * p.top_k + place] = i32(expert);
        weights[p.weights_at + n * p.top_k + place] = exp(scores[expert] - most) / sum;
    }
}
