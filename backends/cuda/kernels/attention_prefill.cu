// out[n, h] = gate * softmax(scale * q[n, h] . K) . V over positions 0 ..= positions[n] of the row's sequence, on
// tensor cores, for many rows and a bf16 cache: prefill.
//
// q, out f32 [n_rows, n_heads, head_dim]; cache [page][k|v][kv_head][16][head_dim], bf16; block_table i32 [n_sequences,
// max_pages]. A block owns 64 rows of one query head, a warp 16 of them, and walks TOKENS positions at a time, keys and
// values copied to shared memory one stage ahead. Neighbouring rows of one sequence are taken together and all others
// see nothing meanwhile, so a tile of one sequence, the usual one, is one walk. The running maximum and sum of a row
// live in the four lanes that share it; scores become bf16 weights in place, since what a product leaves is what the
// next one takes. Queries stay in registers, those of wide heads in shared memory, for which the stages are shorter.
// Part c of 16 bytes of row r lies at c ^ (r % 8), so that eight rows read at once lie in different banks, or in narrow
// heads two and two in the same. The result
// passes through the memory of the stages into whole rows. Dynamic shared memory: 2 stages * 2 * TOKENS * head_dim * 2
// bytes, and 64 * head_dim * 2 for queries; 64 * (head_dim + 8) * 4 at least, for the result. Bytes: q and out once, keys and values once for 64 rows, from L2. Bound by
// the tensor cores.
#include "attention.cuh"

constexpr int ROWS = 64;
constexpr int THREADS = 128;

// Where a part of 16 bytes lies in its row.
template <int D>
__device__ __forceinline__ u32 swizzled(u32 part, u32 row) {
  return part ^ (row % (D / 8 < 8 ? D / 8 : 8));
}

// Copies the keys or values of TOKENS tokens from `first` on; tokens from `end` on become zeros.
template <int D, int TOKENS>
__device__ __forceinline__ void fetch(u16* stage, const u16* bank, const int* pages, i64 page_size, u32 first, u32 end) {
  constexpr u32 PARTS = D / 8;
#pragma unroll
  for (u32 i = threadIdx.x; i < TOKENS * PARTS; i += THREADS) {
    const u32 row = i / PARTS, part = i % PARTS, token = first + row;
    const bool live = token < end;
    const u16* from = bank;
    if (live) from += pages[token / PAGE_TOKENS] * page_size + token % PAGE_TOKENS * D + part * 8;
    copy_async(stage + row * D + swizzled<D>(part, row) * 8, from, live);
  }
}

#define ATTENTION_ARGUMENTS                                                                                   \
  AttentionParams p, float *out, const float *q, const u16 *kv, const int *block_table, const int *sequences, \
      const int *positions, const float *gates, u32 gate_width

template <int D, int TOKENS, bool SHARED_QUERY>
__device__ __forceinline__ void attend(ATTENTION_ARGUMENTS) {
  DYNAMIC_SHARED(shared);
  constexpr int STAGE = TOKENS * D;
  constexpr int K_STEPS = D / 16, D_TILES = D / 8, N_TILES = TOKENS / 8;
  u16* keys_of = (u16*)shared;
  u16* values_of = keys_of + 2 * STAGE;
  u16* queries = values_of + 2 * STAGE;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const u32 head = blockIdx.x, kv_head = head / (p.n_heads / p.n_kv_heads);
  // The last rows of a chunk see most and start first.
  const u32 first_row = (gridDim.y - 1 - blockIdx.y) * ROWS, last_row = min(first_row + ROWS, p.n_rows) - 1;
  const i64 page_size = (i64)2 * p.n_kv_heads * PAGE_TOKENS * D;
  const u16* keys = kv + (i64)kv_head * PAGE_TOKENS * D;
  const u16* values = keys + (i64)p.n_kv_heads * PAGE_TOKENS * D;

  // Rows g and g + 8 of the warp's sixteen.
  u32 row[2];
  int sequence[2];
  u32 length[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    row[i] = first_row + warp * 16 + i * 8 + g;
    const bool live = row[i] <= last_row;
    sequence[i] = live ? sequences[row[i]] : -1;
    length[i] = live ? min((u32)positions[row[i]] + 1, p.max_pages * PAGE_TOKENS) : 0;
  }
  // Of wide heads one step at a time, on its way to shared memory.
  u32 query[SHARED_QUERY ? 1 : K_STEPS][4];
#pragma unroll(SHARED_QUERY ? 1 : K_STEPS)
  for (int k = 0; k < K_STEPS; k++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 from = min(row[i % 2], last_row), part = k * 2 + i / 2;
      const float2 v = *(const float2*)(q + ((i64)from * p.n_heads + head) * D + part * 8 + t * 2);
      const u32 pair = pack_bf16(v.x * p.scale * LOG2_E, v.y * p.scale * LOG2_E);
      if (SHARED_QUERY) {
        *(u32*)(queries + (warp * 16 + i % 2 * 8 + g) * D + swizzled<D>(part, g) * 8 + t * 2) = pair;
      } else {
        query[k][i] = pair;
      }
    }
  }
  __syncwarp();
  float mixed[D_TILES][4] = {};
  float top_of[2] = {NEG_INFINITY, NEG_INFINITY}, sum[2] = {0.0f, 0.0f};

  u32 next = first_row;
  while (next <= last_row) {
    // The run of rows with one sequence, and how far it sees. All threads look at the same rows.
    const int current = sequences[next];
    const u32 begin = next;
    u32 n_tokens = 0;
    for (; next <= last_row && sequences[next] == current; next++) n_tokens = (u32)positions[next] + 1 > n_tokens ? (u32)positions[next] + 1 : n_tokens;
    if (current < 0) continue;
    n_tokens = min(n_tokens, p.max_pages * PAGE_TOKENS);
    const int* pages = block_table + (i64)current * p.max_pages;
    __syncthreads();
    fetch<D, TOKENS>(keys_of, keys, pages, page_size, 0, n_tokens);
    fetch<D, TOKENS>(values_of, values, pages, page_size, 0, n_tokens);
    copy_commit();
    u32 stage = 0;
    for (u32 first = 0; first < n_tokens; first += TOKENS, stage ^= 1) {
      if (first + TOKENS < n_tokens) {
        fetch<D, TOKENS>(keys_of + (stage ^ 1) * STAGE, keys, pages, page_size, first + TOKENS, n_tokens);
        fetch<D, TOKENS>(values_of + (stage ^ 1) * STAGE, values, pages, page_size, first + TOKENS, n_tokens);
      }
      copy_commit();
      copy_wait<1>();
      __syncthreads();
      const u16* key_stage = keys_of + stage * STAGE;
      const u16* value_stage = values_of + stage * STAGE;

      float scores[N_TILES][4] = {};
#pragma unroll
      for (int k = 0; k < K_STEPS; k++) {
        u32(&a)[4] = query[SHARED_QUERY ? 0 : k];
        if (SHARED_QUERY) {
          load_matrices(a, queries + (warp * 16 + lane % 16) * D + swizzled<D>(k * 2 + lane / 16, lane) * 8);
        }
#pragma unroll
        for (int n = 0; n < N_TILES; n += 2) {
          const u32 token = n * 8 + lane / 16 * 8 + lane % 8, part = k * 2 + lane / 8 % 2;
          u32 b[4];
          load_matrices(b, key_stage + token * D + swizzled<D>(part, token) * 8);
          mma_bf16(scores[n], a, b[0], b[1]);
          mma_bf16(scores[n + 1], a, b[2], b[3]);
        }
      }
      float top[2] = {top_of[0], top_of[1]};
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u32 token = first + n * 8 + t * 2 + i % 2;
          const bool seen = row[i / 2] >= begin && row[i / 2] < next && token < length[i / 2];
          if (!seen) scores[n][i] = NEG_INFINITY;
          top[i / 2] = fmaxf(top[i / 2], scores[n][i]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        top[i] = fmaxf(top[i], __shfl_xor_sync(FULL_WARP, top[i], 1));
        top[i] = fmaxf(top[i], __shfl_xor_sync(FULL_WARP, top[i], 2));
        const float shrink = exp2_below(top_of[i], top[i]);
        top_of[i] = top[i];
        sum[i] *= shrink;
#pragma unroll
        for (int d = 0; d < D_TILES; d++) {
          mixed[d][i * 2] *= shrink;
          mixed[d][i * 2 + 1] *= shrink;
        }
      }
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          scores[n][i] = exp2_below(scores[n][i], top_of[i / 2]);
          sum[i / 2] += scores[n][i];
        }
      }
#pragma unroll
      for (int k = 0; k < TOKENS / 16; k++) {
        const u32 weights[4] = {
            pack_bf16(scores[2 * k][0], scores[2 * k][1]), pack_bf16(scores[2 * k][2], scores[2 * k][3]),
            pack_bf16(scores[2 * k + 1][0], scores[2 * k + 1][1]), pack_bf16(scores[2 * k + 1][2], scores[2 * k + 1][3])};
#pragma unroll
        for (int d = 0; d < D_TILES; d += 2) {
          const u32 token = k * 16 + lane % 16, part = d + lane / 16;
          u32 b[4];
          load_matrices_transposed(b, value_stage + token * D + swizzled<D>(part, token) * 8);
          mma_bf16(mixed[d], weights, b[0], b[1]);
          mma_bf16(mixed[d + 1], weights, b[2], b[3]);
        }
      }
      __syncthreads();
    }
    copy_wait<0>();
  }

  // Rows eight floats apart from each other's banks.
  constexpr int STRIDE = D + 8;
  float* result = (float*)shared;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], 1);
    sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], 2);
    const float scale = sequence[i] < 0 ? 0.0f : 1.0f / sum[i];
    float* to = result + (warp * 16 + i * 8 + g) * STRIDE + t * 2;
#pragma unroll
    for (int d = 0; d < D_TILES; d++) {
      *(float2*)(to + d * 8) = make_float2(mixed[d][i * 2] * scale, mixed[d][i * 2 + 1] * scale);
    }
  }
  __syncthreads();
  const Gates gate = {gates, gate_width};
#pragma unroll 4
  for (u32 i = threadIdx.x; i < (last_row + 1 - first_row) * D; i += THREADS) {
    const u32 n = first_row + i / D, d = i % D;
    out[((i64)n * p.n_heads + head) * D + d] = result[i / D * STRIDE + d] * gate.of(n, head, D, d);
  }
}

#define ATTENTION_PREFILL(D, TOKENS, SHARED_QUERY)                                                        \
  extern "C" __global__ void __launch_bounds__(THREADS) attention_prefill_d##D(ATTENTION_ARGUMENTS) {     \
    attend<D, TOKENS, SHARED_QUERY>(p, out, q, kv, block_table, sequences, positions, gates, gate_width); \
  }

ATTENTION_PREFILL(32, 32, false)
ATTENTION_PREFILL(64, 64, false)
ATTENTION_PREFILL(128, 64, false)
ATTENTION_PREFILL(256, 32, true)
