// out[t, c] = silu(sum over i of weight[c, i] * x[t - (kernel - 1) + i, c]); rows before a span's first come from its
// state, which ends as the last kernel - 1 rows of x.
//
// x f32 [n_rows, x_width]; out f32 [n_rows, channels]; state f32 [n_slots, kernel - 1, channels]; weight [channels,
// kernel]; sequences i32 [n_rows], the span of a row or -1. A thread owns one channel of `tile` rows and keeps the last
// inputs in registers; a kernel narrower than MAX_TAPS has zeros in front. Who has the first row of a span reads the
// channel's state and writes the new one; the rows behind it that look at the state too are its own in whatever tile
// they are. Bytes: x (tile + kernel - 1) / tile times, out once. Bound by memory bandwidth in prefill, by latency in
// decode.
#include "common.cuh"

constexpr int MAX_TAPS = 8;

extern "C" __global__ void __launch_bounds__(128)
    short_conv(ShortConvParams p, float* out, float* state, const float* x, const void* weight, const int* sequences,
               const Span* spans, u32 weight_format, u32 tile) {
  begin_kernel();
  const u32 c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= p.channels) return;
  const int begin = blockIdx.y * tile, end = min(begin + tile, p.n_rows), n_before = p.kernel - 1;
  const auto input = [&](int row) { return x[(i64)row * p.x_width + c]; };
  float taps[MAX_TAPS], window[MAX_TAPS];
#pragma unroll
  for (int i = 0; i < MAX_TAPS; i++) {
    const int tap = i - (MAX_TAPS - 1) + n_before;
    taps[i] = tap < 0 ? 0.0f : element(weight, weight_format, (i64)c * p.kernel + tap);
  }
  for (int row = begin; row < end;) {
    const int sequence = sequences[row];
    if (sequence < 0) {
      row++;
      continue;
    }
    const Span span = spans[sequence];
    const int sees_state = span.first + n_before;
    const bool is_owner = span.first >= begin;
    int next = is_owner ? span.first : max(row, sees_state);
    const int stop = min(span.end, is_owner ? max(end, sees_state) : end);
    row = max(row + 1, span.end);
    if (next >= stop) continue;

    // Rows in front of the span are the state's, the last one just before it.
    float* kept = state + ((i64)span.slot + 1) * n_before * p.channels + c;
    const auto past = [&](int row) {
      if (row >= span.first) return input(row);
      return span.resumes == 1 ? kept[(i64)(row - span.first) * p.channels] : 0.0f;
    };
#pragma unroll
    for (int i = 1; i < MAX_TAPS; i++) {
      const int before = MAX_TAPS - i;
      window[i] = before <= n_before ? past(next - before) : 0.0f;
    }
    if (is_owner) {
      // From the oldest on, so that each is read in front of what overwrites it.
#pragma unroll 1
      for (int before = n_before; before > 0; before--) kept[-(i64)before * p.channels] = past(span.end - before);
    }
#pragma unroll 4
    for (; next < stop; next++) {
#pragma unroll
      for (int i = 0; i < MAX_TAPS - 1; i++) window[i] = window[i + 1];
      window[MAX_TAPS - 1] = input(next);
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < MAX_TAPS; i++) sum += taps[i] * window[i];
      out[(i64)next * p.channels + c] = silu(sum);
    }
  }
}
