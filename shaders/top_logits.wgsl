// The k largest logits of a row from the candidates of its slices (see top_logits_slice), by descending logit, equal ones by
// ascending id, and the log of the sum of all exponentials.
//
// A workgroup is one row: it finds the k-th largest pair, collects what is at least that, and ranks it. Bound by latency.

override K: u32 = 256u;

struct Params {
    vocab: u32,
    n_slices: u32,
    ids_at: u32,
    values_at: u32,
    log_sum_exp_at: u32,
    logits_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> ids: array<i32>;
@group(0) @binding(1) var<storage, read_write> values: array<f32>;
@group(0) @binding(2) var<storage, read_write> log_sum_exp: array<f32>;
@group(0) @binding(3) var<storage, read> logits: array<f32>;
@group(0) @binding(4) var<storage, read> candidates: array<vec2<u32>>;
@group(0) @binding(5) var<storage, read> peaks: array<vec2<f32>>;

var<workgroup> taken: array<vec2<u32>, K>;

var<private> first_pair: u32;

fn n_pairs() -> u32 {
    return p.n_slices * K;
}

fn pair(i: u32) -> vec2<u32> {
    return candidates[first_pair + i];
}

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let row = at.workgroup.x;
    let thread = at.thread;
    first_pair = row * p.n_slices * K;
    var own_peak = -3.4e38;
    for (var i = thread; i < p.n_slices; i += WORKGROUP) {
        own_peak = max(own_peak, peaks[row * p.n_slices + i].x);
    }
    let peak = workgroup_max(at, own_peak);
    var own_sum = 0.0;
    for (var i = thread; i < p.n_slices; i += WORKGROUP) {
        let slice = peaks[row * p.n_slices + i];
        own_sum += slice.y * exp(slice.x - peak);
    }
    let sum = workgroup_sum(at, own_sum);
    if thread == 0u {
        log_sum_exp[p.log_sum_exp_at + row] = peak + log(sum);
    }
    let least = select_pair(thread, K);
    for (var i = thread; i < n_pairs(); i += WORKGROUP) {
        let own = pair(i);
        if at_least(own, least) {
            taken[atomicAdd(&n_taken, 1u)] = own;
        }
    }
    workgroupBarrier();
    for (var i = thread; i < K; i += WORKGROUP) {
        let own = taken[i];
        var rank = 0u;
        for (var other = 0u; other < K; other++) {
            rank += select(0u, 1u, at_least(taken[other], own) && other != i);
        }
        let id = ~own.y;
        ids[p.ids_at + row * K + rank] = i32(id);
        values[p.values_at + row * K + rank] = logits[p.logits_at + row * p.vocab + id];
    }
}
