// out[t, c] = silu(sum over i of weight[c, i] * x[t - (KERNEL - 1) + i, c]); the state stands in front of a span's first row, and ends
// as the span's last KERNEL - 1 raw inputs.
//
// state: [slot][KERNEL - 1][channels]. One thread an element of out; but the rows that reach into a state are all of the thread of the
// span's first row, which writes the state behind them. Bound by bytes.

override FORMAT: u32 = 1u;
override KERNEL: u32 = 4u;

const MAX_KERNEL: u32 = 8u;

struct Params {
    n_rows: u32,
    channels: u32,
    x_width: u32,
    out_at: u32,
    state_at: u32,
    x_at: u32,
    weight_at: u32,
    sequences_at: u32,
    spans_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read_write> state: array<f32>;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> sequences: array<i32>;
// First row, end, slot and whether it resumes, of each.
@group(0) @binding(5) var<storage, read> spans: array<i32>;

fn input(row: u32, c: u32) -> f32 {
    return x[p.x_at + row * p.x_width + c];
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = (workgroup.y * workgroups.x + workgroup.x) * 256u + thread;
    if i >= p.n_rows * p.channels {
        return;
    }
    let row = i / p.channels;
    let c = i % p.channels;
    let sequence = sequences[p.sequences_at + row];
    if sequence < 0 {
        return;
    }
    let span = p.spans_at + 4u * u32(sequence);
    let first = u32(spans[span]);
    let end = u32(spans[span + 1u]);
    let n_before = KERNEL - 1u;
    let has_state = row == first;
    if !has_state && row < first + n_before {
        return;
    }

    let slot = p.state_at + u32(spans[span + 2u]) * n_before * p.channels + c;
    let resumes = spans[span + 3u] == 1;
    var taps: array<f32, MAX_KERNEL>;
    // The inputs in front of the row, oldest first, and its own.
    var inputs: array<f32, MAX_KERNEL>;
    for (var k = 0u; k < KERNEL; k++) {
        let at = p.weight_at + c * KERNEL + k;
        taps[k] = decode_element(FORMAT, weight[at / per_vec(FORMAT)], at);
        inputs[k] = 0.0;
    }
    for (var k = 0u; k < n_before; k++) {
        if !has_state {
            inputs[k] = input(row - n_before + k, c);
        } else if resumes {
            inputs[k] = state[slot + k * p.channels];
        }
    }
    for (var t = row; t < select(row + 1u, min(first + n_before, end), has_state); t++) {
        inputs[n_before] = input(t, c);
        var sum = 0.0;
        for (var k = 0u; k < KERNEL; k++) {
            sum += taps[k] * inputs[k];
        }
        out[p.out_at + t * p.channels + c] = sum / (1.0 + exp(-sum));
        for (var k = 0u; k < n_before; k++) {
            inputs[k] = inputs[k + 1u];
        }
    }
    if !has_state {
        return;
    }
    for (var k = 0u; k < n_before; k++) {
        var value = inputs[k];
        if end > first + n_before {
            value = input(end - n_before + k, c);
        }
        state[slot + k * p.channels] = value;
    }
}
