// out[n, :] (+)= activation(weight . x[n, :] + bias) on tensor cores, for many rows: prefill.
//
// x bf16 [n_rows, in_features], normed, gathered and rounded before; weight and up [n_columns, in_features] in bf16, or with
// scales; out f32 [n_rows, out_features], of which this launch fills n_columns columns. A block owns BM rows and BN columns, half
// as many with a GLU; neighbouring blocks share a weight tile. Bytes: tiles of x and weight from L2. Bound by the tensor cores
// and by L2, for few rows by the bytes of the weight.
#include "matmul.cuh"
#include "tile_bf16.cuh"

#define MMA_ARGUMENTS                                                                                \
  MatMulParams p, float *out, const u16 *x, const void *weight, const void *up, const void *bias,    \
      const void *up_bias, u32 n_columns, u32 bias_format

template <class Shape, bool GLU, template <class> class Weights>
__device__ __forceinline__ void matmul(MMA_ARGUMENTS, SCALE_ARGUMENTS, u32 format) {
  DYNAMIC_SHARED(shared);
  constexpr u32 COLUMNS = GLU ? Shape::BN / 2 : Shape::BN;
  const u32 first_row = blockIdx.x * Shape::BM, first_column = blockIdx.y * COLUMNS;
  const Stored gate_rows = {weight, scales, globals}, up_rows = {up, up_scales, up_globals};
  const auto finished = [&](u32 j, float v, float v_up) {
    const u32 column = min(first_column + j, n_columns - 1);
    v *= gate_rows.global(column);
    if (bias != nullptr) v += bias_at(bias, bias_format, column);
    if (GLU) {
      v_up *= up_rows.global(column);
      if (up_bias != nullptr) v_up += bias_at(up_bias, bias_format, column);
      v = silu(v) * v_up;
    }
    return v;
  };
  // Whether four columns are one load and one store.
  const bool in_quads = p.out_features % 4 == 0 && (u64)out % 16 == 0;
  const auto place_of = [&](u32 i, u32 j) { return out + (i64)(first_row + i) * p.out_features + first_column + j; };
  const auto is_whole = [&](u32 i, u32 j) {
    return in_quads && first_row + i < p.n_rows && first_column + j + 4 <= n_columns;
  };
  const auto before = [&](u32 i, u32 j) {
    return p.accumulate && is_whole(i, j) ? *(const float4*)place_of(i, j) : float4{};
  };
  const auto put = [&](u32 i, u32 j, float4 old, float4 sum, float4 up) {
    const float v[4] = {finished(j, sum.x, up.x), finished(j + 1, sum.y, up.y), finished(j + 2, sum.z, up.z),
                        finished(j + 3, sum.w, up.w)};
    float* place = place_of(i, j);
    if (is_whole(i, j)) {
      *(float4*)place = make_float4(old.x + v[0], old.y + v[1], old.z + v[2], old.w + v[3]);
    } else if (first_row + i < p.n_rows) {
#pragma unroll
      for (u32 k = 0; k < 4; k++) {
        if (first_column + j + k < n_columns) place[k] = p.accumulate ? place[k] + v[k] : v[k];
      }
    }
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
    tile_bf16<Shape, Shape::M_TILES, true, Weights<Shape>>(p.in_features, shared, x_row, weight_row, before, put);
  } else {
    tile_bf16<Shape, Shape::M_TILES, false, Weights<Shape>>(
        p.in_features, shared, x_row, weight_row, before,
        [&](u32 i, u32 j, float4 sum, float4 v) { put(i, j, sum, v, float4{}); });
  }
}

#define MATMUL_MMA(BM, Shape, name, GLU)                                                                                     \
  extern "C" __global__ void __launch_bounds__(Shape::THREADS) matmul_mma_##name##BM(MMA_ARGUMENTS) {                        \
    matmul<Shape, GLU, PlainStages>(p, out, x, weight, up, bias, up_bias, n_columns, bias_format, nullptr, nullptr, nullptr, \
                                    nullptr, FORMAT_BF16);                                                                   \
  }                                                                                                                          \
  extern "C" __global__ void __launch_bounds__(Shape::THREADS)                                                               \
      matmul_mma_scaled_##name##BM(MMA_ARGUMENTS, SCALE_ARGUMENTS, u32 format) {                                             \
    matmul<Shape, GLU, ScaledStages>(p, out, x, weight, up, bias, up_bias, n_columns, bias_format, scales, up_scales,        \
                                     globals, up_globals, format);                                                           \
  }

MATMUL_MMA(64, LowTile, , false)
MATMUL_MMA(64, LowTile, glu_, true)
MATMUL_MMA(128, HighTile, , false)
MATMUL_MMA(128, HighTile, glu_, true)
