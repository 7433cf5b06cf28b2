// to[n, :] = norm(x[rows[n], :]): rows of activations as a matrix product takes them, f32 or bf16.
//
// x f32 [*, in_features]; rows i32 [n_rows], row n itself where absent; norm [in_features] in any format, none where absent;
// to [n_rows, in_features]. A block owns a row: sum of squares, then the scaled row. Bytes: x once in (the second look comes
// from L1 and L2), the row once out. Bound by memory bandwidth.
#include "common.cuh"

template <bool BF16>
__device__ __forceinline__ void prepare(u32 n_columns, float eps, void* to, const float* x, const int* rows,
                                        const void* norm, u32 norm_format) {
  __shared__ float partial[32];
  const u32 n = blockIdx.x;
  const float* from = x + (i64)(rows != nullptr ? (u32)rows[n] : n) * n_columns;
  float scale = 1.0f;
  if (norm != nullptr) {
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < n_columns; i += blockDim.x) squares += from[i] * from[i];
    scale = 1.0f / sqrtf(block_sum(squares, partial) / (float)n_columns + eps);
  }
  for (u32 i = threadIdx.x; i < n_columns; i += blockDim.x) {
    const float v = norm != nullptr ? from[i] * scale * element(norm, norm_format, i) : from[i];
    if (BF16) {
      ((u16*)to)[(i64)n * n_columns + i] = to_bf16(v);
    } else {
      ((float*)to)[(i64)n * n_columns + i] = v;
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
