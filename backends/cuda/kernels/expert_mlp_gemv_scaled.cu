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

// to[route, :] = silu(gate . from) * (up . from) of `intermediate` columns, from row route / top_k of `from`; or the route's weight
// times down . from[route, :].
template <class W, int N, int WARPS, bool GATED>
__device__ __forceinline__ void product(EXPERT_ARGUMENTS, float* to, const float* from, const float* weights) {
  typedef DotScaled<W, N, 2, WARPS> Dot;
  __shared__ typename Dot::Shared shared;
  __shared__ u32 lists[WARPS][MAX_ROWS];
  constexpr u32 OWN = GATED ? Dot::ROWS / 2 : Dot::ROWS;
  const u32 n_results = GATED ? p.intermediate : p.hidden, n_columns = GATED ? p.hidden : p.intermediate;
  if (GATED) begin_kernel();
  const u32 first = blockIdx.x * OWN, route = blockIdx.y;
  u32* list = lists[threadIdx.x / 32];
  const int id = ids[route], slot = slot_of(p, place, table, id);
  const u8* record = slot < 0 ? nullptr : record_of(place, chunks, slot);
  // What down finds here was there for gate and up.
  if (!GATED) begin_kernel();
  if (slot < 0) return;
  const u32 n_routes = p.n_rows == 1 ? only_route(route, list) : routes_of(p, ids, id, route, list);
  if (n_routes == 0) return;
  const Stored matrix = matrix_of(place, record, GATED ? place.gate : place.down);
  const Stored up = matrix_of(place, record, place.up);
  for (u32 start = 0; start < n_routes; start += N) {
    const u32* own = list + start;
    const u32 n_live = min(n_routes - start, (u32)N);
    Dot::template dot<false>(
        shared,
        [&](u32 r) { return scaled_row<W>(r < OWN ? matrix : up, min(first + r % OWN, n_results - 1), n_columns); },
        [&](u32 n) { return from + (i64)(GATED ? own[n] / p.top_k : own[n]) * n_columns; }, n_live, nullptr, 0, n_columns);
    for (u32 i = threadIdx.x; i < OWN * n_live; i += WARPS * 32) {
      const u32 n = i / OWN, r = i % OWN, column = first + r;
      if (column >= n_results) continue;
      const float v = Dot::sum(shared, r, n) * matrix.global(column);
      float* place_of = to + (i64)own[n] * n_results + column;
      if (GATED) {
        *place_of = silu(v) * (Dot::sum(shared, OWN + r, n) * up.global(column));
      } else {
        *place_of = weights[own[n]] * v;
      }
    }
    __syncthreads();
  }
}

#define EXPERT_GEMV_SCALED(name, W, N, WARPS, BLOCKS)                                                       \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                          \
      expert_gate_up_##name##_n##N(EXPERT_ARGUMENTS, float* inner, const float* x) {                        \
    product<W, N, WARPS, true>(p, place, ids, table, chunks, inner, x, nullptr);                            \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                          \
      expert_down_##name##_n##N(EXPERT_ARGUMENTS, float* parts, const float* inner, const float* weights) { \
    product<W, N, WARPS, false>(p, place, ids, table, chunks, parts, inner, weights);                       \
  }

EXPERT_GEMV_SCALED(fp8, Fp8, 1, 4, 4)
EXPERT_GEMV_SCALED(fp8, Fp8, 2, 2, 8)
EXPERT_GEMV_SCALED(fp8, Fp8, 8, 4, 3)
EXPERT_GEMV_SCALED(nvfp4, Nvfp4, 1, 4, 5)
EXPERT_GEMV_SCALED(nvfp4, Nvfp4, 2, 2, 10)
EXPERT_GEMV_SCALED(nvfp4, Nvfp4, 8, 4, 3)
EXPERT_GEMV_SCALED(mxfp4, Mxfp4, 1, 4, 5)
EXPERT_GEMV_SCALED(mxfp4, Mxfp4, 2, 2, 10)
EXPERT_GEMV_SCALED(mxfp4, Mxfp4, 8, 4, 3)
