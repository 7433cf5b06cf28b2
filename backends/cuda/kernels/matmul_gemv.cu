// out[n, :] (+)= activation(weight . norm(x[rows[n], :]) + bias) for at most 16 rows: decode. A bf16
// weight with more than four rows of x is in matmul_gemv_mma.
//
// x f32 [*, in_features]; weight [n_columns, in_features], with a GLU followed by `up` of the same shape; out f32
// [n_rows, out_features], of which this launch fills n_columns columns. The RMS norm is applied to the sum: each warp reads
// all of x and sums its squares on the way. A warp owns R rows of the weight and reads them once for all rows of x, 16 bytes
// a lane and load, several loads under way; x and the norm come from L1.
// Bytes: the weight once. Bound by memory bandwidth; by f32 arithmetic at 16 rows of x.
#include "dot.cuh"
#include "matmul.cuh"

template <class W, int N, int R, int U, bool NORM>
__device__ __forceinline__ void gemv(const MatMulParams& p, u32 n_columns, float* out, const float* x, const int* rows,
                                     const void* norm, u32 norm_format, const void* weight, const void* up,
                                     const void* bias, const void* up_bias, u32 bias_format) {
  begin_kernel();
  const u32 lane = threadIdx.x % 32;
  const u32 warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const bool glu = p.activation == SILU_GLU;
  const u32 columns_per_warp = glu ? R / 2 : R;
  const u32 first = warp * columns_per_warp;
  if (first >= n_columns) return;
  const void* w[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const bool lower = glu && r >= R / 2;
    const u32 c = min(first + (lower ? r - R / 2 : r), n_columns - 1);
    w[r] = (const typename W::Element*)(lower ? up : weight) + (i64)c * p.in_features;
  }
  const float* from[N];
#pragma unroll
  for (int n = 0; n < N; n++) {
    const u32 row = min((u32)n, p.n_rows - 1);
    from[n] = x + (i64)(rows != nullptr ? (u32)rows[row] : row) * p.in_features;
  }
  float sums[R][N], squares[N];
  dot_rows<W, N, R, U, NORM>(w, from, p.n_rows, norm, norm_format, p.in_features, sums, squares);
  start_next_kernel();

  // Every lane has every sum; element i of the result goes to lane i % 32.
  constexpr int PER_LANE = (N * R + 31) / 32;
  float gate[PER_LANE] = {}, lower[PER_LANE] = {};
  float square = 0.0f;
#pragma unroll
  for (int n = 0; n < N; n++) {
    if (NORM && lane % N == n) square = squares[n];
#pragma unroll
    for (int r = 0; r < R; r++) {
      const int i = r * N + n;
      if (lane == i % 32) gate[i / 32] = sums[r][n];
      if (r < R / 2 && lane == i % 32) lower[i / 32] = sums[r + R / 2][n];
    }
  }
  const float scale = NORM ? 1.0f / sqrtf(square / (float)p.in_features + p.eps) : 1.0f;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const u32 n = lane % N, r = (i * 32 + lane) / N;
    if (n < p.n_rows && r < columns_per_warp && first + r < n_columns) {
      finish(p, out, n, first + r, gate[i] * scale, lower[i] * scale, bias, up_bias, bias_format);
    }
  }
}

#define GEMV(name, W, N, R, U)                                                                                       \
  extern "C" __global__ void __launch_bounds__(128, 2) matmul_gemv_##name##_n##N(MATMUL_ARGUMENTS) {                    \
    gemv<W, N, R, U, false>(p, n_columns, out, x, rows, norm, norm_format, weight, up, bias, up_bias, bias_format);  \
  }                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(128, 2) matmul_gemv_norm_##name##_n##N(MATMUL_ARGUMENTS) {               \
    gemv<W, N, R, U, true>(p, n_columns, out, x, rows, norm, norm_format, weight, up, bias, up_bias, bias_format);   \
  }

GEMV(f32, F32, 1, 2, 4)
GEMV(f32, F32, 16, 4, 1)
GEMV(bf16, Bf16, 1, 2, 4)
GEMV(bf16, Bf16, 2, 2, 4)
GEMV(bf16, Bf16, 4, 4, 2)
GEMV(f16, F16, 1, 2, 4)

// Rows of any format and width at any place: a warp owns one column of one row.
extern "C" __global__ void __launch_bounds__(128) matmul_gemv_any(MATMUL_ARGUMENTS, SCALE_ARGUMENTS, u32 weight_format) {
  const u32 n = blockIdx.y;
  const u32 c = blockIdx.x * 4 + threadIdx.x / 32;
  if (c >= n_columns) return;
  const bool glu = p.activation == SILU_GLU;
  const float* from = x + (i64)(rows != nullptr ? (u32)rows[n] : n) * p.in_features;
  const Stored gate_rows = {weight, scales, globals}, up_rows = {up, up_scales, up_globals};
  const StoredRow gate_row = gate_rows.row(weight_format, c, p.in_features);
  const StoredRow up_row = up_rows.row(weight_format, c, p.in_features);
  float gate = 0.0f, lower = 0.0f, squares = 0.0f;
  for (u32 i = threadIdx.x % 32; i < p.in_features; i += 32) {
    const float v = from[i];
    const float normed = norm != nullptr ? v * element(norm, norm_format, i) : v;
    squares += v * v;
    gate += gate_row.at(i) * normed;
    if (glu) lower += up_row.at(i) * normed;
  }
  const float scale = norm != nullptr ? 1.0f / sqrtf(warp_sum(squares) / (float)p.in_features + p.eps) : 1.0f;
  gate = warp_sum(gate) * scale * gate_rows.global(c);
  lower = glu ? warp_sum(lower) * scale * up_rows.global(c) : 0.0f;
  if (threadIdx.x % 32 == 0) finish(p, out, n, c, gate, lower, bias, up_bias, bias_format);
}
