// The routed experts for at most 16 rows where their weights have scales: decode, in two kernels with `inner` between them.
//
// What goes in and out is that of expert_mlp_gemv, hidden and intermediate multiples of 32 (16 with 8-bit codes). Blocks in y
// stand for routes: a block whose route is not the first of its expert has nothing to do, the first one multiplies all rows of
// that expert, N at a time. A block owns 16 rows of gate and as many of up, or 32 of down. Bytes: each distinct expert once,
// further turns from L2. Bound by the instructions that decode; by the link where an expert is read in place.
#include "dot_scaled.cuh"
#include "expert_mlp_routes.cuh"

#define EXPERT_ARGUMENTS                                                                               \
  ExpertMlpParams p, ExpertPlace place, const int *ids, const int *table, const u64 *chunks

constexpr int WARPS = 4;

template <class W, int N>
__device__ __forceinline__ void gate_up(EXPERT_ARGUMENTS, float* inner, const float* x) {
  typedef DotScaled<W, N, 2, WARPS> Dot;
  __shared__ typename Dot::Shared shared;
  __shared__ u32 lists[WARPS][MAX_ROWS];
  u32* list = lists[threadIdx.x / 32];
  const int id = ids[blockIdx.y], slot = slot_of(p, place, table, id);
  if (slot < 0) return;
  const u32 n_routes = p.n_rows == 1 ? only_route(blockIdx.y, list) : routes_of(p, ids, id, blockIdx.y, list);
  if (n_routes == 0) return;
  const u8* record = record_of(place, chunks, slot);
  const Stored gate = matrix_of(place, record, place.gate), up = matrix_of(place, record, place.up);
  const u32 first = blockIdx.x * 16;
  for (u32 start = 0; start < n_routes; start += N) {
    const u32* own = list + start;
    const u32 n_live = min(n_routes - start, (u32)N);
    Dot::template dot<false>(
        shared,
        [&](u32 r) { return scaled_row<W>(r < 16 ? gate : up, min(first + r % 16, p.intermediate - 1), p.hidden); },
        [&](u32 n) { return x + (i64)(own[n] / p.top_k) * p.hidden; }, n_live, nullptr, 0, p.hidden);
    for (u32 i = threadIdx.x; i < 16 * n_live; i += WARPS * 32) {
      const u32 n = i / 16, r = i % 16, column = first + r;
      if (column >= p.intermediate) continue;
      const float v = Dot::sum(shared, r, n) * gate.global(column);
      const float v_up = Dot::sum(shared, 16 + r, n) * up.global(column);
      inner[(i64)own[n] * p.intermediate + column] = silu(v) * v_up;
    }
    __syncthreads();
  }
}

template <class W, int N>
__device__ __forceinline__ void down(EXPERT_ARGUMENTS, float* parts, const float* inner, const float* weights) {
  typedef DotScaled<W, N, 2, WARPS> Dot;
  __shared__ typename Dot::Shared shared;
  __shared__ u32 lists[WARPS][MAX_ROWS];
  u32* list = lists[threadIdx.x / 32];
  const int id = ids[blockIdx.y], slot = slot_of(p, place, table, id);
  if (slot < 0) return;
  const u32 n_routes = p.n_rows == 1 ? only_route(blockIdx.y, list) : routes_of(p, ids, id, blockIdx.y, list);
  if (n_routes == 0) return;
  const u8* record = record_of(place, chunks, slot);
  const Stored matrix = matrix_of(place, record, place.down);
  const u32 first = blockIdx.x * 32;
  for (u32 start = 0; start < n_routes; start += N) {
    const u32* own = list + start;
    const u32 n_live = min(n_routes - start, (u32)N);
    Dot::template dot<false>(
        shared, [&](u32 r) { return scaled_row<W>(matrix, min(first + r, p.hidden - 1), p.intermediate); },
        [&](u32 n) { return inner + (i64)own[n] * p.intermediate; }, n_live, nullptr, 0, p.intermediate);
    for (u32 i = threadIdx.x; i < 32 * n_live; i += WARPS * 32) {
      const u32 n = i / 32, r = i % 32, column = first + r;
      if (column >= p.hidden) continue;
      parts[(i64)own[n] * p.hidden + column] = weights[own[n]] * Dot::sum(shared, r, n) * matrix.global(column);
    }
    __syncthreads();
  }
}

#define EXPERT_GEMV_SCALED(name, W, N)                                                                      \
  extern "C" __global__ void __launch_bounds__(128, N > 2 ? 3 : W::LOADS == 1 ? 5 : 4)                      \
      expert_gate_up_##name##_n##N(EXPERT_ARGUMENTS, float* inner, const float* x) {                        \
    gate_up<W, N>(p, place, ids, table, chunks, inner, x);                                                  \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(128, N > 2 ? 3 : W::LOADS == 1 ? 5 : 4)                      \
      expert_down_##name##_n##N(EXPERT_ARGUMENTS, float* parts, const float* inner, const float* weights) { \
    down<W, N>(p, place, ids, table, chunks, parts, inner, weights);                                        \
  }

EXPERT_GEMV_SCALED(fp8, Fp8, 2)
EXPERT_GEMV_SCALED(fp8, Fp8, 8)
EXPERT_GEMV_SCALED(nvfp4, Nvfp4, 2)
EXPERT_GEMV_SCALED(nvfp4, Nvfp4, 8)
EXPERT_GEMV_SCALED(mxfp4, Mxfp4, 2)
EXPERT_GEMV_SCALED(mxfp4, Mxfp4, 8)
