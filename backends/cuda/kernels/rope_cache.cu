// Splits a row of q, k and v; q and k: RMS norm of each head, then rotation of (i, i + rotary_dim / 2) for the first
// rotary_dim dimensions; k and v go to the paged cache.
//
// qkv f32 [n_rows, n_heads * q_stride + 2 n_kv_heads * head_dim], whose heads of q may be followed by gates; q f32
// [n_rows, n_heads, head_dim]; cache [page][k|v][kv_head][16][head_dim], f32 or bf16; rotary f32 [max_positions,
// rotary_dim / 2, 2], cosine and sine. A warp owns one head of one row. Bytes: qkv once in, q and the cache rows once
// out. Bound by latency.
#include "common.cuh"

struct Cache {
  void* base;
  bool bf16;
  __device__ void store(i64 i, float v) const {
    if (bf16) {
      ((u16*)base)[i] = to_bf16(v);
    } else {
      ((float*)base)[i] = v;
    }
  }
};

extern "C" __global__ void __launch_bounds__(128)
    rope_cache(RopeCacheParams p, float* q, void* kv, const float* qkv, const void* q_norm, const void* k_norm,
               const float* rotary, const int* positions, const int* kv_slots, u32 kv_format, u32 q_norm_format,
               u32 k_norm_format, u32 n_pages, u32 q_stride) {
  start_next_kernel();
  const u32 row = blockIdx.y;
  const u32 lane = threadIdx.x % 32;
  const u32 head = blockIdx.x * 4 + threadIdx.x / 32;
  const u32 d = p.head_dim;
  if (head >= p.n_heads + 2 * p.n_kv_heads) return;
  const bool is_query = head < p.n_heads;
  const bool is_value = head >= p.n_heads + p.n_kv_heads;
  const u32 q_width = p.n_heads * q_stride;
  const float* x = qkv + (i64)row * (q_width + 2 * p.n_kv_heads * d);
  x += is_query ? head * q_stride : q_width + (head - p.n_heads) * d;

  const Cache cache = {kv, kv_format == FORMAT_BF16};
  i64 place = 0;
  if (!is_query) {
    const u32 slot = (u32)kv_slots[row];
    if (slot / PAGE_TOKENS >= n_pages) return;
    const u32 kv_head = (head - p.n_heads) % p.n_kv_heads;
    const i64 bank = ((i64)(slot / PAGE_TOKENS) * 2 + (is_value ? 1 : 0)) * p.n_kv_heads + kv_head;
    place = (bank * PAGE_TOKENS + slot % PAGE_TOKENS) * d;
  }
  const u32 position = min((u32)positions[row], p.max_positions - 1);
  begin_kernel();
  if (is_value) {
    for (u32 i = lane; i < d; i += 32) cache.store(place + i, x[i]);
    return;
  }

  const void* norm = is_query ? q_norm : k_norm;
  const u32 norm_format = is_query ? q_norm_format : k_norm_format;
  float scale = 1.0f;
  if (norm != nullptr) {
    float squares = 0.0f;
    for (u32 i = lane; i < d; i += 32) squares += x[i] * x[i];
    scale = 1.0f / sqrtf(warp_sum(squares) / (float)d + p.eps);
  }
  const auto normed = [&](u32 i) { return norm == nullptr ? x[i] : x[i] * scale * element(norm, norm_format, i); };
  float* q_row = q + ((i64)row * p.n_heads + head) * d;
  const auto store = [&](u32 i, float v) {
    if (is_query) {
      q_row[i] = v;
    } else {
      cache.store(place + i, v);
    }
  };

  const u32 half = p.rotary_dim / 2;
  const float* turn = rotary + (i64)position * p.rotary_dim;
  for (u32 i = lane; i < half; i += 32) {
    const float a = normed(i), b = normed(i + half);
    const float cosine = turn[2 * i], sine = turn[2 * i + 1];
    store(i, a * cosine - b * sine);
    store(i + half, b * cosine + a * sine);
  }
  for (u32 i = p.rotary_dim + lane; i < d; i += 32) store(i, normed(i));
}
