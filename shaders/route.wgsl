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
// Of each expert.
var<workgroup> ranks: array<atomic<u32>, EXPERTS>;
// Of rank 0, 1 ...
var<workgroup> chosen: array<u32, EXPERTS>;

// Grows with the score; negative zero equals zero.
fn order(score: f32) -> u32 {
    let bits = bitcast<u32>(select(score, 0.0, score == 0.0));
    return select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);
}

fn order_of(expert: u32) -> u32 {
    return orders[expert / 4u][expert % 4u];
}

// The score that has the expert's order; zero of both zeros.
fn score_of(expert: u32) -> f32 {
    let order = order_of(expert);
    return bitcast<f32>(select(~order, order & 0x7fffffffu, (order >> 31u) == 1u));
}

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let n = at.workgroup.y * at.workgroups.x + at.workgroup.x;
    if n >= p.n_rows {
        return;
    }
    let is_row = sequences[p.sequences_at + n] >= 0;
    for (var e = at.thread; e < 4u * ((EXPERTS + 3u) / 4u); e += WORKGROUP) {
        orders[e / 4u][e % 4u] = select(0u, order(scores[n * EXPERTS + min(e, EXPERTS - 1u)]), e < EXPERTS);
    }
    for (var e = at.thread; e < EXPERTS; e += WORKGROUP) {
        atomicStore(&ranks[e], 0u);
    }
    workgroupBarrier();
    // As many threads as there are share an expert and take its rivals in turns.
    let sharers = max(WORKGROUP / EXPERTS, 1u);
    for (var i = at.thread; i < EXPERTS * sharers; i += WORKGROUP) {
        let e = i % EXPERTS;
        let own = order_of(e);
        var before = vec4(0u);
        for (var o = i / EXPERTS; o < (EXPERTS + 3u) / 4u; o += sharers) {
            let others = orders[o];
            let lower = vec4(4u * o, 4u * o + 1u, 4u * o + 2u, 4u * o + 3u) < vec4(e);
            before += select(vec4(0u), vec4(1u), (others > vec4(own)) | ((others == vec4(own)) & lower));
        }
        atomicAdd(&ranks[e], before.x + before.y + before.z + before.w);
    }
    workgroupBarrier();
    for (var e = at.thread; e < EXPERTS; e += WORKGROUP) {
        chosen[atomicLoad(&ranks[e])] = e;
    }
    workgroupBarrier();
    let most = score_of(chosen[0]);
    var all = 0.0;
    if !RENORMALIZE {
        for (var e = at.thread; e < EXPERTS; e += WORKGROUP) {
            all += exp(score_of(e) - most);
        }
        all = workgroup_sum(at, all);
    }
    for (var k = at.thread; k < p.top_k; k += WORKGROUP) {
        let own = chosen[k];
        var place = 0u;
        var sum = 0.0;
        for (var i = 0u; i < p.top_k; i++) {
            let other = chosen[i];
            place += select(0u, 1u, other < own);
            sum += exp(score_of(other) - most);
        }
        let weight = exp(score_of(own) - most) / select(all, sum, RENORMALIZE);
        ids[p.ids_at + n * p.top_k + place] = select(-1, i32(own), is_row);
        weights[p.weights_at + n * p.top_k + place] = select(0.0, weight, is_row);
    }
}
