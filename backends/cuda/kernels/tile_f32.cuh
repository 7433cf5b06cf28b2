// The core of f32 matrix products: 64 rows of x times 64 rows of a weight, by 256 threads in f32.
#pragma once
#include "scaled.cuh"

constexpr int TILE = 64;

// A row of a weight that is codes only, null outside.
template <class W>
struct PlainRow {
  const typename W::Element* elements;
  __device__ __forceinline__ float at(u32 column) const { return elements != nullptr ? W::to_f32(elements[column]) : 0.0f; }
};

// store(row, column, gate, up) is called for each element of the tile, with column < 64, or column < 32 with GLU (and only
// then with an up). x_row(i) gives a row's address, or null outside; weight_row(j) a PlainRow or a StoredRow. With GLU
// weight row j stands for column j / 4 * 2 + j % 2 of gate where j % 4 < 2, else of up.
template <bool GLU, class XRow, class WeightRow, class Store>
__device__ __forceinline__ void tile_f32(u32 n_columns, const XRow& x_row, const WeightRow& weight_row,
                                         const Store& store) {
  constexpr int DEPTH = 16;
  __shared__ __align__(16) float xs[DEPTH][TILE + 4];
  __shared__ __align__(16) float ws[DEPTH][TILE + 4];
  const int tid = threadIdx.x;
  const int row = tid / 4, part = tid % 4 * 4;
  const float* x = x_row(row);
  const auto weight = weight_row(row);
  const int ty = tid / 16, tx = tid % 16;
  float sums[4][4] = {};
  for (u32 start = 0; start < n_columns; start += DEPTH) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 column = start + part + i;
      xs[part + i][row] = x != nullptr && column < n_columns ? x[column] : 0.0f;
      ws[part + i][row] = column < n_columns ? weight.at(column) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
      const float4 a = *(const float4*)&xs[k][ty * 4];
      const float4 b = *(const float4*)&ws[k][tx * 4];
      const float as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] += as[i] * bs[j];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (GLU) {
      store(ty * 4 + i, tx * 2, sums[i][0], sums[i][2]);
      store(ty * 4 + i, tx * 2 + 1, sums[i][1], sums[i][3]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++) store(ty * 4 + i, tx * 4 + j, sums[i][j], 0.0f);
    }
  }
}

// What weight row j of a GLU tile stands for: column of the tile, and whether it is of up.
__device__ __forceinline__ u32 glu_column_f32(u32 j) { return j / 4 * 2 + j % 2; }
__device__ __forceinline__ bool glu_is_up_f32(u32 j) { return j % 4 >= 2; }
