// The gates of attention: what a head's result is multiplied with.
#pragma once
#include "common.cuh"

// sigmoid of the gate of element d of a head, where there are gates: f32 [n_rows, width], those of a head in columns
// (2 * head + 1) * head_dim on.
struct Gates {
  const float* rows;
  u32 width;
  __device__ __forceinline__ float of(u32 row, u32 head, u32 head_dim, u32 d) const {
    return rows == nullptr ? 1.0f : sigmoid(rows[(i64)row * width + (2 * head + 1) * head_dim + d]);
  }
};
