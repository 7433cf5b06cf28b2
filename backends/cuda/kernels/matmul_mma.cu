// out[n, :] (+)= activation(weight . x[n, :] + bias) on tensor cores, for many rows: prefill.
//
// x bf16 [n_rows, in_features], normed, gathered and rounded before; weight and up [n_columns, in_features] in bf16, or with
// scales; out f32 [n_rows, out_features], of which this launch fills n_columns columns. A block owns BM rows and 128 columns
// (64 with a GLU); neighbouring blocks share a weight tile. Bytes: tiles of x and weight from L2. Bound by the tensor cores, for
// few rows by the bytes of the weight.
#include "matmul.cuh"
#include "tile_bf16.cuh"

#define MMA_ARGUMENTS                                                                                \
  MatMulParams p, float *out, const u16 *x, const void *weight, const void *up, const void *bias,    \
      const void *up_bias, u32 n_columns, u32 bias_format

template <int BM, bool GLU, class Weights>
__device__ __forceinline__ void matmul(MMA_ARGUMENTS, SCALE_ARGUMENTS, u32 format) {
  DYNAMIC_SHARED(shared);
  constexpr u32 COLUMNS = GLU ? BN / 2 : BN;
  const u32 first_row = blockIdx.x * BM, first_column = blockIdx.y * COLUMNS;
  const Stored gate_rows = {weight, scales, globals}, up_rows = {up, up_scales, up_globals};
  const auto put = [&](u32 row, u32 column, float v, float v_up) {
    if (column >= n_columns) return;
    v *= gate_rows.global(column);
    if (bias != nullptr) v += bias_at(bias, bias_format, column);
    if (GLU) {
      v_up *= up_rows.global(column);
      if (up_bias != nullptr) v_up += bias_at(up_bias, bias_format, column);
      v = silu(v) * v_up;
    }
    float* place = out + (i64)row * p.out_features + column;
    *place = p.accumulate ? *place + v : v;
  };
  const auto x_row = [&](u32 i) {
    return first_row + i < p.n_rows ? x + (i64)(first_row + i) * p.in_features : nullptr;
  };
  const auto weight_row = [&](u32 j) {
    const u32 column = first_column + (GLU ? glu_column(j) : j);
    if (column >= n_columns) return StoredRow{};
    return (GLU && glu_is_up(j) ? up_rows : gate_rows).row(format, column, p.in_features);
  };
  if constexpr (GLU) {
    tile_bf16<BM, true, Weights>(p.in_features, shared, x_row, weight_row,
                                 [&](u32 i, u32 j, float a, float b, float up_a, float up_b) {
                                   if (first_row + i >= p.n_rows) return;
                                   put(first_row + i, first_column + j, a, up_a);
                                   put(first_row + i, first_column + j + 1, b, up_b);
                                 });
  } else {
    tile_bf16<BM, false, Weights>(p.in_features, shared, x_row, weight_row, [&](u32 i, u32 j, float a, float b) {
      if (first_row + i >= p.n_rows) return;
      put(first_row + i, first_column + j, a, 0.0f);
      put(first_row + i, first_column + j + 1, b, 0.0f);
    });
  }
}

#define MATMUL_MMA(BM, name, GLU)                                                                                         \
  extern "C" __global__ void __launch_bounds__(256) matmul_mma_##name##BM(MMA_ARGUMENTS) {                                \
    matmul<BM, GLU, PlainStages>(p, out, x, weight, up, bias, up_bias, n_columns, bias_format, nullptr, nullptr, nullptr, \
                                 nullptr, FORMAT_BF16);                                                                   \
  }                                                                                                                       \
  extern "C" __global__ void __launch_bounds__(256)                                                                       \
      matmul_mma_scaled_##name##BM(MMA_ARGUMENTS, SCALE_ARGUMENTS, u32 format) {                                          \
    matmul<BM, GLU, ScaledStages>(p, out, x, weight, up, bias, up_bias, n_columns, bias_format, scales, up_scales,        \
                                  globals, up_globals, format);                                                           \
  }

MATMUL_MMA(64, , false)
MATMUL_MMA(64, glu_, true)
MATMUL_MMA(128, , false)
MATMUL_MMA(128, glu_, true)
