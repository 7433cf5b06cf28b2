// What kernels of the matmul op share: their arguments, and what follows a sum.
#pragma once
#include "scaled.cuh"

#define MATMUL_ARGUMENTS                                                                                            \
  MatMulParams p, float *out, const float *x, const int *rows, const void *norm, const void *weight, const void *up, \
      const void *bias, const void *up_bias, u32 n_columns, u32 norm_format, u32 bias_format

// Behind those, where the weight may have scales.
#define SCALE_ARGUMENTS const void *scales, const void *up_scales, const float *globals, const float *up_globals

// Element i of a bias; a call, since a tile has many places that may need one.
static __device__ __noinline__ float bias_at(const void* bias, u32 format, u32 i) { return element(bias, format, i); }

// Stores column c of row n.
__device__ __forceinline__ void finish(const MatMulParams& p, float* out, u32 n, u32 c, float gate, float up,
                                       const void* bias, const void* up_bias, u32 bias_format) {
  if (bias != nullptr) gate += bias_at(bias, bias_format, c);
  if (p.activation == SILU_GLU) {
    if (up_bias != nullptr) up += bias_at(up_bias, bias_format, c);
    gate = silu(gate) * up;
  }
  float* place = out + (i64)n * p.out_features + c;
  *place = p.accumulate ? *place + gate : gate;
}
