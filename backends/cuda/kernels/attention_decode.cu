// out[n, h] = gate * softmax(scale * q[n, h] . K) . V over positions 0 ..= positions[n] of the row's sequence, for few
// rows: decode.
//
// q, out f32 [n_rows, n_heads, head_dim]; cache [page][k|v][kv_head][16][head_dim], f32 or bf16; block_table i32
// [n_sequences, max_pages]. A block owns one row, up to HEADS query heads of one kv head (which share each key and value it
// reads) and one of gridDim.y ranges of positions; the length is data, so blocks beyond it leave, behind those that have work.
// Its warps are SETS of four: each set walks the range for its share of the heads, and L1 has what another set has read. LPT lanes
// hold a token's head_dim = 8 * LPT dimensions, 8 each; each group of LPT lanes keeps its own running maximum and sum; groups,
// then warps, are merged in the block. With several ranges the partial results go to scratch, and the last block of a (row, heads)
// merges them; its counter is zero before and after. Arithmetic is f32. Bytes: the keys and values once. Bound by memory
// bandwidth for long contexts, by latency for short ones.
#include "attention.cuh"

// Warps of a set.
constexpr int WARPS = 4;
// Tokens whose keys and values a lane has under way together.
constexpr int BATCH = 4;
// Ranges are a multiple of this many tokens.
constexpr u32 RANGE_TOKENS = 32;
constexpr u32 MAX_RANGES = 128;
// Up to so many ranges are as short as they can be, more of them this long at least: whoever merges them reads them all.
constexpr u32 FEW_RANGES = 32;
constexpr u32 LONG_RANGE = 128;

#define ATTENTION_ARGUMENTS                                                              \
  AttentionParams p, float *out, const float *q, const void *kv, const int *block_table, \
      const int *sequences, const int *positions, const float *gates, u32 gate_width

// Eight elements as they lie in memory.
template <class E>
struct Eight {
  uint4 raw[8 / E::PER_16_BYTES];

  __device__ __forceinline__ void load(const typename E::Element* from) {
#pragma unroll
    for (int i = 0; i < 8 / E::PER_16_BYTES; i++) raw[i] = ((const uint4*)from)[i];
  }

  __device__ __forceinline__ void unpack(float (&out)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; i += E::PER_16_BYTES) {
      float part[E::PER_16_BYTES];
      E::unpack(raw[i / E::PER_16_BYTES], part);
#pragma unroll
      for (int j = 0; j < E::PER_16_BYTES; j++) out[i + j] = part[j];
    }
  }
};

// Part of a softmax over scores in powers of two: the maximum, the sum below it and the mixed values.
template <int HEADS>
struct Softmax {
  float max[HEADS], sum[HEADS], mixed[HEADS][8];
};

template <class E, int LPT, int HEADS, int SETS>
__device__ __forceinline__ void attend(ATTENTION_ARGUMENTS, float* partial, u32* counters) {
  constexpr u32 D = 8 * LPT;
  constexpr u32 TOKENS = 32 / LPT;  // of a warp at a time
  constexpr int OWN = HEADS / SETS;   // heads of a warp
  typedef typename E::Element Element;
  __shared__ float shared_mixed[WARPS][HEADS][D];
  __shared__ float shared_max[WARPS][HEADS], shared_sum[WARPS][HEADS];

  start_next_kernel();
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % WARPS;
  const u32 own = threadIdx.x / 32 / WARPS * OWN;  // this warp's first head, in the block
  const u32 row = blockIdx.z, range = blockIdx.y, n_ranges = gridDim.y;
  const u32 group = p.n_heads / p.n_kv_heads;
  const u32 blocks_per_group = (group + HEADS - 1) / HEADS;
  const u32 kv_head = blockIdx.x / blocks_per_group;
  const u32 first_in_group = blockIdx.x % blocks_per_group * HEADS;
  const u32 first_head = kv_head * group + first_in_group;
  const u32 n_heads = min((u32)HEADS, group - first_in_group);

  const int sequence = sequences[row], position = positions[row];
  if (sequence < 0) {
    if (range == 0) {
      begin_kernel();
      for (u32 i = threadIdx.x; i < n_heads * D; i += blockDim.x) out[((i64)row * p.n_heads + first_head) * D + i] = 0.0f;
    }
    return;
  }
  const u32 length = min((u32)position + 1, p.max_pages * PAGE_TOKENS);
  const u32 few = min(n_ranges, FEW_RANGES), long_range = min((length + few - 1) / few, LONG_RANGE);
  const u32 shortest = max((length + n_ranges - 1) / n_ranges, long_range);
  const u32 tokens_per_range = (shortest + RANGE_TOKENS - 1) / RANGE_TOKENS * RANGE_TOKENS;
  const u32 n_live = (length + tokens_per_range - 1) / tokens_per_range;
  if (range >= n_live) return;
  const u32 begin = range * tokens_per_range, end = min(begin + tokens_per_range, length);
  const int* pages = block_table + (i64)sequence * p.max_pages;
  begin_kernel();

  const u32 dimension = lane % LPT * 8;
  const i64 value_offset = (i64)p.n_kv_heads * PAGE_TOKENS * D;
  Eight<E> keys[BATCH], values[BATCH];
  const auto load = [&](u32 first) {
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const u32 token = min(first + b * TOKENS + lane / LPT, end - 1);
      const i64 page = pages[token / PAGE_TOKENS];
      const Element* key =
          (const Element*)kv + ((page * 2 * p.n_kv_heads + kv_head) * PAGE_TOKENS + token % PAGE_TOKENS) * D + dimension;
      keys[b].load(key);
      values[b].load(key + value_offset);
    }
  };
  u32 first = begin + warp * BATCH * TOKENS;
  if (first < end) load(first);
  float query[OWN][8];
  Softmax<OWN> state;
#pragma unroll
  for (int h = 0; h < OWN; h++) {
    const u32 head = first_head + min(own + h, n_heads - 1);
    Eight<F32> row_of_q;
    row_of_q.load(q + ((i64)row * p.n_heads + head) * D + dimension);
    row_of_q.unpack(query[h]);
    state.max[h] = NEG_INFINITY;
    state.sum[h] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      query[h][i] *= p.scale * LOG2_E;
      state.mixed[h][i] = 0.0f;
    }
  }
  while (first < end) {
    float scores[BATCH][OWN], top[OWN];
#pragma unroll
    for (int h = 0; h < OWN; h++) top[h] = state.max[h];
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const bool live = first + b * TOKENS + lane / LPT < end;
      float key[8];
      keys[b].unpack(key);
#pragma unroll
      for (int h = 0; h < OWN; h++) {
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) score += query[h][i] * key[i];
#pragma unroll
        for (int lanes = LPT / 2; lanes > 0; lanes /= 2) score += __shfl_xor_sync(FULL_WARP, score, lanes);
        scores[b][h] = live ? score : NEG_INFINITY;
        top[h] = fmaxf(top[h], scores[b][h]);
      }
    }
#pragma unroll
    for (int h = 0; h < OWN; h++) {
      const float shrink = exp2_below(state.max[h], top[h]);
      state.max[h] = top[h];
      state.sum[h] *= shrink;
#pragma unroll
      for (int i = 0; i < 8; i++) state.mixed[h][i] *= shrink;
    }
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      float value[8];
      values[b].unpack(value);
#pragma unroll
      for (int h = 0; h < OWN; h++) {
        const float weight = exp2_below(scores[b][h], state.max[h]);
        state.sum[h] += weight;
#pragma unroll
        for (int i = 0; i < 8; i++) state.mixed[h][i] += weight * value[i];
      }
    }
    first += WARPS * BATCH * TOKENS;
    if (first < end) load(first);
  }

  // Groups of a warp, then warps of the block.
#pragma unroll
  for (int h = 0; h < OWN; h++) {
    float max = state.max[h];
#pragma unroll
    for (int lanes = LPT; lanes < 32; lanes *= 2) max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, lanes));
    const float shrink = exp2_below(state.max[h], max);
    float sum = state.sum[h] * shrink;
#pragma unroll
    for (int lanes = LPT; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, lanes);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float mixed = state.mixed[h][i] * shrink;
#pragma unroll
      for (int lanes = LPT; lanes < 32; lanes *= 2) mixed += __shfl_xor_sync(FULL_WARP, mixed, lanes);
      if (lane < LPT) shared_mixed[warp][own + h][dimension + i] = mixed;
    }
    if (lane == 0) {
      shared_max[warp][own + h] = max;
      shared_sum[warp][own + h] = sum;
    }
  }
  __syncthreads();

  // [head of the row][range] of (D mixed values, maximum, sum, two of padding)
  constexpr u32 RECORD = D + 4;
  const Gates gate = {gates, gate_width};
  const i64 first_record = ((i64)row * p.n_heads + first_head) * n_ranges;
  for (u32 i = threadIdx.x; i < n_heads * D; i += blockDim.x) {
    const u32 h = i / D, d = i % D;
    float max = NEG_INFINITY, sum = 0.0f, mixed = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) max = fmaxf(max, shared_max[w][h]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float shrink = exp2_below(shared_max[w][h], max);
      sum += shared_sum[w][h] * shrink;
      mixed += shared_mixed[w][h][d] * shrink;
    }
    if (n_live == 1) {
      out[((i64)row * p.n_heads + first_head + h) * D + d] = mixed / sum * gate.of(row, first_head + h, D, d);
    } else {
      float* record = partial + (first_record + (i64)h * n_ranges + range) * RECORD;
      record[d] = mixed;
      if (d == 0) {
        record[D] = max;
        record[D + 1] = sum;
      }
    }
  }
  if (n_live == 1 || !is_last_block(counters + row * gridDim.x + blockIdx.x, n_live)) return;

  // What each range weighs in each head, then the ranges' values.
  __shared__ float weights[HEADS][MAX_RANGES];
  const float* records = partial + first_record * RECORD;
  for (u32 h = threadIdx.x / 32; h < n_heads; h += WARPS * SETS) {
    constexpr u32 PER_LANE = MAX_RANGES / 32;
    float maxima[PER_LANE], sums[PER_LANE], max = NEG_INFINITY, sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) {
      const u32 r = i * 32 + lane;
      const float* record = records + (i64)(h * n_ranges + min(r, n_live - 1)) * RECORD;
      maxima[i] = r < n_live ? record[D] : NEG_INFINITY;
      sums[i] = r < n_live ? record[D + 1] : 0.0f;
      max = fmaxf(max, maxima[i]);
    }
    max = warp_max(max);
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) {
      maxima[i] = exp2_below(maxima[i], max);
      sum += sums[i] * maxima[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) weights[h][i * 32 + lane] = maxima[i] / sum;
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < n_heads * D / 4; i += blockDim.x) {
    const u32 h = i / (D / 4), d = i % (D / 4) * 4;
    float4 mixed = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (u32 r = 0; r < n_live; r++) {
      const float4 v = *(const float4*)(records + (i64)(h * n_ranges + r) * RECORD + d);
      const float weight = weights[h][r];
      mixed.x += weight * v.x;
      mixed.y += weight * v.y;
      mixed.z += weight * v.z;
      mixed.w += weight * v.w;
    }
    mixed.x *= gate.of(row, first_head + h, D, d);
    mixed.y *= gate.of(row, first_head + h, D, d + 1);
    mixed.z *= gate.of(row, first_head + h, D, d + 2);
    mixed.w *= gate.of(row, first_head + h, D, d + 3);
    *(float4*)(out + ((i64)row * p.n_heads + first_head + h) * D + d) = mixed;
  }
}

#define ATTENTION_DECODE(name, E, D, HEADS, SETS)                                                                        \
  extern "C" __global__ void __launch_bounds__(128 * SETS)                                                               \
      attention_decode_##name##_d##D##_h##HEADS(ATTENTION_ARGUMENTS, float* partial, u32* counters) {                    \
    attend<E, D / 8, HEADS, SETS>(p, out, q, kv, block_table, sequences, positions, gates, gate_width, partial, counters); \
  }

ATTENTION_DECODE(f32, F32, 32, 4, 1)
ATTENTION_DECODE(f32, F32, 64, 4, 1)
ATTENTION_DECODE(f32, F32, 128, 4, 1)
ATTENTION_DECODE(f32, F32, 256, 4, 1)
ATTENTION_DECODE(bf16, Bf16, 32, 4, 1)
ATTENTION_DECODE(bf16, Bf16, 64, 1, 1)
ATTENTION_DECODE(bf16, Bf16, 64, 4, 1)
ATTENTION_DECODE(bf16, Bf16, 64, 8, 2)
ATTENTION_DECODE(bf16, Bf16, 128, 1, 1)
ATTENTION_DECODE(bf16, Bf16, 128, 4, 1)
ATTENTION_DECODE(bf16, Bf16, 128, 8, 2)
ATTENTION_DECODE(bf16, Bf16, 256, 4, 1)
ATTENTION_DECODE(bf16, Bf16, 256, 8, 2)
