// The core of tensor-core matrix products: BM rows of x times 128 rows of a weight, both bf16, sums in f32, 256 threads.
//
// Eight warps, two by four, own BM / 2 rows and 32 columns each. Four stages of 32 columns of x and weight are copied to
// shared memory ahead of their use. Row r of a stage keeps its 16-byte part c at c ^ (r / 2 % 4), so that eight rows read
// at once lie in different banks. Dynamic shared memory: STAGES * (BM + BN) * STAGE_COLUMNS * 2 bytes.
#pragma once
#include "common.cuh"

constexpr int BN = 128;
constexpr int STAGE_COLUMNS = 32;
constexpr int STAGES = 4;

__device__ __forceinline__ u32 stage_place(u32 row, u32 part) {
  return row * STAGE_COLUMNS + (part ^ (row / 2 % 4)) * 8;
}

// What weight row j of a GLU tile stands for: column of the tile, and whether it is of up.
__device__ __forceinline__ u32 glu_column(u32 j) { return j / 16 * 8 + j % 8; }
__device__ __forceinline__ bool glu_is_up(u32 j) { return j / 8 % 2 == 1; }

// store(row, column, a, b) gets elements of two neighbouring columns; with GLU store(row, column, a, b, up_a, up_b) and
// column < 64. x_row(i) and weight_row(j) give a row's address, aligned to 16 bytes, or null outside. n_columns is a
// multiple of 8. All threads of the block take part.
template <int BM, bool GLU, class XRow, class WeightRow, class Store>
__device__ __forceinline__ void tile_bf16(u32 n_columns, u8* shared, const XRow& x_row, const WeightRow& weight_row,
                                          const Store& store) {
  constexpr int STAGE = (BM + BN) * STAGE_COLUMNS;
  constexpr int M_TILES = BM / 2 / 16, N_TILES = 4;
  u16* stages = (u16*)shared;
  const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const u32 warp_row = warp / 4 * (BM / 2), warp_column = warp % 4 * 32;

  const u32 part = tid % 4;
  const u16* x[BM / 64];
  const u16* weight[BN / 64];
#pragma unroll
  for (int i = 0; i < BM / 64; i++) x[i] = (const u16*)x_row(tid / 4 + i * 64);
#pragma unroll
  for (int i = 0; i < BN / 64; i++) weight[i] = (const u16*)weight_row(tid / 4 + i * 64);

  const u32 n_steps = (n_columns + STAGE_COLUMNS - 1) / STAGE_COLUMNS;
  const auto fetch = [&](u32 step) {
    u16* stage = stages + step % STAGES * STAGE;
    const u32 column = step * STAGE_COLUMNS + part * 8;
    const bool inside = column < n_columns;
#pragma unroll
    for (int i = 0; i < BM / 64; i++) {
      const bool live = inside && x[i] != nullptr;
      copy_async(stage + stage_place(tid / 4 + i * 64, part), live ? x[i] + column : stages, live);
    }
    stage += BM * STAGE_COLUMNS;
#pragma unroll
    for (int i = 0; i < BN / 64; i++) {
      const bool live = inside && weight[i] != nullptr;
      copy_async(stage + stage_place(tid / 4 + i * 64, part), live ? weight[i] + column : stages, live);
    }
  };

  float sums[M_TILES][N_TILES][4] = {};
#pragma unroll
  for (u32 step = 0; step < STAGES - 1; step++) {
    if (step < n_steps) fetch(step);
    copy_commit();
  }
  for (u32 step = 0; step < n_steps; step++) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    if (step + STAGES - 1 < n_steps) fetch(step + STAGES - 1);
    copy_commit();
    const u16* xs = stages + step % STAGES * STAGE;
    const u16* ws = xs + BM * STAGE_COLUMNS;
#pragma unroll
    for (int k = 0; k < STAGE_COLUMNS / 16; k++) {
      u32 a[M_TILES][4], b[N_TILES / 2][4];
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
        load_matrices(a[m], xs + stage_place(warp_row + m * 16 + lane % 16, k * 2 + lane / 16));
      }
#pragma unroll
      for (int n = 0; n < N_TILES / 2; n++) {
        const u32 row = warp_column + n * 16 + lane / 16 * 8 + lane % 8;
        load_matrices(b[n], ws + stage_place(row, k * 2 + lane / 8 % 2));
      }
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
          mma_bf16(sums[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }
  copy_wait<0>();

#pragma unroll
  for (int m = 0; m < M_TILES; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 row = warp_row + m * 16 + half * 8 + lane / 4;
      if constexpr (GLU) {
#pragma unroll
        for (int n = 0; n < N_TILES; n += 2) {
          const u32 column = glu_column(warp_column + n * 8) + lane % 4 * 2;
          const float* gate = &sums[m][n][half * 2];
          const float* up = &sums[m][n + 1][half * 2];
          store(row, column, gate[0], gate[1], up[0], up[1]);
        }
      } else {
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
          const u32 column = warp_column + n * 8 + lane % 4 * 2;
          store(row, column, sums[m][n][half * 2], sums[m][n][half * 2 + 1]);
        }
      }
    }
  }
}
