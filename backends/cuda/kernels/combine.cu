// x[n, :] += sum over k of parts[n, k, :], in the order of k, without routes of id -1; then gates[n] * rows[n, :] of a
// shared expert, where there is one.
//
// x f32 [n_rows, hidden]; parts f32 [n_rows, top_k, hidden]; ids i32 [n_rows, top_k]; rows f32 [n_rows, hidden]; gates
// f32 [n_rows]. A thread owns one column of one row and adds in order, so that the sum does not depend on the launch.
// Bytes: (2 + top_k, and 1 for a shared expert) * hidden * 4 a row. Bound by bytes in prefill, by latency in decode.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
    combine(CombineParams p, float* x, const float* parts, const int* ids, const float* rows, const float* gates) {
  start_next_kernel();
  begin_kernel();
  const u32 column = blockIdx.x * 128 + threadIdx.x;
  const u32 row = blockIdx.y;
  if (column >= p.hidden) return;
  float sum = x[(i64)row * p.hidden + column];
#pragma unroll 8
  for (u32 k = 0; k < p.top_k; k++) {
    const i64 route = (i64)row * p.top_k + k;
    if (ids[route] >= 0) sum += parts[route * p.hidden + column];
  }
  if (rows != nullptr) sum += gates[row] * rows[(i64)row * p.hidden + column];
  x[(i64)row * p.hidden + column] = sum;
}
