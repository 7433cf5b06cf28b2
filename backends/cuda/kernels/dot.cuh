// The core of decode: a warp multiplies R rows of a weight with N rows of x, each 16 bytes of weight read once.
#pragma once
#include "common.cuh"

// PER consecutive elements of a vector in f32; `i` is a multiple of PER.
template <int PER>
__device__ __forceinline__ void load_f32(const float* x, u32 i, float (&out)[PER]) {
#pragma unroll
  for (int j = 0; j < PER; j += 4) {
    const float4 v = *(const float4*)(x + i + j);
    out[j] = v.x;
    out[j + 1] = v.y;
    out[j + 2] = v.z;
    out[j + 3] = v.w;
  }
}

// The same of a norm's weight, f32 or bf16.
template <int PER>
__device__ __forceinline__ void load_norm(const void* norm, u32 format, u32 i, float (&out)[PER]) {
  if (format == FORMAT_F32) {
    load_f32<PER>((const float*)norm, i, out);
    return;
  }
#pragma unroll
  for (int j = 0; j < PER; j += 4) {
    const uint2 v = *(const uint2*)((const u16*)norm + i + j);
    out[j] = bits_to_f32(v.x << 16);
    out[j + 1] = bits_to_f32(v.x & 0xffff0000u);
    out[j + 2] = bits_to_f32(v.y << 16);
    out[j + 3] = bits_to_f32(v.y & 0xffff0000u);
  }
}

// sums[r][n] = weight[r] . (x[n] * norm), squares[n] = x[n] . x[n], in every lane. Vectors start at 16 bytes and n_columns
// is a multiple of 8. U: steps of 512 bytes a row whose loads are under way together. Squares are summed with NORM only.
// Only the first n_live rows of x are looked at.
template <class W, int N, int R, int U, bool NORM>
__device__ __forceinline__ void dot_rows(const void* const (&weight)[R], const float* const (&x)[N], u32 n_live,
                                         const void* norm, u32 norm_format, u32 n_columns, float (&sums)[R][N],
                                         float (&squares)[N]) {
  constexpr int PER = W::PER_16_BYTES;
  typedef typename W::Element Element;
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < N; n++) {
    squares[n] = 0.0f;
#pragma unroll
    for (int r = 0; r < R; r++) sums[r][n] = 0.0f;
  }
  const auto step = [&](const uint4(&raw)[R], u32 column) {
    float w[R][PER];
#pragma unroll
    for (int r = 0; r < R; r++) W::unpack(raw[r], w[r]);
    float g[PER];
    if (NORM) load_norm<PER>(norm, norm_format, column, g);
#pragma unroll
    for (int n = 0; n < N; n++) {
      if (N > 1 && n >= (int)n_live) continue;
      float v[PER];
      load_f32<PER>(x[n], column, v);
#pragma unroll
      for (int i = 0; i < PER; i++) {
        if (NORM) {
          squares[n] += v[i] * v[i];
          v[i] *= g[i];
        }
#pragma unroll
        for (int r = 0; r < R; r++) sums[r][n] += w[r][i] * v[i];
      }
    }
  };
  u32 column = lane * PER;
  for (; column + (U - 1) * 32 * PER < n_columns; column += U * 32 * PER) {
    uint4 raw[U][R];
#pragma unroll
    for (int u = 0; u < U; u++) {
#pragma unroll
      for (int r = 0; r < R; r++) raw[u][r] = load_stream((const Element*)weight[r] + column + u * 32 * PER);
    }
#pragma unroll
    for (int u = 0; u < U; u++) step(raw[u], column + u * 32 * PER);
  }
  for (; column < n_columns; column += 32 * PER) {
    uint4 raw[R];
#pragma unroll
    for (int r = 0; r < R; r++) raw[r] = load_stream((const Element*)weight[r] + column);
    step(raw, column);
  }
#pragma unroll
  for (int n = 0; n < N; n++) {
    if (N > 1 && n >= (int)n_live) continue;
    if (NORM) squares[n] = warp_sum(squares[n]);
#pragma unroll
    for (int r = 0; r < R; r++) sums[r][n] = warp_sum(sums[r][n]);
  }
}
