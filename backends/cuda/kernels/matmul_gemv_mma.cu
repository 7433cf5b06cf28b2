// out[n, :] (+)= activation(weight . norm(x[rows[n], :]) + bias) for 5 to 16 rows and a bf16 weight: decode of a batch.
//
// Layouts as in matmul_gemv. There, f32 arithmetic bounds many rows; here tensor cores multiply, and nothing is lost: a row of
// x is the sum of three bf16 vectors, products of bf16 are exact and sums are f32. A block owns 32 rows of the weight (with
// a GLU 16 of gate and 16 of up); its eight warps take steps of 32 columns in turn, a lane 16 bytes of a row. Which column a
// lane calls which does not matter to a sum, so those 16 bytes are two fragments as they come. The warps' sums meet in shared
// memory. Bytes: the weight once, x from L2 once a block. Bound by memory bandwidth.
#include "dot.cuh"
#include "matmul.cuh"
#include "split.cuh"

constexpr int WARPS = 8;
constexpr int STEP = 32;
// Steps whose loads are under way together.
constexpr int UNROLL = 2;
// Tiles of 16 rows of the weight.
constexpr int M_TILES = 2;

template <int N_TILES, bool NORM>
__device__ __forceinline__ void gemv(MATMUL_ARGUMENTS) {
  constexpr int N = 8 * N_TILES;
  __shared__ float sums_of[WARPS][M_TILES * 16][N];
  __shared__ float squares_of[WARPS][N];
  begin_kernel();
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 g = lane / 4, t = lane % 4;
  const bool glu = p.activation == SILU_GLU;
  const u32 first = blockIdx.x * (glu ? 16 : 32);
  const u16* w[M_TILES][2];
#pragma unroll
  for (int m = 0; m < M_TILES; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 c = min(first + (glu ? 0 : m * 16) + half * 8 + g, n_columns - 1);
      w[m][half] = (const u16*)(glu && m == 1 ? up : weight) + (i64)c * p.in_features;
    }
  }
  const float* from[N_TILES];
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
    const u32 row = min(n * 8 + g, p.n_rows - 1);
    from[n] = x + (i64)(rows != nullptr ? (u32)rows[row] : row) * p.in_features;
  }

  float sums[M_TILES][N_TILES][4] = {};
  float squares[N_TILES] = {};
  const auto multiply = [&](const uint4(&raw)[M_TILES][2], u32 column, bool live) {
    float norms[8];
    if (NORM) load_norm<8>(norm, norm_format, column, norms);
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      float v[8];
      load_f32<8>(from[n], column, v);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (!live) v[i] = 0.0f;
        if (NORM) {
          squares[n] += v[i] * v[i];
          v[i] *= norms[i];
        }
      }
      const Split b[4] = {{v[0], v[1]}, {v[2], v[3]}, {v[4], v[5]}, {v[6], v[7]}};
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
        const u32 low[4] = {raw[m][0].x, raw[m][1].x, raw[m][0].y, raw[m][1].y};
        const u32 high[4] = {raw[m][0].z, raw[m][1].z, raw[m][0].w, raw[m][1].w};
#pragma unroll
        for (int i = 0; i < 3; i++) {
          mma_bf16(sums[m][n], low, b[0].parts[i], b[1].parts[i]);
          mma_bf16(sums[m][n], high, b[2].parts[i], b[3].parts[i]);
        }
      }
    }
  };
  const auto load = [&](uint4(&raw)[M_TILES][2], u32 column) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) raw[m][half] = load_stream(w[m][half] + column);
    }
  };
  u32 start = warp * STEP;
  for (; start + ((UNROLL - 1) * WARPS + 1) * STEP <= p.in_features; start += UNROLL * WARPS * STEP) {
    uint4 raw[UNROLL][M_TILES][2];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) load(raw[u], start + u * WARPS * STEP + t * 8);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) multiply(raw[u], start + u * WARPS * STEP + t * 8, true);
  }
  // The same number of steps in all lanes of a warp: columns beyond the last count as zeros of x.
  for (; start < p.in_features; start += WARPS * STEP) {
    const u32 column = start + t * 8;
    const bool live = column < p.in_features;
    uint4 raw[M_TILES][2];
    load(raw, live ? column : 0);
    multiply(raw, live ? column : 0, live);
  }

#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
      for (int i = 0; i < 4; i++) sums_of[warp][m * 16 + i / 2 * 8 + g][n * 8 + t * 2 + i % 2] = sums[m][n][i];
    }
    if (NORM) {
      float square = squares[n];
      square += __shfl_xor_sync(FULL_WARP, square, 1);
      square += __shfl_xor_sync(FULL_WARP, square, 2);
      if (t == 0) squares_of[warp][n * 8 + g] = square;
    }
  }
  __syncthreads();
  const u32 n_own = glu ? 16 : 32;
  for (u32 i = threadIdx.x; i < n_own * N; i += WARPS * 32) {
    const u32 n = i / n_own, c = i % n_own;
    if (n >= p.n_rows || first + c >= n_columns) continue;
    float gate = 0.0f, lower = 0.0f, square = 0.0f;
#pragma unroll
    for (int other = 0; other < WARPS; other++) {
      gate += sums_of[other][c][n];
      if (glu) lower += sums_of[other][16 + c][n];
      if (NORM) square += squares_of[other][n];
    }
    const float scale = NORM ? 1.0f / sqrtf(square / (float)p.in_features + p.eps) : 1.0f;
    finish(p, out, n, first + c, gate * scale, lower * scale, bias, up_bias, bias_format);
  }
}

#define GEMV_MMA(N)                                                                                                 \
  extern "C" __global__ void __launch_bounds__(256, 2) matmul_gemv_bf16_n##N(MATMUL_ARGUMENTS) {                       \
    gemv<N / 8, false>(p, out, x, rows, norm, weight, up, bias, up_bias, n_columns, norm_format, bias_format);      \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(256, 2) matmul_gemv_norm_bf16_n##N(MATMUL_ARGUMENTS) {                  \
    gemv<N / 8, true>(p, out, x, rows, norm, weight, up, bias, up_bias, n_columns, norm_format, bias_format);       \
  }

GEMV_MMA(8)
GEMV_MMA(16)
