// The routed experts in f32 for many rows: prefill without tensor cores. Two grouped products over the plan of expert_sort:
// inner = silu(gate . x) * (up . x), then parts = weight * down . inner.
//
// x f32 [n_rows, hidden]; order, tiles, n_tiles as expert_sort leaves them, with tiles of at most 64 rows; inner f32
// [n_rows * top_k, intermediate] in sorted order, scratch; parts f32 [n_rows, top_k, hidden]. Blocks in x stand for tiles and
// leave early beyond the last; a block owns a tile's rows and 32 (gate and up) or 64 (down) columns. Bound by f32 arithmetic.
#include "expert_mlp_place.cuh"
#include "tile_f32.cuh"

#define GROUP_ARGUMENTS                                                                                              \
  ExpertMlpParams p, ExpertPlace place, const u32 *n_tiles, const int4 *tiles, const int *order, const u64 *chunks

// row_of(matrix, c) is row c of a matrix, with so many columns.
template <class RowOf>
__device__ __forceinline__ void gate_up(GROUP_ARGUMENTS, float* inner, const float* x, const RowOf& row_of) {
  if (blockIdx.x >= *n_tiles) return;
  const int4 tile = tiles[blockIdx.x];
  const u8* record = record_of(place, chunks, tile.x);
  const Stored gate = matrix_of(place, record, place.gate), up = matrix_of(place, record, place.up);
  const u32 first_column = blockIdx.y * (TILE / 2), n = tile.z - tile.y;
  tile_f32<true>(
      p.hidden,
      [&](u32 i) { return i < n ? x + (i64)((u32)order[tile.y + i] / p.top_k) * p.hidden : nullptr; },
      [&](u32 j) {
        const u32 column = first_column + glu_column_f32(j);
        if (column >= p.intermediate) return decltype(row_of(gate, 0u, 0u)){};
        return row_of(glu_is_up_f32(j) ? up : gate, column, p.hidden);
      },
      [&](u32 i, u32 j, float v, float v_up) {
        const u32 column = first_column + j;
        if (i >= n || column >= p.intermediate) return;
        v *= gate.global(column);
        v_up *= up.global(column);
        inner[(i64)(tile.y + i) * p.intermediate + column] = silu(v) * v_up;
      });
}

template <class RowOf>
__device__ __forceinline__ void down(GROUP_ARGUMENTS, float* parts, const float* inner, const float* weights,
                                     const RowOf& row_of) {
  if (blockIdx.x >= *n_tiles) return;
  const int4 tile = tiles[blockIdx.x];
  const Stored matrix = matrix_of(place, record_of(place, chunks, tile.x), place.down);
  const u32 first_column = blockIdx.y * TILE, n = tile.z - tile.y;
  tile_f32<false>(
      p.intermediate, [&](u32 i) { return i < n ? inner + (i64)(tile.y + i) * p.intermediate : nullptr; },
      [&](u32 j) {
        const u32 column = first_column + j;
        return column < p.hidden ? row_of(matrix, column, p.intermediate) : decltype(row_of(matrix, 0u, 0u)){};
      },
      [&](u32 i, u32 j, float v, float) {
        const u32 column = first_column + j;
        if (i >= n || column >= p.hidden) return;
        const u32 route = order[tile.y + i];
        parts[(i64)route * p.hidden + column] = weights[route] * v * matrix.global(column);
      });
}

template <class W>
__device__ __forceinline__ PlainRow<W> plain_row(const Stored& matrix, u32 row, u32 n_columns) {
  return {(const typename W::Element*)matrix.codes + (i64)row * n_columns};
}

#define EXPERT_TILE(name, ROW_OF)                                                                             \
  extern "C" __global__ void __launch_bounds__(256)                                                           \
      expert_tile_gate_up_##name(GROUP_ARGUMENTS, float* inner, const float* x) {                             \
    gate_up(p, place, n_tiles, tiles, order, chunks, inner, x,                                                \
            [&](const Stored& matrix, u32 row, u32 n_columns) { return ROW_OF; });                            \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                                           \
      expert_tile_down_##name(GROUP_ARGUMENTS, float* parts, const float* inner, const float* weights) {      \
    down(p, place, n_tiles, tiles, order, chunks, parts, inner, weights,                                      \
         [&](const Stored& matrix, u32 row, u32 n_columns) { return ROW_OF; });                               \
  }

EXPERT_TILE(f32, plain_row<F32>(matrix, row, n_columns))
EXPERT_TILE(bf16, plain_row<Bf16>(matrix, row, n_columns))
EXPERT_TILE(f16, plain_row<F16>(matrix, row, n_columns))
EXPERT_TILE(scaled, matrix.row(place.format, row, n_columns))
