// Norms q and k per head, rotates them, and writes k and v to the paged cache.
//
// qkv: [n_rows][n_heads + 2 n_kv_heads][head_dim], each head of q followed by as many gates where it is GATED, which nobody reads
// here; rotation pairs dimension i with i + rotary_dim / 2.
// cache: [page][k|v][kv_head][16][head_dim], f32 or bf16 packed in pairs. A workgroup is one head of one row, a thread a pair
// of neighbouring dimensions. Bound by launch: there is little work.

override KV_BF16: bool = false;
override GATED: bool = false;
override Q_NORM: u32 = 3u;
override K_NORM: u32 = 3u;

const PAGE_TOKENS: u32 = 16u;

struct Params {
    n_rows: u32,
    n_heads: u32,
    n_kv_heads: u32,
    head_dim: u32,
    rotary_dim: u32,
    eps: f32,
    q_at: u32,
    // Of 32-bit words.
    kv_at: u32,
    qkv_at: u32,
    q_norm_at: u32,
    k_norm_at: u32,
    rotary_at: u32,
    positions_at: u32,
    kv_slots_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> q: array<f32>;
@group(0) @binding(1) var<storage, read_write> kv: array<u32>;
@group(0) @binding(2) var<storage, read> qkv: array<f32>;
@group(0) @binding(3) var<storage, read> q_norm: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> k_norm: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> rotary: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read> positions: array<i32>;
@group(0) @binding(7) var<storage, read> kv_slots: array<i32>;

// A head, as the functions below see it.
struct Head {
    // Of its first value in qkv.
    at: u32,
    is_q: bool,
    is_v: bool,
    scale: f32,
    // Of its row's cosines and sines.
    rotary: u32,
}

fn normed(head: Head, i: u32) -> f32 {
    let value = qkv[head.at + i];
    if head.is_q && Q_NORM != NONE {
        let w = p.q_norm_at + i;
        return value * head.scale * decode_element(Q_NORM, q_norm[w / per_vec(Q_NORM)], w);
    }
    if !head.is_q && !head.is_v && K_NORM != NONE {
        let w = p.k_norm_at + i;
        return value * head.scale * decode_element(K_NORM, k_norm[w / per_vec(K_NORM)], w);
    }
    return value;
}

fn rotated(head: Head, i: u32) -> f32 {
    let half = p.rotary_dim / 2u;
    let value = normed(head, i);
    if head.is_v || i >= p.rotary_dim {
        return value;
    }
    let turn = rotary[head.rotary + i % half];
    if i < half {
        return value * turn.x - normed(head, i + half) * turn.y;
    }
    return value * turn.x + normed(head, i - half) * turn.y;
}

// Rounds to the nearest bf16, ties to even; what is not a number stays one.
fn bf16_bits(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    let rounded = (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
    return select(rounded, (bits >> 16u) | 64u, (bits & 0x7fffffffu) > 0x7f800000u);
}

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let heads = p.n_heads + 2u * p.n_kv_heads;
    let block = at.workgroup.y * at.workgroups.x + at.workgroup.x;
    let row = min(block / heads, p.n_rows - 1u);
    let h = block % heads;
    var head: Head;
    // Heads of q count twice where they are gated.
    let gates = select(0u, p.n_heads, GATED);
    head.at = p.qkv_at + (row * (heads + gates) + h + min(h, gates)) * p.head_dim;
    head.is_q = h < p.n_heads;
    head.is_v = h >= p.n_heads + p.n_kv_heads;
    head.rotary = (p.rotary_at + u32(positions[p.positions_at + row]) * p.rotary_dim) / 2u;
    var squares = 0.0;
    for (var i = at.thread; i < p.head_dim; i += WORKGROUP) {
        squares += qkv[head.at + i] * qkv[head.at + i];
    }
    head.scale = inverseSqrt(workgroup_sum(at, squares) / f32(p.head_dim) + p.eps);
    if block / heads >= p.n_rows {
        return;
    }
    if head.is_q {
        for (var i = at.thread; i < p.head_dim; i += WORKGROUP) {
            q[p.q_at + (row * p.n_heads + h) * p.head_dim + i] = rotated(head, i);
        }
        return;
    }
    let slot = u32(kv_slots[p.kv_slots_at + row]);
    let kv_head = (h - p.n_heads) % p.n_kv_heads;
    let side = slot / PAGE_TOKENS * 2u + select(0u, 1u, head.is_v);
    let place = ((side * p.n_kv_heads + kv_head) * PAGE_TOKENS + slot % PAGE_TOKENS) * p.head_dim;
    if KV_BF16 {
        for (var i = at.thread; i < p.head_dim / 2u; i += WORKGROUP) {
            let pair = bf16_bits(rotated(head, 2u * i)) | (bf16_bits(rotated(head, 2u * i + 1u)) << 16u);
            kv[p.kv_at + place / 2u + i] = pair;
        }
    } else {
        for (var i = at.thread; i < p.head_dim; i += WORKGROUP) {
            kv[p.kv_at + place + i] = bitcast<u32>(rotated(head, i));
        }
    }
}
