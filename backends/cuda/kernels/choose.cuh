// Softmax over the router's logits of a row and its top-k, by one warp.
#pragma once
#include "common.cuh"

// Experts that one lane looks after.
constexpr u32 EXPERTS_PER_LANE = 16;

// A key that grows with the value and is larger than 0, also for what is not a number.
__device__ __forceinline__ u32 ascending(float v) {
  const u32 bits = __float_as_uint(v);
  return bits >> 31 == 1 ? max(~bits, 1u) : bits | 0x80000000u;
}

// ids and weights [top_k] of a row: experts in ascending order, equal logits choosing the lower one; -1 and 0 in a row that
// is not live. At most 32 * EXPERTS_PER_LANE experts.
__device__ __forceinline__ void choose(const RouteParams& p, const float* logits, bool live, int* ids, float* weights) {
  const u32 lane = threadIdx.x % 32;
  if (!live) {
    for (u32 k = lane; k < p.top_k; k += 32) {
      ids[k] = -1;
      weights[k] = 0.0f;
    }
    return;
  }
  // Expert i * 32 + lane is this lane's i-th; a key of 0 is no choice.
  const u32 n_own = (p.n_experts + 31) / 32;
  u32 keys[EXPERTS_PER_LANE];
  float max = NEG_INFINITY;
#pragma unroll
  for (u32 i = 0; i < EXPERTS_PER_LANE; i++) {
    const u32 expert = i * 32 + lane;
    keys[i] = 0;
    if (expert < p.n_experts) {
      // Adding zero makes the two zeros equal.
      const float logit = logits[expert] + 0.0f;
      keys[i] = ascending(logit);
      max = fmaxf(max, logit);
    }
  }
  max = warp_max(max);
  u32 chosen = 0;
  for (u32 k = 0; k < p.top_k; k++) {
    u64 best = 0;
#pragma unroll
    for (u32 i = 0; i < EXPERTS_PER_LANE; i++) {
      const u64 key = keys[i] == 0 || (chosen >> i & 1) == 1 ? 0 : (u64)keys[i] << 32 | ~(i * 32 + lane);
      best = key > best ? key : best;
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      const u64 other = __shfl_xor_sync(FULL_WARP, best, lanes);
      best = other > best ? other : best;
    }
    const u32 expert = ~(u32)best;
    if (expert % 32 == lane) chosen |= 1u << expert / 32;
  }
  float sum = 0.0f;
#pragma unroll 1
  for (u32 i = 0; i < n_own; i++) {
    const bool counts = p.renormalize == 1 ? (chosen >> i & 1) == 1 : i * 32 + lane < p.n_experts;
    if (counts) sum += exp_below(logits[i * 32 + lane], max);
  }
  sum = warp_sum(sum);
  u32 before = 0;
#pragma unroll 1
  for (u32 i = 0; i < n_own; i++) {
    const bool is_chosen = (chosen >> i & 1) == 1;
    const u32 mask = __ballot_sync(FULL_WARP, is_chosen);
    if (is_chosen) {
      const u32 k = before + __popc(mask & ((1u << lane) - 1));
      ids[k] = i * 32 + lane;
      weights[k] = exp_below(logits[i * 32 + lane], max) / sum;
    }
    before += __popc(mask);
  }
}
