// Puts the parts of a split attention together: out = sum of exp(peak_s - peak) partial_s / sum of exp(peak_s - peak) sum_s; GATED,
// times the sigmoid of the gates behind the head's query in `gate`.
//
// partial: [row][head][split][head_dim], peaks: [row][head][split]. A workgroup is one head of one row: a thread takes four
// dimensions of every STEP-th part, STEP being as many as the threads are enough for. Bound by latency.

override SPLITS: u32 = 8u;

const THREADS: u32 = 256u;

struct Params {
    n_rows: u32,
    n_heads: u32,
    out_at: u32,
    gate_width: u32,
    gate_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> partial: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> peaks: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read> gate: array<f32>;

// Of each part: exp(peak_s - peak), 0 where it has no tokens, and that times its sum.
var<workgroup> factors: array<vec2<f32>, SPLITS>;
var<workgroup> results: array<vec4<f32>, THREADS>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = workgroup.y * workgroups.x + workgroup.x;
    if head >= p.n_rows * p.n_heads {
        return;
    }
    if thread < SPLITS {
        factors[thread] = peaks[head * SPLITS + thread];
    }
    workgroupBarrier();
    var peak = -3.4e38;
    for (var s = 0u; s < SPLITS; s++) {
        peak = max(peak, factors[s].x);
    }
    workgroupBarrier();
    if thread < SPLITS {
        let part = factors[thread];
        let factor = select(0.0, exp(part.x - peak), part.y > 0.0);
        factors[thread] = vec2(factor, factor * part.y);
    }
    workgroupBarrier();
    let vecs = HEAD_DIM / 4u;
    let step = THREADS / vecs;
    let vec = thread % vecs;
    let first = thread / vecs;
    var result = vec4(0.0);
    for (var s = first; s < SPLITS && first < step; s += step) {
        // What a part without tokens holds is not even a number.
        result += select(vec4(0.0), factors[s].x * partial[(head * SPLITS + s) * vecs + vec], factors[s].x > 0.0);
    }
    results[thread] = result;
    workgroupBarrier();
    if first > 0u {
        return;
    }
    var sum = 0.0;
    for (var s = 0u; s < SPLITS; s++) {
        sum += factors[s].y;
    }
    for (var other = 1u; other < min(step, SPLITS); other++) {
        result += results[other * vecs + vec];
    }
    if GATED {
        result *= gates(head / p.n_heads, head % p.n_heads, 4u * vec);
    }
    result = select(vec4(0.0), result / sum, sum > 0.0);
    let at = p.out_at + head * HEAD_DIM + 4u * vec;
    for (var i = 0u; i < 4u; i++) {
        out[at + i] = result[i];
    }
}
