// Reads n_vectors * 16 bytes once and writes nothing unless their exclusive or is `never`: the memory bandwidth that a kernel
// can reach. For benches. Blocks walk the range side by side, eight loads a thread under way.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(512) read(u32* out, const uint4* from, u32 n_vectors, u32 never) {
  u32 seen = 0;
  const u64 stride = (u64)gridDim.x * 512;
  u64 i = (u64)blockIdx.x * 512 + threadIdx.x;
  for (; i + 7 * stride < n_vectors; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = load_stream(from + i + j * stride);
#pragma unroll
    for (int j = 0; j < 8; j++) seen ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < n_vectors; i += stride) {
    const uint4 v = load_stream(from + i);
    seen ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (seen == never) *out = seen;
}
