// out[n, h] = gate * softmax(scale * q[n, h] . K) . V over positions 0 ..= positions[n] of the row's sequence, for any
// head_dim and in f32: what the fast kernels leave.
//
// q, out f32 [n_rows, n_heads, head_dim]; cache [page][k|v][kv_head][16][head_dim], f32 or bf16. A warp owns one head
// of one row and walks its positions, mixing into head_dim floats of dynamic shared memory, a block's four warps one
// after the other: 4 * head_dim * 4 bytes. Bytes: the keys and values once a query head, mostly from L2. Bound by
// latency.
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(128)
    attention_any(AttentionParams p, float* out, const float* q, const void* kv, const int* block_table,
                  const int* sequences, const int* positions, const float* gates, u32 gate_width, u32 kv_format) {
  DYNAMIC_SHARED(shared);
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 row = blockIdx.x, head = blockIdx.y * 4 + warp, d = p.head_dim;
  if (head >= p.n_heads) return;
  float* mixed = (float*)shared + warp * d;
  float* to = out + ((i64)row * p.n_heads + head) * d;
  const float* query = q + ((i64)row * p.n_heads + head) * d;
  const int sequence = sequences[row];
  const u32 length = sequence < 0 ? 0 : min((u32)positions[row] + 1, p.max_pages * PAGE_TOKENS);
  const u32 kv_head = head / (p.n_heads / p.n_kv_heads);
  for (u32 i = lane; i < d; i += 32) mixed[i] = 0.0f;
  float max = NEG_INFINITY, sum = 0.0f;
  for (u32 token = 0; token < length; token++) {
    const i64 page = block_table[(i64)sequence * p.max_pages + token / PAGE_TOKENS];
    const i64 key = ((page * 2 * p.n_kv_heads + kv_head) * PAGE_TOKENS + token % PAGE_TOKENS) * d;
    const i64 value = key + (i64)p.n_kv_heads * PAGE_TOKENS * d;
    float score = 0.0f;
    for (u32 i = lane; i < d; i += 32) score += query[i] * element(kv, kv_format, key + i);
    score = warp_sum(score) * p.scale;
    const float top = fmaxf(max, score);
    const float shrink = exp_below(max, top), weight = exp_below(score, top);
    max = top;
    sum = sum * shrink + weight;
    for (u32 i = lane; i < d; i += 32) mixed[i] = mixed[i] * shrink + weight * element(kv, kv_format, value + i);
  }
  const Gates gate = {gates, gate_width};
  for (u32 i = lane; i < d; i += 32) to[i] = length == 0 ? 0.0f : mixed[i] / sum * gate.of(row, head, d, i);
}
