// The router for more rows than decode has. First logits = router . normed in f32, in sums over `n_parts` ranges of the columns;
// then the sums' sum, softmax, top-k and the gate of a shared expert, a row a warp.
//
// normed f32 [n_rows, hidden]; router [n_experts, hidden]; sums f32 [n_parts, n_rows, n_experts], of which the choice leaves the
// logits in part 0; ids, weights [n_rows, top_k] and gates [n_rows] as choose.cuh says. A block of the product owns 64 rows, 128
// experts and a range of columns, a warp 8 of the rows, a lane 4 of the experts. Bytes: tiles of both from L2. Bound by f32
// arithmetic.
#include "choose.cuh"

constexpr int TILE_ROWS = 64;
constexpr int TILE_EXPERTS = 128;
constexpr int DEPTH = 16;
constexpr int WARP_ROWS = 8;

extern "C" __global__ void __launch_bounds__(256)
    route_tile(RouteParams p, float* sums, const float* normed, const void* router, u32 router_format) {
  __shared__ __align__(16) float xs[2][DEPTH][TILE_ROWS + 4];
  __shared__ __align__(16) float ws[2][DEPTH][TILE_EXPERTS + 4];
  const u32 first_row = blockIdx.x * TILE_ROWS, first_expert = blockIdx.y * TILE_EXPERTS;
  const u32 n_steps = (p.hidden + DEPTH - 1) / DEPTH, share = (n_steps + gridDim.z - 1) / gridDim.z;
  const u32 begin = blockIdx.z * share, end = min(begin + share, n_steps);
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // A thread brings four columns of a row, and of two experts, in registers one step ahead of their use.
  const u32 row = threadIdx.x / 4, part = threadIdx.x % 4 * 4;
  const float* x = normed + (i64)min(first_row + row, p.n_rows - 1) * p.hidden;
  const i64 w = (i64)min(first_expert + row, p.n_experts - 1) * p.hidden;
  const i64 other_w = (i64)min(first_expert + row + TILE_EXPERTS / 2, p.n_experts - 1) * p.hidden;
  float next[3][4];
  const auto load = [&](u32 step) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 column = step * DEPTH + part + j;
      const bool live = column < p.hidden;
      next[0][j] = live ? x[column] : 0.0f;
      next[1][j] = live ? element(router, router_format, w + column) : 0.0f;
      next[2][j] = live ? element(router, router_format, other_w + column) : 0.0f;
    }
  };

  float acc[WARP_ROWS][4] = {};
  if (begin < end) load(begin);
  for (u32 step = begin; step < end; step++) {
    const u32 stage = step % 2;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      xs[stage][part + j][row] = next[0][j];
      ws[stage][part + j][row] = next[1][j];
      ws[stage][part + j][row + TILE_EXPERTS / 2] = next[2][j];
    }
    __syncthreads();
    if (step + 1 < end) load(step + 1);
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
      const float4 low = *(const float4*)&xs[stage][k][warp * WARP_ROWS];
      const float4 high = *(const float4*)&xs[stage][k][warp * WARP_ROWS + 4];
      const float4 b = *(const float4*)&ws[stage][k][lane * 4];
      const float as[WARP_ROWS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      const float bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < WARP_ROWS; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) acc[i][j] += as[i] * bs[j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < WARP_ROWS; i++) {
    const u32 n = first_row + warp * WARP_ROWS + i;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 expert = first_expert + lane * 4 + j;
      if (n < p.n_rows && expert < p.n_experts) sums[((i64)blockIdx.z * p.n_rows + n) * p.n_experts + expert] = acc[i][j];
    }
  }
}

extern "C" __global__ void __launch_bounds__(128)
    route_choose(RouteParams p, int* ids, float* weights, float* sums, u32 n_parts, const int* sequences, float* gates,
                 const void* shared, u32 shared_format, const float* normed) {
  const u32 n = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (n >= p.n_rows) return;
  float* logits = sums + (i64)n * p.n_experts;
  for (u32 expert = lane; expert < p.n_experts; expert += 32) {
    float sum = logits[expert];
    for (u32 part = 1; part < n_parts; part++) sum += logits[(i64)part * p.n_rows * p.n_experts + expert];
    logits[expert] = sum;
  }
  __syncwarp();
  if (shared != nullptr) {
    float sum = 0.0f;
    for (u32 i = lane; i < p.hidden; i += 32) {
      sum += element(shared, shared_format, i) * normed[(i64)n * p.hidden + i];
    }
    sum = warp_sum(sum);
    if (lane == 0) gates[n] = sigmoid(sum);
  }
  choose(p, logits, sequences[n] >= 0, ids + (i64)n * p.top_k, weights + (i64)n * p.top_k);
}
