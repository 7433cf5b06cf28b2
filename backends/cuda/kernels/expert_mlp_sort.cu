// Routes in the order of their expert, cut into tiles of tile_rows rows of one expert: the plan of a grouped product. The last
// tile of an expert has what is left, and may have up to more_rows more than the others.
//
// ids i32 [n_rows * top_k]; table i32 [n_experts], the slot of each expert; order i32 [n_rows * top_k], the routes expert by
// expert; tiles int4 [*]: (slot, first place in order, end, 0); n_tiles. Routes with id -1 and experts that are nowhere are
// left out. One block of 1,024 threads, at most 1,024 experts. The order of routes of one expert is not fixed; no result
// depends on it. Bytes: 8 a route. Bound by latency.
#include "expert_mlp_place.cuh"

// Sum over the threads in front of this one.
__device__ __forceinline__ u32 sum_before(u32 v, u32* partial) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 sum = v;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const u32 other = __shfl_up_sync(FULL_WARP, sum, lanes);
    if (lane >= (u32)lanes) sum += other;
  }
  if (lane == 31) partial[warp] = sum;
  __syncthreads();
  u32 warps_before = 0;
  for (u32 i = 0; i < warp; i++) warps_before += partial[i];
  __syncthreads();
  return warps_before + sum - v;
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    expert_sort(ExpertMlpParams p, ExpertPlace place, u32* n_tiles, int4* tiles, int* order, const int* ids,
                const int* table, u32 tile_rows, u32 more_rows) {
  __shared__ u32 counts[1024];
  __shared__ u32 partial[32];
  const u32 n_routes = p.n_rows * p.top_k, expert = threadIdx.x;
  counts[expert] = 0;
  __syncthreads();
  for (u32 route = threadIdx.x; route < n_routes; route += 1024) {
    const int id = ids[route];
    if (slot_of(p, place, table, id) >= 0) atomicAdd(&counts[id], 1u);
  }
  __syncthreads();
  const u32 count = counts[expert];
  const u32 first = sum_before(count, partial);
  const u32 in_tiles = count > more_rows ? count - more_rows : min(count, 1u);
  const u32 n_own = (in_tiles + tile_rows - 1) / tile_rows;
  const u32 first_tile = sum_before(n_own, partial);
  const int slot = n_own > 0 ? slot_of(p, place, table, (int)expert) : -1;
  for (u32 i = 0; i < n_own; i++) {
    const u32 begin = first + i * tile_rows;
    tiles[first_tile + i] = make_int4(slot, (int)begin, (int)(i + 1 == n_own ? first + count : begin + tile_rows), 0);
  }
  if (expert == 1023) *n_tiles = first_tile + n_own;
  counts[expert] = first;
  __syncthreads();
  for (u32 route = threadIdx.x; route < n_routes; route += 1024) {
    const int id = ids[route];
    if (slot_of(p, place, table, id) >= 0) order[atomicAdd(&counts[id], 1u)] = (int)route;
  }
}
