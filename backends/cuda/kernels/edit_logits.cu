// l = logits[row, id]; logits[row, id] = (l > 0 ? l / repetition : l * repetition) - subtract, for each edit in front of
// the first with row -1.
//
// edits [capacity] of (i32 row, u32 id, f32 repetition, f32 subtract); logits f32 [n_rows, vocab]. One block walks the
// list, 1,024 edits at a time, and stops at its end. Bytes: 24 an edit. Bound by latency.
#include "common.cuh"

struct LogitEdit {
  int row;
  u32 id;
  float repetition, subtract;
};

extern "C" __global__ void __launch_bounds__(1024)
    edit_logits(EditLogitsParams p, float* logits, const LogitEdit* edits) {
  begin_kernel();
  __shared__ u32 end;
  if (threadIdx.x == 0) end = p.capacity;
  __syncthreads();
  for (u32 start = 0; start < p.capacity; start += 1024) {
    const u32 i = start + threadIdx.x;
    LogitEdit edit = {-1, 0, 1.0f, 0.0f};
    if (i < p.capacity) edit = edits[i];
    if (edit.row < 0) atomicMin(&end, i);
    __syncthreads();
    if (i < end && (u32)edit.row < p.n_rows && edit.id < p.vocab) {
      float* logit = logits + (i64)edit.row * p.vocab + edit.id;
      const float scaled = *logit > 0.0f ? *logit / edit.repetition : *logit * edit.repetition;
      *logit = scaled - edit.subtract;
    }
    if (end <= start + 1023) return;
    __syncthreads();
  }
}
