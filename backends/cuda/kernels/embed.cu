// out[n, :] = table[ids[n], :]
//
// ids i32 [n_rows]; table [vocab, hidden]; out f32 [n_rows, hidden]. A block copies 1,024 columns of one row.
// Bytes: a row of the table and of out for each id. Bound by launch latency.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    embed(EmbedParams p, float* out, const int* ids, const void* table, u32 format) {
  begin_kernel();
  const u32 row = blockIdx.y;
  const u32 id = (u32)ids[row];
  if (id >= p.vocab) return;
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    const u32 column = blockIdx.x * 1024 + i * 256 + threadIdx.x;
    if (column < p.hidden) out[(i64)row * p.hidden + column] = element(table, format, (i64)id * p.hidden + column);
  }
}
