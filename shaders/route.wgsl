// The router: norm, gate, softmax over all experts, the top_k largest in ascending order of id; equal scores choose the lower id.
//
// A workgroup is one row; a team computes four scores at a time, 4 columns a lane. An expert's rank is the number of experts
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

// Elements 4 i .. 4 i + 4 out of the vec4 they lie in.
fn columns(format: u32, v: vec4<u32>, i: u32) -> vec4<f32> {
    if format == F32 {
        return bitcast<vec4<f32>>(v);
    }
    return decode_half(format, v, (i & 1u) == 1u);
}

fn x_element(i: u32) -> f32 {
    return x[i / 4u][i % 4u];
}

// x * norm, columns 4 i .. 4 i + 4; 0 behind the last.
fn weighted(row: u32, i: u32) -> vec4<f32> {
    if WIDE {
        return x[row / 4u + i] * columns(NORM, norm[(p.norm_at + 4u * i) / per_vec(NORM)], i);
    }
    var v = vec4(0.0);
    for (var c = 0u; c < 4u; c++) {
        if 4u * i + c < p.hidden {
            let w = p.norm_at + 4u * i + c;
            v[c] = x_element(row + 4u * i + c) * decode_element(NORM, norm[w / per_vec(NORM)], w);
        }
    }
    return v;
}

// Columns 4 i .. 4 i + 4 of an expert's row; 0 behind the last.
fn router_four(expert: u32, i: u32) -> vec4<f32> {
    let first = p.router_at + expert * p.hidden + 4u * i;
    if WIDE {
        return columns(ROUTER, router[first / per_vec(ROUTER)], i);
    }
    var v = vec4(0.0);
    for (var c = 0u; c < min(4u, p.hidden - 4u * i); c++) {
        v[c] = decode_element(ROUTER, router[(first + c) / per_vec(ROUTER)], first + c);
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
    var squares = 0.0;
    for (var i = at.thread; i < p.hidden; i += WORKGROUP) {
        squares += x_element(row + i) * x_element(row + i);
    }
    let scale = inverseSqrt(workgroup_sum(at, squares) / f32(p.hidden) + p.eps);
    for (var i = at.thread; i < p.hidden; i += WORKGROUP) {
        let w = p.norm_at + i;
        let value = x_element(row + i) * scale * decode_element(NORM, norm[w / per_vec(NORM)], w);
        normed[p.normed_at + n * p.hidden + i] = value;
    }
    if sequences[p.sequences_at + n] < 0 {
        for (var k = at.thread; k < p.top_k; k += WORKGROUP) {
            ids[p.ids_at + n * p.top_k + k] = -1;
            weights[p.weights_at + n * p.top_k + k] = 0.0;
        }
        return;
    }
    let last = EXPERTS - 1u;
    for (var first = 0u; first < EXPERTS; first += 4u * teams_of(at)) {
        let e = first + 4u * team_of(at);
        let experts = min(vec4(e, e + 1u, e + 2u, e + 3u), vec4(last));
        var sums = vec4(0.0);
        for (var i = lane_of(at); i < (p.hidden + 3u) / 4u; i += lanes_of(at)) {
            let w = mat4x4(
                router_four(experts.x, i),
                router_four(experts.y, i),
                router_four(experts.z, i),
                router_four(experts.w, i),
            );
            sums += weighted(row, i) * w;
        }
        sums = team_sum(at, sums) * scale;
        if lane_of(at) < 4u && e + lane_of(at) <= last {
            scores[e + lane_of(at)] = sums[lane_of(at)];
        }
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
