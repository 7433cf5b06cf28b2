// Which routes a block of decode takes care of.
#pragma once
#include "expert_mlp_place.cuh"

// Most rows of a decode step.
constexpr int MAX_ROWS = 16;

// The routes of the expert of `route`, into `list`: their number, or 0 where an earlier route takes care of them. By a warp.
__device__ __forceinline__ u32 routes_of(const ExpertMlpParams& p, const int* ids, int id, u32 route, u32* list) {
  const u32 lane = threadIdx.x % 32, n_routes = p.n_rows * p.top_k;
  u32 count = 0;
  for (u32 start = 0; start < n_routes; start += 32) {
    const u32 other = start + lane;
    const bool same = other < n_routes && ids[other] == id;
    const u32 mask = __ballot_sync(FULL_WARP, same);
    if (__any_sync(FULL_WARP, same && other < route)) return 0;
    const u32 place = count + __popc(mask & ((1u << lane) - 1));
    if (same && place < MAX_ROWS) list[place] = other;
    count += __popc(mask);
  }
  __syncwarp();
  return min(count, (u32)MAX_ROWS);
}
