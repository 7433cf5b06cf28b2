// out[n, h] = softmax(scale * q[n, h] . K) . V over positions 0 ..= positions[n] of the row's sequence, page by page; GATED, times the
// sigmoid of the gates behind the head's query in `gate`.
//
// cache: [page][k|v][kv_head][16][head_dim], f32 or bf16 packed in pairs. A workgroup is one row, one block of HEADS query
// heads that share a key-value head, and one of SPLITS parts of the sequence; it walks its part TOKENS tokens at a time with a
// running maximum and sum. A thread owns four dimensions of one head's result. With SPLITS above 1 results go to `partial`
// ([row][head][split][head_dim]) and `peaks` (maximum and sum), and attention_merge puts them together.
// Bound by the bytes of the cache where sequences are long.

override TOKENS: u32 = 16u;
override SPLITS: u32 = 1u;

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read_write> peaks: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> q: array<f32>;
@group(0) @binding(3) var<storage, read> kv: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> block_table: array<i32>;
@group(0) @binding(5) var<storage, read> sequences: array<i32>;
@group(0) @binding(6) var<storage, read> positions: array<i32>;
@group(0) @binding(7) var<storage, read> gate: array<f32>;

const THREADS: u32 = 256u;
// vec4s of a key or value as it is stored, and as it lies in workgroup memory: one more, so that neighbouring tokens use other banks.
fn key_vecs() -> u32 {
    return select(HEAD_DIM / 4u, HEAD_DIM / 8u, KV_BF16);
}

fn key_stride() -> u32 {
    return key_vecs() + 1u;
}

var<workgroup> queries: array<vec4<f32>, HEADS * HEAD_DIM / 4u>;
var<workgroup> keys: array<vec4<u32>, TOKENS * (select(HEAD_DIM / 4u, HEAD_DIM / 8u, KV_BF16) + 1u)>;
var<workgroup> values: array<vec4<u32>, TOKENS * (select(HEAD_DIM / 4u, HEAD_DIM / 8u, KV_BF16) + 1u)>;
var<workgroup> scores: array<f32, HEADS * TOKENS>;

// vec4 at which a token's key starts.
fn place(sequence: u32, token: u32, kv_head: u32) -> u32 {
    return p.kv_at + cache_row(sequence, token, kv_head) * key_vecs();
}

// What a thread brings of a token: at most one vec4 of its key and one of its value, since those of TOKENS tokens are as many as there are
// threads, or fewer.
struct Brought {
    key: vec4<u32>,
    value: vec4<u32>,
}

fn bring(sequence: u32, token: u32, kv_head: u32, part: u32) -> Brought {
    let key = place(sequence, token, kv_head) + part;
    return Brought(kv[key], kv[key + p.n_kv_heads * PAGE_TOKENS * key_vecs()]);
}

fn value_at(token: u32, i: u32) -> vec4<f32> {
    if KV_BF16 {
        return decode_half(BF16, values[token * key_stride() + i / 2u], (i & 1u) == 1u);
    }
    return bitcast<vec4<f32>>(values[token * key_stride() + i]);
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let index = workgroup.y * workgroups.x + workgroup.x;
    let split = index % SPLITS;
    let block = index / SPLITS % p.n_blocks;
    let kv_head = index / SPLITS / p.n_blocks % p.n_kv_heads;
    let row = index / SPLITS / p.n_blocks / p.n_kv_heads;
    if row >= p.n_rows {
        return;
    }
    let group = p.n_heads / p.n_kv_heads;
    let n_heads = min(HEADS, group - block * HEADS);
    let first_head = row * p.n_heads + kv_head * group + block * HEADS;
    let sequence = sequences[p.sequences_at + row];
    let length = select(u32(positions[p.positions_at + row]) + 1u, 0u, sequence < 0);
    // Parts are whole runs of TOKENS tokens.
    let part = (length + SPLITS * TOKENS - 1u) / (SPLITS * TOKENS) * TOKENS;
    let start = min(split * part, length);
    let end = min(start + part, length);

    // What comes next is on its way while what is there meets the queries.
    let brings = thread / key_vecs();
    let part_of_key = thread % key_vecs();
    var next: Brought;
    if brings < TOKENS && start + brings < end {
        next = bring(u32(sequence), start + brings, kv_head, part_of_key);
    }
    for (var i = thread; i < n_heads * HEAD_DIM / 4u; i += THREADS) {
        let at = p.q_at + first_head * HEAD_DIM + 4u * i;
        queries[i] = vec4(q[at], q[at + 1u], q[at + 2u], q[at + 3u]) * p.scale;
    }
    let own_head = thread / (HEAD_DIM / 4u);
    let own_vec = thread % (HEAD_DIM / 4u);
    let owns = own_head < n_heads;
    var result = vec4(0.0);
    var peak = LOWEST;
    var sum = 0.0;
    for (var first = start; first < end; first += TOKENS) {
        let n_tokens = min(TOKENS, end - first);
        workgroupBarrier();
        if brings < n_tokens {
            keys[brings * key_stride() + part_of_key] = next.key;
            values[brings * key_stride() + part_of_key] = next.value;
        }
        workgroupBarrier();
        if brings < TOKENS && first + TOKENS + brings < end {
            next = bring(u32(sequence), first + TOKENS + brings, kv_head, part_of_key);
        }
        for (var i = thread; i < n_heads * TOKENS; i += THREADS) {
            let token = i % TOKENS;
            let query = i / TOKENS * (HEAD_DIM / 4u);
            var score = LOWEST;
            if token < n_tokens {
                score = 0.0;
                for (var c = 0u; c < key_vecs(); c++) {
                    let key = keys[token * key_stride() + c];
                    if KV_BF16 {
                        score += dot(queries[query + 2u * c], decode_half(BF16, key, false));
                        score += dot(queries[query + 2u * c + 1u], decode_half(BF16, key, true));
                    } else {
                        score += dot(queries[query + c], bitcast<vec4<f32>>(key));
                    }
                }
            }
            scores[i] = score;
        }
        workgroupBarrier();
        if owns {
            var most = peak;
            for (var t = 0u; t < n_tokens; t++) {
                most = max(most, scores[own_head * TOKENS + t]);
            }
            let shrink = exp(peak - most);
            result *= shrink;
            sum *= shrink;
            peak = most;
            for (var t = 0u; t < n_tokens; t++) {
                let weight = exp(scores[own_head * TOKENS + t] - most);
                sum += weight;
                result += weight * value_at(t, own_vec);
            }
        }
    }
    if !owns {
        return;
    }
    if SPLITS > 1u {
        let at = (first_head + own_head) * SPLITS + split;
        if own_vec == 0u {
            peaks[at] = vec2(peak, sum);
        }
        // The merge leaves a part without tokens out.
        if start < end {
            for (var i = 0u; i < 4u; i++) {
                out[at * HEAD_DIM + 4u * own_vec + i] = result[i];
            }
        }
        return;
    }
    let at = p.out_at + (first_head + own_head) * HEAD_DIM + 4u * own_vec;
    if GATED {
        result *= gates(row, first_head - row * p.n_heads + own_head, 4u * own_vec);
    }
    result = select(vec4(0.0), result / sum, sum > 0.0);
    for (var i = 0u; i < 4u; i++) {
        out[at + i] = result[i];
    }
}
