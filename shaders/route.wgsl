// The router's second half, behind route_scores: softmax over all experts, the top_k largest in ascending order of id; equal scores choose
// the lower id.
//
// A workgroup is one row. An expert's rank is the number of experts before it in the order (score descending, id ascending), so that ranks
// all differ whatever the scores are. Bound by launch: there is little work.

override RENORMALIZE: bool = true;
override EXPERTS: u32 = 128u;

struct Params {
    n_rows: u32,
    top_k: u32,
    ids_at: u32,
    weights_at: u32,
    sequences_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> ids: array<i32>;
@group(0) @binding(1) var<storage, read_write> weights: array<f32>;
@group(0) @binding(2) var<storage, read> scores: array<f32>;
@group(0) @binding(3) var<storage, read> sequences: array<i32>;

// Behind the last expert 0, which nobody is behind.
var<workgroup> orders: array<vec4<u32>, (EXPERTS + 3u) / 4u>;
// Of rank 0, 1 ...
var<workgroup> chosen: array<u32, EXPERTS>;

// Grows with the score; negative zero equals zero.
fn order(score: f32) -> u32 {
    let bits = bitcast<u32>(select(score, 0.0, score == 0.0));
    return select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);
}

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let n = at.workgroup.y * at.workgroups.x + at.workgroup.x;
    if n >= p.n_rows {
        return;
    }
    if sequences[p.sequences_at + n] < 0 {
        for (var k = at.thread; k < p.top_k; k += WORKGROUP) {
            ids[p.ids_at + n * p.top_k + k] = -1;
            weights[p.weights_at + n * p.top_k + k] = 0.0;
        }
        return;
    }
    let row = n * EXPERTS;
    for (var e = at.thread; e < 4u * ((EXPERTS + 3u) / 4u); e += WORKGROUP) {
        orders[e / 4u][e % 4u] = select(0u, order(scores[row + min(e, EXPERTS - 1u)]), e < EXPERTS);
    }
    workgroupBarrier();
    for (var e = at.thread; e < EXPERTS; e += WORKGROUP) {
        let own = orders[e / 4u][e % 4u];
        var before = vec4(0u);
        for (var i = 0u; i < (EXPERTS + 3u) / 4u; i++) {
            let others = orders[i];
            let lower = vec4(4u * i, 4u * i + 1u, 4u * i + 2u, 4u * i + 3u) < vec4(e);
            before += select(vec4(0u), vec4(1u), (others > vec4(own)) | ((others == vec4(own)) & lower));
        }
        chosen[before.x + before.y + before.z + before.w] = e;
    }
    workgroupBarrier();
    let most = scores[row + chosen[0]];
    var part = 0.0;
    if RENORMALIZE {
        for (var k = at.thread; k < p.top_k; k += WORKGROUP) {
            part += exp(scores[row + chosen[k]] - most);
        }
    } else {
        for (var e = at.thread; e < EXPERTS; e += WORKGROUP) {
            part += exp(scores[row + e] - most);
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
        weights[p.weights_at + n * p.top_k + place] = exp(scores[row + expert] - most) / sum;
    }
}
