// out[n, h] = gate * softmax(scale * q[n, h] . K) . V over positions 0 ..= positions[n] of the row's sequence, on
// tensor cores, for many rows and a bf16 cache: prefill.
//
// q, out f32 [n_rows, n_heads, head_dim]; cache [page][k|v][kv_head][16][head_dim], bf16; block_table i32 [n_sequences,
// max_pages]. A block owns ROWS rows of one query head, a warp 16 * TILES of them, since what it reads of keys and values is
// then read for as many rows at once. It walks TOKENS positions at a time, STEP of which are one softmax; keys and values are
// copied to shared memory one stage ahead. Neighbouring rows of one sequence are taken together and all others see nothing
// meanwhile, so a block of one sequence, the usual one, is one walk. Only where a row of a warp does not see all of a step are
// scores looked at one by one, and a step that none of them sees is passed over. The running maximum and sum of a row live in
// the four lanes that share it; scores become bf16 weights in place, since what a product leaves is what the next one takes.
// Part c of 16 bytes of row r lies at c ^ (r % 8), so that eight rows read at once lie in different banks, or in narrow heads
// two and two in the same. Dynamic shared memory: (2 stages * 2 * TOKENS + ROWS) * head_dim * 2 bytes. Bytes: q and out once,
// keys and values once for ROWS rows, from L2. Bound by the tensor cores.
#include "attention.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;

// Where a part of 16 bytes lies in its row.
template <int D>
__device__ __forceinline__ u32 swizzled(u32 part, u32 row) {
  return part ^ (row % (D / 8 < 8 ? D / 8 : 8));
}

// The address of part `part` of the row that `row` points into at part 0 or 1, where `part` is even and known.
__device__ __forceinline__ u32 part_of(u32 row, u32 part) { return (row ^ part % 8 * 16) + part / 8 * 128; }

// A kv head's keys and values: those of token 0 of page 0, the elements from one page to the next, and from keys to values.
struct Bank {
  const u16* keys;
  u32 page_size, to_values;
};

// Copies the keys and values of TOKENS tokens from `first` on; tokens from `end` on become zeros. Values lie `to_values` elements
// behind the keys.
template <int D, int TOKENS, int TO_VALUES>
__device__ __forceinline__ void fetch(u16* stage, const Bank& bank, const int* pages, u32 first, u32 end) {
  constexpr u32 PARTS = D / 8;
#pragma unroll
  for (u32 i = threadIdx.x; i < TOKENS * PARTS; i += THREADS) {
    const u32 row = i / PARTS, part = i % PARTS, token = first + row;
    const bool live = token < end;
    const u16* from = bank.keys;
    if (live) from += (i64)pages[token / PAGE_TOKENS] * bank.page_size + (token % PAGE_TOKENS * D + part * 8);
    u16* to = stage + row * D + swizzled<D>(part, row) * 8;
    copy_async(to, from, live);
    copy_async(to + TO_VALUES, from + bank.to_values, live);
  }
}

// The row behind those from `begin` on that belong to `sequence`, and the tokens that the last of them sees. All lanes ask together.
__device__ __forceinline__ u32 end_of_run(u32 begin, u32 end, int sequence, const int* sequences, const int* positions,
                                          u32& n_tokens) {
  const u32 lane = threadIdx.x % 32;
  u32 next = begin, n_same = 32;
  n_tokens = 0;
  while (n_same == 32) {
    const u32 row = next + lane, others = ~__ballot_sync(FULL_WARP, row < end && sequences[row] == sequence);
    n_same = others == 0 ? 32 : __ffs(others) - 1;
    if (lane < n_same) n_tokens = max(n_tokens, (u32)positions[row] + 1);
    next += n_same;
  }
  n_tokens = __reduce_max_sync(FULL_WARP, n_tokens);
  return next;
}

#define ATTENTION_ARGUMENTS                                                                                   \
  AttentionParams p, float *out, const float *q, const u16 *kv, const int *block_table, const int *sequences, \
      const int *positions, const float *gates, u32 gate_width

template <int D, int TOKENS, int STEP, int TILES>
__device__ __forceinline__ void attend(ATTENTION_ARGUMENTS) {
  DYNAMIC_SHARED(shared);
  constexpr int STAGE = TOKENS * D, WARP_ROWS = 16 * TILES, ROWS = WARPS * WARP_ROWS;
  constexpr int K_STEPS = D / 16, D_TILES = D / 8, N_TILES = STEP / 8;
  u16* keys_of = (u16*)shared;
  u16* values_of = keys_of + 2 * STAGE;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  u16* queries = values_of + 2 * STAGE + warp * WARP_ROWS * D;
  const u32 head = blockIdx.x, kv_head = head / (p.n_heads / p.n_kv_heads);
  // The last rows of a chunk see most and start first.
  const u32 first_row = (gridDim.y - 1 - blockIdx.y) * ROWS, end = min(first_row + ROWS, p.n_rows);
  const u32 warp_row = first_row + warp * WARP_ROWS;
  const u32 half_page = p.n_kv_heads * PAGE_TOKENS * D;
  const Bank bank = {kv + kv_head * PAGE_TOKENS * D, 2 * half_page, half_page};

  // What this lane names of the first matrices of a product.
  const u32 key = lane / 16 * 8 + lane % 8, token = lane % 16;
  const u32 query_lane = shared_address(queries + token * D + swizzled<D>(lane / 16, token) * 8);
  const u32 key_lane = shared_address(keys_of + key * D + swizzled<D>(lane / 8 % 2, key) * 8);
  const u32 value_lane = shared_address(values_of + token * D + swizzled<D>(lane / 16, token) * 8);

  const float unit = p.scale * LOG2_E;
#pragma unroll 8
  for (u32 i = lane; i < WARP_ROWS * D / 4; i += 32) {
    const u32 row = i / (D / 4), quad = i % (D / 4);
    const u32 from = min(warp_row + row, p.n_rows - 1);
    const float4 v = *(const float4*)(q + ((i64)from * p.n_heads + head) * D + quad * 4);
    *(uint2*)(queries + row * D + swizzled<D>(quad / 2, row) * 8 + quad % 2 * 4) =
        make_uint2(pack_bf16(v.x * unit, v.y * unit), pack_bf16(v.z * unit, v.w * unit));
  }
  __syncwarp();
  float mixed[TILES][D_TILES][4] = {};
  float top_of[TILES][2], sum[TILES][2];
#pragma unroll
  for (int m = 0; m < TILES; m++) {
#pragma unroll
    for (int i = 0; i < 2; i++) top_of[m][i] = NEG_INFINITY, sum[m][i] = 0.0f;
  }

  u32 next = first_row;
  while (next < end) {
    const int current = sequences[next];
    const u32 begin = next;
    u32 n_tokens;
    next = end_of_run(begin, end, current, sequences, positions, n_tokens);
    if (current < 0) continue;
    n_tokens = min(n_tokens, p.max_pages * PAGE_TOKENS);
    // Tokens that a row sees in this walk; those that all rows of the warp see, and any.
    const auto length_of = [&](u32 row) { return row >= begin && row < next ? min((u32)positions[row] + 1, n_tokens) : 0; };
    u32 least = length_of(warp_row + lane % WARP_ROWS), most = least;
    least = __reduce_min_sync(FULL_WARP, least), most = __reduce_max_sync(FULL_WARP, most);
    const int* pages = block_table + (i64)current * p.max_pages;
    __syncthreads();
    fetch<D, TOKENS, 2 * STAGE>(keys_of, bank, pages, 0, n_tokens);
    copy_commit();
    u32 stage = 0;
    for (u32 first = 0; first < n_tokens; first += TOKENS, stage ^= 1) {
      copy_wait<0>();
      __syncthreads();
      if (first + TOKENS < n_tokens) {
        fetch<D, TOKENS, 2 * STAGE>(keys_of + (stage ^ 1) * STAGE, bank, pages, first + TOKENS, n_tokens);
      }
      copy_commit();
      // A warp goes on while a row of it sees something.
#pragma unroll 1
      for (u32 at = first; at < min(first + TOKENS, most); at += STEP) {
        const u32 place = (stage * TOKENS + (at - first)) * (D * 2);
        const u32 key_row = key_lane + place, value_row = value_lane + place;
        u32 query_row = query_lane;
        // Else its parts would be kept in registers, of which there are none left.
        asm volatile("" : "+r"(query_row));

        float scores[TILES][N_TILES][4] = {};
#pragma unroll
        for (int k = 0; k < K_STEPS; k++) {
          u32 a[TILES][4];
#pragma unroll
          for (int m = 0; m < TILES; m++) {
            load_matrices(a[m], part_of(query_row, k * 2) + m * 16 * D * 2);
          }
#pragma unroll
          for (int n = 0; n < N_TILES; n += 2) {
            u32 b[4];
            load_matrices(b, part_of(key_row, k * 2) + n * 8 * D * 2);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
              mma_bf16(scores[m][n], a[m], b[0], b[1]);
              mma_bf16(scores[m][n + 1], a[m], b[2], b[3]);
            }
          }
        }
        if (at + STEP > least) {
#pragma unroll
          for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
              const u32 length = length_of(warp_row + m * 16 + i * 8 + g);
#pragma unroll
              for (int n = 0; n < N_TILES; n++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                  if (at + n * 8 + t * 2 + j >= length) scores[m][n][i * 2 + j] = NEG_INFINITY;
                }
              }
            }
          }
        }
        u32 weights[TILES][STEP / 16][4];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float top = top_of[m][i];
#pragma unroll
            for (int n = 0; n < N_TILES; n++) top = fmaxf(top, fmaxf(scores[m][n][i * 2], scores[m][n][i * 2 + 1]));
            top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
            top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
            // Of a row that has seen nothing yet.
            const float base = top == NEG_INFINITY ? 0.0f : top;
            const float shrink = exp2_fast(top_of[m][i] - base);
            top_of[m][i] = top;
            float more = 0.0f;
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
              const float one = exp2_fast(scores[m][n][i * 2] - base), other = exp2_fast(scores[m][n][i * 2 + 1] - base);
              more += one + other;
              weights[m][n / 2][n % 2 * 2 + i] = pack_bf16(one, other);
            }
            sum[m][i] = sum[m][i] * shrink + more;
#pragma unroll
            for (int d = 0; d < D_TILES; d++) {
              mixed[m][d][i * 2] *= shrink;
              mixed[m][d][i * 2 + 1] *= shrink;
            }
          }
        }
#pragma unroll
        for (int k = 0; k < STEP / 16; k++) {
#pragma unroll
          for (int d = 0; d < D_TILES; d += 2) {
            u32 b[4];
            load_matrices_transposed(b, part_of(value_row, d) + k * 16 * D * 2);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
              mma_bf16(mixed[m][d], weights[m][k], b[0], b[1]);
              mma_bf16(mixed[m][d + 1], weights[m][k], b[2], b[3]);
            }
          }
        }
      }
    }
    copy_wait<0>();
  }

  const Gates gate = {gates, gate_width};
#pragma unroll
  for (int m = 0; m < TILES; m++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float total = sum[m][i] + __shfl_xor_sync(FULL_WARP, sum[m][i], 1);
      total += __shfl_xor_sync(FULL_WARP, total, 2);
      const u32 row = warp_row + m * 16 + i * 8 + g;
      if (row >= end) continue;
      // A row of no sequence has seen nothing.
      const float scale = sequences[row] < 0 ? 0.0f : 1.0f / total;
#pragma unroll
      for (int d = 0; d < D_TILES; d++) {
        const u32 column = d * 8 + t * 2;
        *(float2*)(out + ((i64)row * p.n_heads + head) * D + column) =
            make_float2(mixed[m][d][i * 2] * scale * gate.of(row, head, D, column),
                        mixed[m][d][i * 2 + 1] * scale * gate.of(row, head, D, column + 1));
      }
    }
  }
}

#define ATTENTION_PREFILL(D, ...)                                                                     \
  extern "C" __global__ void __launch_bounds__(THREADS) attention_prefill_d##D(ATTENTION_ARGUMENTS) { \
    attend<D, __VA_ARGS__>(p, out, q, kv, block_table, sequences, positions, gates, gate_width);      \
  }

ATTENTION_PREFILL(32, 64, 64, 2)
ATTENTION_PREFILL(64, 64, 64, 2)
ATTENTION_PREFILL(128, 64, 32, 2)
ATTENTION_PREFILL(256, 32, 32, 1)
