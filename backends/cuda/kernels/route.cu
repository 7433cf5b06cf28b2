// normed[n, :] = x[n, :] / sqrt(mean(x[n, :]^2) + eps) * norm; logits = router . normed; softmax over all experts; the
// top_k largest in ascending order of expert. gates[n] = sigmoid(shared . normed[n]), where there is a shared expert.
// In f32.
//
// x, normed f32 [n_rows, hidden]; router [n_experts, hidden]; logits f32 [n_rows, n_experts], scratch; ids i32 and
// weights f32 [n_rows, top_k]. A warp multiplies one expert's row with all rows of x, a block writes its share
// of normed, and the last block to finish chooses, a warp a row; `counter` is zero before and after. Bytes: the router
// once, x from L2. Bound by latency.
#include "choose.cuh"
#include "dot.cuh"

#define ROUTE_ARGUMENTS                                                                                        \
  RouteParams p, int *ids, float *weights, float *normed, const float *x, const void *norm,                    \
      const void *router, const int *sequences, float *gates, const void *shared, float *logits, u32 *counter, \
      u32 norm_format

template <class W, int N, int U>
__device__ __forceinline__ void route(ROUTE_ARGUMENTS) {
  begin_kernel();
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
  const u32 expert = blockIdx.x * n_warps + warp;
  // The gate of a shared expert stands behind the experts.
  const bool is_gate = expert == p.n_experts && shared != nullptr;
  const void* row[1] = {(const typename W::Element*)router + (i64)min(expert, p.n_experts - 1) * p.hidden};
  if (is_gate) row[0] = shared;
  const float* from[N];
#pragma unroll
  for (int n = 0; n < N; n++) from[n] = x + (i64)min((u32)n, p.n_rows - 1) * p.hidden;
  float sums[1][N], squares[N];
  dot_rows<W, N, 1, U, true>(row, from, p.n_rows, norm, norm_format, p.hidden, sums, squares);
  start_next_kernel();

  // Lane n takes row n.
  __shared__ float scales[N];
  float sum = 0.0f, square = 0.0f;
#pragma unroll
  for (int n = 0; n < N; n++) {
    sum = lane == n ? sums[0][n] : sum;
    square = lane == n ? squares[n] : square;
  }
  const float scale = 1.0f / sqrtf(square / (float)p.hidden + p.eps);
  if (lane < p.n_rows && expert < p.n_experts) logits[lane * p.n_experts + expert] = sum * scale;
  if (lane < p.n_rows && is_gate) gates[lane] = sigmoid(sum * scale);
  if (warp == 0 && lane < N) scales[lane] = scale;
  __syncthreads();
  const u32 share = (p.hidden + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * share;
  for (u32 place = threadIdx.x; place < share * p.n_rows; place += blockDim.x) {
    const u32 n = place / share, i = begin + place % share;
    if (i < p.hidden) normed[n * p.hidden + i] = x[n * p.hidden + i] * scales[n] * element(norm, norm_format, i);
  }
  if (!is_last_block(counter, gridDim.x)) return;
  for (u32 n = warp; n < p.n_rows; n += n_warps) {
    choose(p, logits + n * p.n_experts, sequences[n] >= 0, ids + n * p.top_k, weights + n * p.top_k);
  }
}

#define ROUTE(name, W, N, U)                                                                                          \
  extern "C" __global__ void __launch_bounds__(128, 2) route_##name##_n##N(ROUTE_ARGUMENTS) {                         \
    route<W, N, U>(p, ids, weights, normed, x, norm, router, sequences, gates, shared, logits, counter, norm_format); \
  }

ROUTE(f32, F32, 1, 8)
ROUTE(f32, F32, 16, 1)
ROUTE(bf16, Bf16, 1, 8)
ROUTE(bf16, Bf16, 16, 1)
