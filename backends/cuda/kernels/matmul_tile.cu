// out[n, :] (+)= activation(weight . x[n, :] + bias) in f32, for many rows: prefill without tensor cores.
//
// x f32 [n_rows, in_features], normed and gathered before; weight and up [n_columns, in_features]; out f32
// [n_rows, out_features], of which this launch fills n_columns columns. A block owns 64 rows and 64 columns (32 with a GLU).
// Bytes: tiles of x and weight from L2. Bound by f32 arithmetic.
#include "matmul.cuh"
#include "tile_f32.cuh"

#define TILE_ARGUMENTS                                                                                   \
  MatMulParams p, float *out, const float *x, const void *weight, const void *up, const void *bias,      \
      const void *up_bias, u32 n_columns, u32 bias_format

// gate_row(c) and up_row(c) are those of column c; global(c, is_up) is the factor of one.
template <bool GLU, class GateRow, class UpRow, class Global>
__device__ __forceinline__ void matmul(TILE_ARGUMENTS, const GateRow& gate_row, const UpRow& up_row, const Global& global) {
  constexpr u32 COLUMNS = GLU ? TILE / 2 : TILE;
  const u32 first_row = blockIdx.x * TILE, first_column = blockIdx.y * COLUMNS;
  tile_f32<GLU>(
      p.in_features,
      [&](u32 i) { return first_row + i < p.n_rows ? x + (i64)(first_row + i) * p.in_features : nullptr; },
      [&](u32 j) {
        const u32 column = first_column + (GLU ? glu_column_f32(j) : j);
        if (column >= n_columns) return decltype(gate_row(0u)){};
        return GLU && glu_is_up_f32(j) ? up_row(column) : gate_row(column);
      },
      [&](u32 i, u32 j, float v, float v_up) {
        const u32 row = first_row + i, column = first_column + j;
        if (row >= p.n_rows || column >= n_columns) return;
        v *= global(column, false);
        if (bias != nullptr) v += bias_at(bias, bias_format, column);
        if (GLU) {
          v_up *= global(column, true);
          if (up_bias != nullptr) v_up += bias_at(up_bias, bias_format, column);
          v = silu(v) * v_up;
        }
        float* place = out + (i64)row * p.out_features + column;
        *place = p.accumulate ? *place + v : v;
      });
}

template <class W, bool GLU>
__device__ __forceinline__ void plain(TILE_ARGUMENTS) {
  const auto row_of = [&](const void* rows, u32 c) {
    return PlainRow<W>{(const typename W::Element*)rows + (i64)c * p.in_features};
  };
  matmul<GLU>(
      p, out, x, weight, up, bias, up_bias, n_columns, bias_format, [&](u32 c) { return row_of(weight, c); },
      [&](u32 c) { return row_of(up, c); }, [](u32, bool) { return 1.0f; });
}

template <bool GLU>
__device__ __forceinline__ void scaled(TILE_ARGUMENTS, SCALE_ARGUMENTS, u32 format) {
  const Stored gate_rows = {weight, scales, globals}, up_rows = {up, up_scales, up_globals};
  matmul<GLU>(
      p, out, x, weight, up, bias, up_bias, n_columns, bias_format,
      [&](u32 c) { return gate_rows.row(format, c, p.in_features); },
      [&](u32 c) { return up_rows.row(format, c, p.in_features); },
      [&](u32 c, bool is_up) { return (is_up ? up_rows : gate_rows).global(c); });
}

#define MATMUL_TILE(name, W)                                                                     \
  extern "C" __global__ void __launch_bounds__(256) matmul_tile_##name(TILE_ARGUMENTS) {         \
    plain<W, false>(p, out, x, weight, up, bias, up_bias, n_columns, bias_format);               \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) matmul_tile_glu_##name(TILE_ARGUMENTS) {     \
    plain<W, true>(p, out, x, weight, up, bias, up_bias, n_columns, bias_format);                \
  }

MATMUL_TILE(f32, F32)
MATMUL_TILE(bf16, Bf16)
MATMUL_TILE(f16, F16)

extern "C" __global__ void __launch_bounds__(256)
    matmul_tile_scaled(TILE_ARGUMENTS, SCALE_ARGUMENTS, u32 format) {
  scaled<false>(p, out, x, weight, up, bias, up_bias, n_columns, bias_format, scales, up_scales, globals, up_globals,
                format);
}

extern "C" __global__ void __launch_bounds__(256)
    matmul_tile_glu_scaled(TILE_ARGUMENTS, SCALE_ARGUMENTS, u32 format) {
  scaled<true>(p, out, x, weight, up, bias, up_bias, n_columns, bias_format, scales, up_scales, globals, up_globals,
               format);
}
