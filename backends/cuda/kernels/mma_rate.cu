// n_steps times sixteen independent m16n8k16 products a warp, everything in registers: the rate of mma.sync. For benches.
// Floating-point operations: warps * n_steps * 16 * 4,096.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) mma_rate(float* out, u32 n_steps, float never) {
  float sums[16][4] = {};
  u32 a[4], b[2];
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = pack_bf16((float)threadIdx.x, (float)i);
#pragma unroll
  for (int i = 0; i < 2; i++) b[i] = pack_bf16((float)i, (float)threadIdx.x);
  for (u32 step = 0; step < n_steps; step++) {
#pragma unroll
    for (int i = 0; i < 16; i++) mma_bf16(sums[i], a, b[0], b[1]);
  }
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; i++) total += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
  if (total == never) *out = total;
}
