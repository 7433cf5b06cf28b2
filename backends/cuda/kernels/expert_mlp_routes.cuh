// Which routes a block of decode takes care of.
#pragma once
#include "expert_mlp_place.cuh"

// Most rows of a decode step.
constexpr int MAX_ROWS = 16;

// The one route of an expert where there is one row.
__device__ __forceinline__ u32 only_route(u32 route, u32* list) {
  if (threadIdx.x % 32 == 0) list[0] = route;
  __syncwarp();
  return 1;
}

// The routes of the expert of `route`, into `list`: their number, or 0 where an earlier route takes care of them. By a warp.
__device__ __forceinline__ u32 routes_of(const ExpertMlpParams& p, const int* ids, int id, u32 route, u32* list) {
  const u32 lane = threadIdx.x % 32, n_routes = p.n_rows * p.top_k;
  u32 count = 0;
  for (u32 first = 0; first < n_routes; first += 128) {
    // Loads travel together.
    bool same[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 other = first + i * 32 + lane;
      same[i] = other < n_routes && ids[other] == id;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 other = first + i * 32 + lane;
      const u32 mask = __ballot_sync(FULL_WARP, same[i]);
      if (__any_sync(FULL_WARP, same[i] && other < route)) return 0;
      const u32 place = count + __popc(mask & ((1u << lane) - 1));
      if (same[i] && place < MAX_ROWS) list[place] = other;
      count += __popc(mask);
    }
  }
  __syncwarp();
  return min(count, (u32)MAX_ROWS);
}
