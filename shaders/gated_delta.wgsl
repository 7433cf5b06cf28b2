// The gated delta rule up to its norm. For each row of a span, of each value head with a state S:
// S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   out = S^T q
//
// state: [slot][value head][KEY_DIM][value_dim]. A workgroup is one span, one value head and COLUMNS columns of its state, which stay in
// registers from the first row to the last: LANES threads a column, VALUES elements each. Threads meet once a row: what the old state
// gives for raw q and k is added up beside the squares of both, scaled behind the sum, and `S^T q` is that of the old state and u (k . q).
// Bound by the bytes of states where spans are short, by the latency of a row where they are long.

override KEY_DIM: u32 = 128u;
override COLUMNS: u32 = 32u;
override LANES: u32 = 8u;
// Heads of q and k start at 16 bytes and hold a multiple of 4 elements.
override WIDE: bool = true;

const THREADS: u32 = 256u;
const VALUES: u32 = 16u;
const VECS: u32 = 4u;

struct Params {
    n_sequences: u32,
    n_key_heads: u32,
    n_value_heads: u32,
    value_dim: u32,
    // Blocks of COLUMNS columns that a head has.
    n_blocks: u32,
    ba_width: u32,
    // Slots that are bound; other dispatches have the others.
    first_slot: u32,
    n_slots: u32,
    out_at: u32,
    state_at: u32,
    qkv_at: u32,
    // Of the first column that is read.
    ba_at: u32,
    constants_at: u32,
    spans_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read_write> state: array<f32>;
@group(0) @binding(2) var<storage, read> qkv: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> ba: array<f32>;
@group(0) @binding(4) var<storage, read> constants: array<f32>;
// First row, end, slot and whether it resumes, of each.
@group(0) @binding(5) var<storage, read> spans: array<i32>;

// Of two rows in turn, so that one barrier a row is enough. Of each thread: S^T k and S^T q over its elements.
var<workgroup> asked: array<vec2<f32>, 2u * THREADS>;
// Of each lane: q . q, k . k and q . k over its elements.
var<workgroup> products: array<vec4<f32>, 2u * LANES>;

fn qkv_element(i: u32) -> f32 {
    return qkv[i / 4u][i % 4u];
}

// Elements key .. key + 4 of the head of q or k that starts at `head`; 0 behind the last.
fn four(head: u32, key: u32) -> vec4<f32> {
    var v = vec4(0.0);
    if WIDE {
        if key < KEY_DIM {
            v = qkv[(head + key) / 4u];
        }
        return v;
    }
    for (var c = 0u; c < 4u; c++) {
        if key + c < KEY_DIM {
            v[c] = qkv_element(head + key + c);
        }
    }
    return v;
}

// exp(g), g being -exp(a_log) * softplus(x).
fn decay_of(a_log: f32, x: f32) -> f32 {
    // log(1 + y) through the series of atanh: a driver's logarithm may be wrong by 2^-21 near 1, and states remember that.
    let y = exp(-abs(x));
    let z = y / (2.0 + y);
    let s = z * z;
    let series = 1.0 + s * (1.0 / 3.0 + s * (1.0 / 5.0 + s * (1.0 / 7.0 + s * (1.0 / 9.0 + s * (1.0 / 11.0 + s / 13.0)))));
    return exp(-exp(a_log) * (max(x, 0.0) + 2.0 * z * series));
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let index = workgroup.y * workgroups.x + workgroup.x;
    let block = index % p.n_blocks;
    let head = index / p.n_blocks % p.n_value_heads;
    let sequence = index / p.n_blocks / p.n_value_heads;
    if sequence >= p.n_sequences {
        return;
    }
    let span = p.spans_at + 4u * sequence;
    let first = u32(spans[span]);
    let end = u32(spans[span + 1u]);
    let slot = u32(spans[span + 2u]) - p.first_slot;
    if first >= end || slot >= p.n_slots {
        return;
    }

    let lane = thread / COLUMNS;
    let column = block * COLUMNS + thread % COLUMNS;
    let works = lane < LANES && column < p.value_dim;
    let first_key = lane * VALUES;
    let own_state = p.state_at + ((slot * p.n_value_heads + head) * KEY_DIM + first_key) * p.value_dim + column;
    let n_own = select(0u, min(VALUES, KEY_DIM - first_key), works);
    var s: array<vec4<f32>, VECS>;
    for (var i = 0u; i < VECS; i++) {
        s[i] = vec4(0.0);
        for (var c = 0u; c < 4u; c++) {
            if 4u * i + c < n_own && spans[span + 3u] == 1 {
                s[i][c] = state[own_state + (4u * i + c) * p.value_dim];
            }
        }
    }

    let keys = p.n_key_heads * KEY_DIM;
    let width = 2u * keys + p.n_value_heads * p.value_dim;
    let key_head = head / (p.n_value_heads / p.n_key_heads) * KEY_DIM;
    let a_log = constants[p.constants_at + head];
    let dt_bias = constants[p.constants_at + p.n_value_heads + head];
    var turn = 0u;
    for (var row = first; row < end; row++) {
        let q_head = p.qkv_at + row * width + key_head;
        var k: array<vec4<f32>, VECS>;
        var part = vec2(0.0);
        var product = vec4(0.0);
        var v = 0.0;
        if works {
            for (var i = 0u; i < VECS; i++) {
                let q = four(q_head, first_key + 4u * i);
                k[i] = four(q_head + keys, first_key + 4u * i);
                part += vec2(dot(s[i], k[i]), dot(s[i], q));
                product += vec4(dot(q, q), dot(k[i], k[i]), dot(q, k[i]), 0.0);
            }
            v = qkv_element(p.qkv_at + row * width + 2u * keys + head * p.value_dim + column);
        }
        let b = ba[p.ba_at + row * p.ba_width + head];
        let decay = decay_of(a_log, ba[p.ba_at + row * p.ba_width + p.n_value_heads + head] + dt_bias);
        asked[turn * THREADS + thread] = part;
        if thread % COLUMNS == 0u && lane < LANES {
            products[turn * LANES + lane] = product;
        }
        workgroupBarrier();
        if works {
            part = vec2(0.0);
            product = vec4(0.0);
            for (var i = 0u; i < LANES; i++) {
                part += asked[turn * THREADS + i * COLUMNS + thread % COLUMNS];
                product += products[turn * LANES + i];
            }
            let q_scale = inverseSqrt((product.x + 1e-6) * f32(KEY_DIM));
            let k_scale = inverseSqrt(product.y + 1e-6);
            let u = (v - decay * k_scale * part.x) / (1.0 + exp(-b));
            for (var i = 0u; i < VECS; i++) {
                s[i] = decay * s[i] + (u * k_scale) * k[i];
            }
            if lane == 0u {
                let at = p.out_at + (row * p.n_value_heads + head) * p.value_dim + column;
                out[at] = q_scale * (decay * part.y + u * k_scale * product.z);
            }
        }
        turn = 1u - turn;
    }

    for (var i = 0u; i < VECS; i++) {
        for (var c = 0u; c < 4u; c++) {
            if 4u * i + c < n_own {
                state[own_state + (4u * i + c) * p.value_dim] = s[i][c];
            }
        }
    }
}
