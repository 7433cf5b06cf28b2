// What benches hold other kernels against: one that does nothing, and products on tensor cores out of registers.
//
// mma_rate: each warp of 256 threads multiplies 8 x n_turns tiles of 16 x 8 x 16 in bf16, sums of their own, so that no product
// waits for another; it writes only if a sum is `never`. Bytes: none. Bound by the tensor cores.
#include "common.cuh"

extern "C" __global__ void empty() { begin_kernel(); }

extern "C" __global__ void __launch_bounds__(256) mma_rate(float* out, u32 n_turns, float never) {
  const u32 a[4] = {threadIdx.x, threadIdx.x + 1, threadIdx.x + 2, threadIdx.x + 3};
  float sums[8][4] = {};
  for (u32 turn = 0; turn < n_turns; turn++) {
#pragma unroll
    for (int i = 0; i < 8; i++) mma_bf16(sums[i], a, turn, threadIdx.x);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
  if (sum == never) *out = sum;
}
