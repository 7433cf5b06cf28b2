// What the kernels of the gated delta rule share: where the inputs of a head lie, and how far a row forgets and corrects.
#pragma once
#include "common.cuh"

#define GATED_DELTA_ARGUMENTS                                                                      \
  GatedDeltaParams p, float *out, float *state, const float *qkv, const float *z, const float *ba, \
      const float *constants, const Span *spans

// Columns of qkv.
__device__ __forceinline__ u32 qkv_width(const GatedDeltaParams& p) {
  return 2 * p.n_key_heads * p.key_dim + p.n_value_heads * p.value_dim;
}

// First column of the q of a value head; its k is n_key_heads * key_dim further.
__device__ __forceinline__ u32 query_column(const GatedDeltaParams& p, u32 head) {
  return head / (p.n_value_heads / p.n_key_heads) * p.key_dim;
}

__device__ __forceinline__ u32 value_column(const GatedDeltaParams& p, u32 head) {
  return 2 * p.n_key_heads * p.key_dim + head * p.value_dim;
}

__device__ __forceinline__ u32 span_rows(const Span& span) { return span.end > span.first ? span.end - span.first : 0; }

// 1 / sqrt(key_dim) of the fast kernels.
constexpr float ONE_BY_SQRT_128 = 0.08838834764831845f;

// One over the length of q or of k.
__device__ __forceinline__ float unit_scale(float squares) { return rsqrtf(squares + 1e-6f); }

// How far a row corrects the state of a head, and the logarithm of what it leaves of it.
struct Rates {
  float beta, log_decay;
};

__device__ __forceinline__ Rates rates(const GatedDeltaParams& p, const float* ba, const float* constants, u32 row,
                                       u32 head) {
  const float* from = ba + (i64)row * p.ba_width + p.ba_start + head;
  const float x = from[p.n_value_heads] + constants[p.n_value_heads + head];
  // What is lost of a small softplus is nothing beside one, which its exponential is near.
  const float softplus = x > 20.0f ? x : logf(1.0f + expf(x));
  return {sigmoid(from[0]), -expf(constants[head]) * softplus};
}
