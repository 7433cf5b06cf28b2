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

template <class W>
__device__ __forceinline__ void gate_up(GROUP_ARGUMENTS, float* inner, const float* x) {
  if (blockIdx.x >= *n_tiles) return;
  const int4 tile = tiles[blockIdx.x];
  const u8* record = record_of(place, chunks, tile.x);
  const u32 first_column = blockIdx.y * (TILE / 2), n = tile.z - tile.y;
  tile_f32<W, true>(
      p.hidden,
      [&](u32 i) { return i < n ? x + (i64)((u32)order[tile.y + i] / p.top_k) * p.hidden : nullptr; },
      [&](u32 j) -> const void* {
        const u32 column = first_column + glu_column_f32(j);
        const u8* half = record + (glu_is_up_f32(j) ? place.up_bytes : 0);
        return column < p.intermediate ? (const typename W::Element*)half + (i64)column * p.hidden : nullptr;
      },
      [&](u32 i, u32 j, float gate, float up) {
        const u32 column = first_column + j;
        if (i < n && column < p.intermediate) inner[(i64)(tile.y + i) * p.intermediate + column] = silu(gate) * up;
      });
}

template <class W>
__device__ __forceinline__ void down(GROUP_ARGUMENTS, float* parts, const float* inner, const float* weights) {
  if (blockIdx.x >= *n_tiles) return;
  const int4 tile = tiles[blockIdx.x];
  const u8* record = record_of(place, chunks, tile.x) + place.down_bytes;
  const u32 first_column = blockIdx.y * TILE, n = tile.z - tile.y;
  tile_f32<W, false>(
      p.intermediate, [&](u32 i) { return i < n ? inner + (i64)(tile.y + i) * p.intermediate : nullptr; },
      [&](u32 j) -> const void* {
        const u32 column = first_column + j;
        return column < p.hidden ? (const typename W::Element*)record + (i64)column * p.intermediate : nullptr;
      },
      [&](u32 i, u32 j, float v, float) {
        const u32 column = first_column + j;
        if (i >= n || column >= p.hidden) return;
        const u32 route = order[tile.y + i];
        parts[(i64)route * p.hidden + column] = weights[route] * v;
      });
}

#define EXPERT_TILE(name, W)                                                                                  \
  extern "C" __global__ void __launch_bounds__(256)                                                           \
      expert_tile_gate_up_##name(GROUP_ARGUMENTS, float* inner, const float* x) {                             \
    gate_up<W>(p, place, n_tiles, tiles, order, chunks, inner, x);                                            \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                                           \
      expert_tile_down_##name(GROUP_ARGUMENTS, float* parts, const float* inner, const float* weights) {      \
    down<W>(p, place, n_tiles, tiles, order, chunks, parts, inner, weights);                                  \
  }

EXPERT_TILE(f32, F32)
EXPERT_TILE(bf16, Bf16)
EXPERT_TILE(f16, F16)
