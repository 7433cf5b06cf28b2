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

// Of each part: its maximum and its sum.
var<workgroup> tops: array<vec2<f32>, SPLITS>;
// Of each thread.
var<workgroup> results: array<vec4<f32>, THREADS>;
var<workgroup> sums: array<f32, THREADS>;

// Parts that a thread loads before it knows what they count.
const AHEAD: u32 = 8u;

fn partial_at(head: u32, s: u32, vec: u32) -> vec4<f32> {
    return partial[(head * SPLITS + min(s, SPLITS - 1u)) * (HEAD_DIM / 4u) + vec];
}

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
    let vecs = HEAD_DIM / 4u;
    let step = THREADS / vecs;
    let vec = thread % vecs;
    let first = thread / vecs;
    var ahead: array<vec4<f32>, AHEAD>;
    for (var i = 0u; i < AHEAD; i++) {
        ahead[i] = partial_at(head, first + i * step, vec);
    }
    if thread < SPLITS {
        tops[thread] = peaks[head * SPLITS + thread];
    }
    workgroupBarrier();
    var peak = -3.4e38;
    for (var s = 0u; s < SPLITS; s++) {
        peak = max(peak, tops[s].x);
    }
    var result = vec4(0.0);
    var sum = 0.0;
    if first < step {
        for (var i = 0u; i < AHEAD; i++) {
            let s = first + i * step;
            if s < SPLITS && tops[s].y > 0.0 {
                // What a part without tokens holds is not even a number.
                let factor = exp(tops[s].x - peak);
                result += factor * ahead[i];
                sum += factor * tops[s].y;
            }
        }
        for (var s = first + AHEAD * step; s < SPLITS; s += step) {
            if tops[s].y > 0.0 {
                let factor = exp(tops[s].x - peak);
                result += factor * partial_at(head, s, vec);
                sum += factor * tops[s].y;
            }
        }
    }
    results[thread] = result;
    sums[thread] = sum;
    workgroupBarrier();
    if first > 0u {
        return;
    }
    for (var other = 1u; other < min(step, SPLITS); other++) {
        result += results[other * vecs + vec];
        sum += sums[other * vecs + vec];
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
