// parts[n, k, :] = weights[n, k] * down . (silu(gate . x[n]) * (up . x[n])) with the matrices of expert ids[n, k], for at most
// 16 rows: decode, in two kernels with `inner` between them.
//
// x f32 [n_rows, hidden]; ids i32 and weights f32 [n_rows, top_k]; inner f32 [n_rows * top_k, intermediate], scratch; parts
// f32 [n_rows, top_k, hidden]; table i32 [n_experts], the slot of each expert. Blocks in y stand for routes: a warp whose
// route is not the first of its expert has nothing to do, the first one multiplies all rows of that expert, N at a time. Routes
// with id -1 and experts that are nowhere write nothing.
// Bytes: each distinct expert once, where it has more than N rows again from L2. Bound by memory bandwidth, or by the link where an expert is read in place.
#include "dot.cuh"
#include "expert_mlp_routes.cuh"

#define EXPERT_ARGUMENTS                                                                               \
  ExpertMlpParams p, ExpertPlace place, const int *ids, const int *table, const u64 *chunks

constexpr int WARPS = 4;
// Blocks of a pair of rows that a multiprocessor has room for; machine code of 10.0 on spills with one more.
#if __CUDA_ARCH__ >= 1000
constexpr int PAIR_BLOCKS = 5;
#else
constexpr int PAIR_BLOCKS = 6;
#endif

template <class W, int N, int U>
__device__ __forceinline__ void gate_up(EXPERT_ARGUMENTS, float* inner, const float* x) {
  __shared__ u32 lists[WARPS][MAX_ROWS];
  begin_kernel();
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, route = blockIdx.y;
  const u32 first = (blockIdx.x * WARPS + warp) * 2;
  if (first >= p.intermediate) return;
  const int id = ids[route], slot = slot_of(p, place, table, id);
  if (slot < 0) return;
  const u32 n_routes = N == 1 ? only_route(route, lists[warp]) : routes_of(p, ids, id, route, lists[warp]);
  if (n_routes == 0) return;
  const u8* record = record_of(place, chunks, slot);
  const void* w[4];
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const u32 row = min(first + r % 2, p.intermediate - 1);
    w[r] = (const typename W::Element*)(record + (r < 2 ? place.gate : place.up).codes) + (i64)row * p.hidden;
  }
#pragma unroll 1
  for (u32 start = 0; start < n_routes; start += N) {
    const u32* own = lists[warp] + start;
    const u32 n_live = min(n_routes - start, (u32)N);
    const float* from[N];
#pragma unroll
    for (int n = 0; n < N; n++) from[n] = x + (i64)(own[min((u32)n, n_live - 1)] / p.top_k) * p.hidden;
    float sums[4][N], squares[N];
    dot_rows<W, N, 4, U, false>(w, from, n_live, nullptr, 0, p.hidden, sums, squares);
    start_next_kernel();
    // Lane 2 n + r takes column r of row n.
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        gate = lane == (u32)(2 * n + r) ? sums[r][n] : gate;
        up = lane == (u32)(2 * n + r) ? sums[r + 2][n] : up;
      }
    }
    const u32 n = lane / 2, column = first + lane % 2;
    if (n < n_live && column < p.intermediate) inner[(i64)own[n] * p.intermediate + column] = silu(gate) * up;
    if (N == 1) break;
  }
}

template <class W, int N, int U>
__device__ __forceinline__ void down(EXPERT_ARGUMENTS, float* parts, const float* inner, const float* weights) {
  __shared__ u32 lists[WARPS][MAX_ROWS];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, route = blockIdx.y;
  const u32 first = (blockIdx.x * WARPS + warp) * 4;
  // All that gate and up have waited for is there.
  const int id = ids[route], slot = slot_of(p, place, table, id);
  const u8* record = slot < 0 ? nullptr : record_of(place, chunks, slot) + place.down.codes;
  begin_kernel();
  if (first >= p.hidden || slot < 0) return;
  const u32 n_routes = N == 1 ? only_route(route, lists[warp]) : routes_of(p, ids, id, route, lists[warp]);
  if (n_routes == 0) return;
  const void* w[4];
#pragma unroll
  for (int r = 0; r < 4; r++) {
    w[r] = (const typename W::Element*)record + (i64)min(first + r, p.hidden - 1) * p.intermediate;
  }
#pragma unroll 1
  for (u32 start = 0; start < n_routes; start += N) {
    const u32* own = lists[warp] + start;
    const u32 n_live = min(n_routes - start, (u32)N);
    const float* from[N];
#pragma unroll
    for (int n = 0; n < N; n++) from[n] = inner + (i64)own[min((u32)n, n_live - 1)] * p.intermediate;
    float sums[4][N], squares[N];
    dot_rows<W, N, 4, U, false>(w, from, n_live, nullptr, 0, p.intermediate, sums, squares);
    start_next_kernel();
    // Lane 4 n + r takes column r of row n, and of row n + 8.
    constexpr int PER_LANE = (N * 4 + 31) / 32;
    float mine[PER_LANE] = {};
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
      for (int r = 0; r < 4; r++) mine[n / 8] = lane == (u32)(n % 8 * 4 + r) ? sums[r][n] : mine[n / 8];
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const u32 n = i * 8 + lane / 4, column = first + lane % 4;
      if (n >= n_live || column >= p.hidden) continue;
      const u32 to = own[n];
      parts[(i64)to * p.hidden + column] = weights[to] * mine[i];
    }
    if (N == 1) break;
  }
}

#define EXPERT_GEMV(name, W, N, U_UP, U_DOWN, UP_BLOCKS)                                                    \
  extern "C" __global__ void __launch_bounds__(128, UP_BLOCKS)                                              \
      expert_gate_up_##name##_n##N(EXPERT_ARGUMENTS, float* inner, const float* x) {                        \
    gate_up<W, N, U_UP>(p, place, ids, table, chunks, inner, x);                                            \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(128)                                                         \
      expert_down_##name##_n##N(EXPERT_ARGUMENTS, float* parts, const float* inner, const float* weights) { \
    down<W, N, U_DOWN>(p, place, ids, table, chunks, parts, inner, weights);                                \
  }

EXPERT_GEMV(f32, F32, 1, 2, 3, 4)
EXPERT_GEMV(f32, F32, 16, 1, 1, 2)
EXPERT_GEMV(bf16, Bf16, 1, 4, 3, 4)
EXPERT_GEMV(bf16, Bf16, 2, 2, 3, PAIR_BLOCKS)
EXPERT_GEMV(bf16, Bf16, 16, 1, 1, 2)
EXPERT_GEMV(f16, F16, 1, 2, 3, 4)

// Rows of any format and width: a warp owns one column of one route.
extern "C" __global__ void __launch_bounds__(128) expert_gate_up_any(EXPERT_ARGUMENTS, float* inner, const float* x) {
  const u32 route = blockIdx.y, c = blockIdx.x * WARPS + threadIdx.x / 32;
  if (c >= p.intermediate) return;
  const int slot = slot_of(p, place, table, ids[route]);
  if (slot < 0) return;
  const u8* record = record_of(place, chunks, slot);
  const float* from = x + (i64)(route / p.top_k) * p.hidden;
  const float gate = dot_any(matrix_of(place, record, place.gate), place.format, c, from, p.hidden);
  const float up = dot_any(matrix_of(place, record, place.up), place.format, c, from, p.hidden);
  if (threadIdx.x % 32 == 0) inner[(i64)route * p.intermediate + c] = silu(gate) * up;
}

extern "C" __global__ void __launch_bounds__(128)
    expert_down_any(EXPERT_ARGUMENTS, float* parts, const float* inner, const float* weights) {
  const u32 route = blockIdx.y, c = blockIdx.x * WARPS + threadIdx.x / 32;
  if (c >= p.hidden) return;
  const int slot = slot_of(p, place, table, ids[route]);
  if (slot < 0) return;
  const Stored matrix = matrix_of(place, record_of(place, chunks, slot), place.down);
  const float v = dot_any(matrix, place.format, c, inner + (i64)route * p.intermediate, p.intermediate);
  if (threadIdx.x % 32 == 0) parts[(i64)route * p.hidden + c] = weights[route] * v;
}
