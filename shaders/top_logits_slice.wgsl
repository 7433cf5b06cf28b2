// The largest logits of a slice of a row, in any order, and the slice's part of log(sum of exp(logit * inverse_temperature)).
//
// A candidate is a pair of words, larger ones first: the logit's bits in an order that grows, and the complement of the id, so
// that equal logits choose the lower id and no two candidates are equal. A workgroup keeps a slice of SLICE logits in
// workgroup memory and finds the K-th largest pair eight bits at a time; what is at least that goes to
// candidates [n_rows][n_slices][K], filled up with pairs of zero. Bound by the latency of the passes.

override SLICE: u32 = 2048u;
override K: u32 = 256u;

struct Params {
    vocab: u32,
    n_slices: u32,
    logits_at: u32,
    inverse_temperatures_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> candidates: array<vec2<u32>>;
// Maximum and sum of each slice.
@group(0) @binding(1) var<storage, read_write> peaks: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read> inverse_temperatures: array<f32>;

var<workgroup> keys: array<u32, SLICE>;

var<private> slice_first: u32;
var<private> slice_length: u32;

fn n_pairs() -> u32 {
    return slice_length;
}

fn pair(i: u32) -> vec2<u32> {
    return vec2(keys[i], ~(slice_first + i));
}

// Grows with the logit.
fn order(logit: f32) -> u32 {
    let bits = bitcast<u32>(logit);
    return select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);
}

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let row = at.workgroup.y;
    let thread = at.thread;
    slice_first = at.workgroup.x * SLICE;
    slice_length = min(SLICE, p.vocab - slice_first);
    let source = p.logits_at + row * p.vocab + slice_first;
    let inverse_temperature = inverse_temperatures[p.inverse_temperatures_at + row];
    var own_peak = -3.4e38;
    for (var i = thread; i < slice_length; i += WORKGROUP) {
        keys[i] = order(logits[source + i]);
        own_peak = max(own_peak, logits[source + i] * inverse_temperature);
    }
    let peak = workgroup_max(at, own_peak);
    var own_sum = 0.0;
    for (var i = thread; i < slice_length; i += WORKGROUP) {
        own_sum += exp(logits[source + i] * inverse_temperature - peak);
    }
    let sum = workgroup_sum(at, own_sum);
    let slice = row * p.n_slices + at.workgroup.x;
    if thread == 0u {
        peaks[slice] = vec2(peak, sum);
    }
    let wanted = min(K, slice_length);
    let least = select_pair(thread, wanted);
    for (var i = thread; i < slice_length; i += WORKGROUP) {
        let own = pair(i);
        if at_least(own, least) {
            candidates[slice * K + atomicAdd(&n_taken, 1u)] = own;
        }
    }
    for (var i = wanted + thread; i < K; i += WORKGROUP) {
        candidates[slice * K + i] = vec2(0u, 0u);
    }
}
