// The routed experts on tensor cores for many rows: prefill. Two grouped products over the plan of expert_sort:
// inner = silu(gate . x) * (up . x), rounded to bf16, then parts = weight * down . inner.
//
// x bf16 [n_rows, hidden]; order, tiles, n_tiles as expert_sort leaves them, with tiles of at most BM rows; inner bf16
// [n_rows * top_k, intermediate] in sorted order, scratch; parts f32 [n_rows, top_k, hidden]. Blocks in y stand for tiles and
// leave early beyond the last; a block owns a tile's rows and BN / 2 (gate and up) or BN (down) columns. hidden and intermediate
// are multiples of 8. Bytes: each touched expert once a tile of its rows. Bound by those bytes up to about a hundred rows an
// expert, then by the tensor cores and by L2.
#include "expert_mlp_place.cuh"
#include "tile_bf16.cuh"

#define GROUP_ARGUMENTS                                                                                              \
  ExpertMlpParams p, ExpertPlace place, const u32 *n_tiles, const int4 *tiles, const int *order, const u64 *chunks

template <class Shape, template <class> class Weights>
__device__ __forceinline__ void gate_up(GROUP_ARGUMENTS, u16* inner, const u16* x) {
  DYNAMIC_SHARED(shared);
  if (blockIdx.y >= *n_tiles) return;
  const int4 tile = tiles[blockIdx.y];
  const u8* record = record_of(place, chunks, tile.x);
  const Stored gate = matrix_of(place, record, place.gate), up = matrix_of(place, record, place.up);
  const u32 first_column = blockIdx.x * (Shape::BN / 2), n = tile.z - tile.y;
  tile_bf16_of_rows<Shape, true, Weights<Shape>>(
      n, p.hidden, shared,
      [&](u32 i) { return i < n ? x + (i64)((u32)order[tile.y + i] / p.top_k) * p.hidden : nullptr; },
      [&](u32 j) {
        const u32 column = first_column + glu_column(j);
        if (column >= p.intermediate) return StoredRow{};
        return (glu_is_up(j) ? up : gate).row(place.format, column, p.hidden);
      },
      [](u32, u32) { return 0; },
      [&](u32 i, u32 j, int, float4 v, float4 v_up) {
        const u32 column = first_column + j;
        if (i >= n || column >= p.intermediate) return;
        const auto product = [&](u32 k, float a, float b) {
          return silu(a * gate.global(column + k)) * (b * up.global(column + k));
        };
        *(uint2*)(inner + (i64)(tile.y + i) * p.intermediate + column) =
            make_uint2(pack_bf16(product(0, v.x, v_up.x), product(1, v.y, v_up.y)),
                       pack_bf16(product(2, v.z, v_up.z), product(3, v.w, v_up.w)));
      });
}

template <class Shape, template <class> class Weights>
__device__ __forceinline__ void down(GROUP_ARGUMENTS, float* parts, const u16* inner, const float* weights) {
  DYNAMIC_SHARED(shared);
  if (blockIdx.y >= *n_tiles) return;
  const int4 tile = tiles[blockIdx.y];
  const Stored matrix = matrix_of(place, record_of(place, chunks, tile.x), place.down);
  const u32 first_column = blockIdx.x * Shape::BN, n = tile.z - tile.y;
  // What each row is asked for again and again once its sums are there. The tile has barriers between.
  __shared__ u32 routes[Shape::BM];
  __shared__ float shares[Shape::BM];
  for (u32 i = threadIdx.x; i < n; i += Shape::THREADS) {
    routes[i] = order[tile.y + i];
    shares[i] = weights[routes[i]];
  }
  tile_bf16_of_rows<Shape, false, Weights<Shape>>(
      n, p.intermediate, shared,
      [&](u32 i) { return i < n ? inner + (i64)(tile.y + i) * p.intermediate : nullptr; },
      [&](u32 j) {
        const u32 column = first_column + j;
        return column < p.hidden ? matrix.row(place.format, column, p.intermediate) : StoredRow{};
      },
      [](u32, u32) { return 0; },
      [&](u32 i, u32 j, int, float4 v) {
        const u32 column = first_column + j;
        if (i >= n || column >= p.hidden) return;
        const float weight = shares[i];
        *(float4*)(parts + (i64)routes[i] * p.hidden + column) =
            make_float4(weight * v.x * matrix.global(column), weight * v.y * matrix.global(column + 1),
                        weight * v.z * matrix.global(column + 2), weight * v.w * matrix.global(column + 3));
      });
}

// The format of plain weights is known, that of others is one of three.
__device__ __forceinline__ ExpertPlace bf16_place(ExpertPlace place) {
  place.format = FORMAT_BF16;
  return place;
}

#define EXPERT_MMA(BM, Shape, name, PLACE, Weights)                                                       \
  extern "C" __global__ void __launch_bounds__(Shape::THREADS)                                            \
      expert_mma_gate_up_##name##BM(GROUP_ARGUMENTS, u16* inner, const u16* x) {                          \
    gate_up<Shape, Weights>(p, PLACE, n_tiles, tiles, order, chunks, inner, x);                           \
  }                                                                                                       \
  extern "C" __global__ void __launch_bounds__(Shape::THREADS)                                            \
      expert_mma_down_##name##BM(GROUP_ARGUMENTS, float* parts, const u16* inner, const float* weights) { \
    down<Shape, Weights>(p, PLACE, n_tiles, tiles, order, chunks, parts, inner, weights);                 \
  }

EXPERT_MMA(64, LowTile, , bf16_place(place), PlainStages)
EXPERT_MMA(160, TallTile, , bf16_place(place), PlainStages)
EXPERT_MMA(64, LowTile, scaled_, place, ScaledStages)
EXPERT_MMA(128, HighTile, scaled_, place, ScaledStages)
