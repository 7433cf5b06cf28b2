// Softmax over the router's logits of a row and its top-k, by one warp.
#pragma once
#include "common.cuh"

// A key that grows with the value and is larger than 0, also for what is not a number.
__device__ __forceinline__ u32 ascending(float v) {
  const u32 bits = __float_as_uint(v);
  return bits >> 31 == 1 ? max(~bits, 1u) : bits | 0x80000000u;
}

// The same as below for at most 32 * PER_LANE experts.
template <u32 PER_LANE>
__device__ __forceinline__ void choose_of(const RouteParams& p, const float* logits, int* ids, float* weights) {
  const u32 lane = threadIdx.x % 32;
  // Expert i * 32 + lane is this lane's i-th; a key of 0 is no choice.
  float own[PER_LANE];
  u32 keys[PER_LANE];
  float max = NEG_INFINITY;
#pragma unroll
  for (u32 i = 0; i < PER_LANE; i++) {
    const u32 expert = i * 32 + lane;
    // Adding zero makes the two zeros equal.
    own[i] = expert < p.n_experts ? logits[expert] + 0.0f : NEG_INFINITY;
  }
#pragma unroll
  for (u32 i = 0; i < PER_LANE; i++) {
    keys[i] = i * 32 + lane < p.n_experts ? ascending(own[i]) : 0;
    max = fmaxf(max, own[i]);
  }
  max = warp_max(max);
  u32 chosen = 0;
  for (u32 k = 0; k < p.top_k; k++) {
    u32 best = 0;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) best = umax(best, keys[i]);
    best = __reduce_max_sync(FULL_WARP, best);
    u32 place = PER_LANE;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) place = place == PER_LANE && keys[i] == best ? i : place;
    const u32 expert = __reduce_min_sync(FULL_WARP, place * 32 + lane);
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) {
      if (i * 32 + lane != expert) continue;
      chosen |= 1u << i;
      keys[i] = 0;
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (u32 i = 0; i < PER_LANE; i++) {
    own[i] = exp_below(own[i], max);
    if (p.renormalize == 0 || (chosen >> i & 1) == 1) sum += own[i];
  }
  sum = warp_sum(sum);
  u32 before = 0;
#pragma unroll
  for (u32 i = 0; i < PER_LANE; i++) {
    const bool is_chosen = (chosen >> i & 1) == 1;
    const u32 mask = __ballot_sync(FULL_WARP, is_chosen);
    if (is_chosen) {
      const u32 k = before + __popc(mask & ((1u << lane) - 1));
      ids[k] = i * 32 + lane;
      weights[k] = own[i] / sum;
    }
    before += __popc(mask);
  }
}

// ids and weights [top_k] of a row: experts in ascending order, equal logits choosing the lower one; -1 and 0 in a row that
// is not live. At most 512 experts.
__device__ __forceinline__ void choose(const RouteParams& p, const float* logits, bool live, int* ids, float* weights) {
  if (!live) {
    for (u32 k = threadIdx.x % 32; k < p.top_k; k += 32) {
      ids[k] = -1;
      weights[k] = 0.0f;
    }
  } else if (p.n_experts <= 128) {
    choose_of<4>(p, logits, ids, weights);
  } else {
    choose_of<16>(p, logits, ids, weights);
  }
}
