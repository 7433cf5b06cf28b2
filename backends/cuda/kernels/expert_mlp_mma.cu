// The routed experts on tensor cores for many rows: prefill. Two grouped products over the plan of expert_sort:
// inner = silu(gate . x) * (up . x), rounded to bf16, then parts = weight * down . inner.
//
// x bf16 [n_rows, hidden]; order, tiles, n_tiles as expert_sort leaves them, with tiles of at most BM rows; inner bf16
// [n_rows * top_k, intermediate] in sorted order, scratch; parts f32 [n_rows, top_k, hidden]. Blocks in y stand for tiles and
// leave early beyond the last; a block owns a tile's rows and 64 (gate and up) or 128 (down) columns. hidden and intermediate
// are multiples of 8. Bytes: each touched expert once a tile of its rows. Bound by those bytes up to about a hundred rows an
// expert, then by the tensor cores.
#include "expert_mlp_place.cuh"
#include "tile_bf16.cuh"

#define GROUP_ARGUMENTS                                                                                              \
  ExpertMlpParams p, ExpertPlace place, const u32 *n_tiles, const int4 *tiles, const int *order, const u64 *chunks

template <int BM, class Weights>
__device__ __forceinline__ void gate_up(GROUP_ARGUMENTS, u16* inner, const u16* x) {
  DYNAMIC_SHARED(shared);
  if (blockIdx.y >= *n_tiles) return;
  const int4 tile = tiles[blockIdx.y];
  const u8* record = record_of(place, chunks, tile.x);
  const Stored gate = matrix_of(place, record, place.gate), up = matrix_of(place, record, place.up);
  const u32 first_column = blockIdx.x * (BN / 2), n = tile.z - tile.y;
  tile_bf16<BM, true, Weights>(
      p.hidden, shared,
      [&](u32 i) { return i < n ? x + (i64)((u32)order[tile.y + i] / p.top_k) * p.hidden : nullptr; },
      [&](u32 j) {
        const u32 column = first_column + glu_column(j);
        if (column >= p.intermediate) return StoredRow{};
        return (glu_is_up(j) ? up : gate).row(place.format, column, p.hidden);
      },
      [&](u32 i, u32 j, float a, float b, float up_a, float up_b) {
        const u32 column = first_column + j;
        if (i >= n || column >= p.intermediate) return;
        a *= gate.global(column), up_a *= up.global(column);
        b *= gate.global(column + 1), up_b *= up.global(column + 1);
        *(u32*)(inner + (i64)(tile.y + i) * p.intermediate + column) = pack_bf16(silu(a) * up_a, silu(b) * up_b);
      });
}

template <int BM, class Weights>
__device__ __forceinline__ void down(GROUP_ARGUMENTS, float* parts, const u16* inner, const float* weights) {
  DYNAMIC_SHARED(shared);
  if (blockIdx.y >= *n_tiles) return;
  const int4 tile = tiles[blockIdx.y];
  const Stored matrix = matrix_of(place, record_of(place, chunks, tile.x), place.down);
  const u32 first_column = blockIdx.x * BN, n = tile.z - tile.y;
  tile_bf16<BM, false, Weights>(
      p.intermediate, shared,
      [&](u32 i) { return i < n ? inner + (i64)(tile.y + i) * p.intermediate : nullptr; },
      [&](u32 j) {
        const u32 column = first_column + j;
        return column < p.hidden ? matrix.row(place.format, column, p.intermediate) : StoredRow{};
      },
      [&](u32 i, u32 j, float a, float b) {
        const u32 column = first_column + j;
        if (i >= n || column >= p.hidden) return;
        const u32 route = order[tile.y + i];
        const float weight = weights[route];
        *(float2*)(parts + (i64)route * p.hidden + column) =
            make_float2(weight * a * matrix.global(column), weight * b * matrix.global(column + 1));
      });
}

// The format of plain weights is known, that of others is one of three.
__device__ __forceinline__ ExpertPlace bf16_place(ExpertPlace place) {
  place.format = FORMAT_BF16;
  return place;
}

#define EXPERT_MMA(BM, name, PLACE, Weights, ...)                                                               \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__)                                                     \
      expert_mma_gate_up_##name##BM(GROUP_ARGUMENTS, u16* inner, const u16* x) {                                \
    gate_up<BM, Weights>(p, PLACE, n_tiles, tiles, order, chunks, inner, x);                                    \
  }                                                                                                             \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__)                                                     \
      expert_mma_down_##name##BM(GROUP_ARGUMENTS, float* parts, const u16* inner, const float* weights) {       \
    down<BM, Weights>(p, PLACE, n_tiles, tiles, order, chunks, parts, inner, weights);                          \
  }

EXPERT_MMA(64, , bf16_place(place), PlainStages, 256)
EXPERT_MMA(128, , bf16_place(place), PlainStages, 256)
EXPERT_MMA(64, scaled_, place, ScaledStages, 256, 2)
EXPERT_MMA(128, scaled_, place, ScaledStages, 256, 2)
