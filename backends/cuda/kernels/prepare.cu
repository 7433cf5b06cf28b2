// to[n, :] = norm(x[rows[n], :]): rows of activations as a matrix product takes them, f32 or bf16.
//
// x f32 [*, in_features]; rows i32 [n_rows], row n itself where absent; norm [in_features] in any format, none where absent;
// to [n_rows, in_features]. A block owns a row: sum of squares, then the scaled row; a thread takes four columns at a time, in one
// load where rows are whole such quads. Bytes: x once in (the second look comes from L1 and L2), the row once out. Bound by memory
// bandwidth.
#include "common.cuh"

// Columns i .. i + 4 of a row, zeros behind its end.
__device__ __forceinline__ float4 quad_at(const float* row, u32 i, u32 n_columns, bool in_quads) {
  if (in_quads) return *(const float4*)(row + i);
  const auto at = [&](u32 k) { return i + k < n_columns ? row[i + k] : 0.0f; };
  return make_float4(at(0), at(1), at(2), at(3));
}

template <bool BF16>
__device__ __forceinline__ void prepare(u32 n_columns, float eps, void* to, const float* x, const int* rows,
                                        const void* norm, u32 norm_format) {
  __shared__ float partial[32];
  const u32 n = blockIdx.x;
  const bool in_quads = n_columns % 4 == 0 && ((u64)x | (u64)to) % 16 == 0;
  const float* from = x + (i64)(rows != nullptr ? (u32)rows[n] : n) * n_columns;
  float scale = 1.0f;
  if (norm != nullptr) {
    float squares = 0.0f;
    for (u32 i = threadIdx.x * 4; i < n_columns; i += blockDim.x * 4) {
      const float4 v = quad_at(from, i, n_columns, in_quads);
      squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    scale = 1.0f / sqrtf(block_sum(squares, partial) / (float)n_columns + eps);
  }
  for (u32 i = threadIdx.x * 4; i < n_columns; i += blockDim.x * 4) {
    const float4 quad = quad_at(from, i, n_columns, in_quads);
    float v[4] = {quad.x, quad.y, quad.z, quad.w};
    if (norm != nullptr) {
#pragma unroll
      for (u32 k = 0; k < 4; k++) v[k] = v[k] * scale * element(norm, norm_format, min(i + k, n_columns - 1));
    }
    const i64 place = (i64)n * n_columns + i;
    if (in_quads) {
      if (BF16) {
        *(uint2*)((u16*)to + place) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
      } else {
        *(float4*)((float*)to + place) = make_float4(v[0], v[1], v[2], v[3]);
      }
      continue;
    }
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
      if (i + k >= n_columns) continue;
      if (BF16) {
        ((u16*)to)[place + k] = to_bf16(v[k]);
      } else {
        ((float*)to)[place + k] = v[k];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
    prepare_f32(void* to, const float* x, const int* rows, const void* norm, u32 norm_format, u32 n_columns, float eps) {
  prepare<false>(n_columns, eps, to, x, rows, norm, norm_format);
}

extern "C" __global__ void __launch_bounds__(256)
    prepare_bf16(void* to, const float* x, const int* rows, const void* norm, u32 norm_format, u32 n_columns, float eps) {
  prepare<true>(n_columns, eps, to, x, rows, norm, norm_format);
}
