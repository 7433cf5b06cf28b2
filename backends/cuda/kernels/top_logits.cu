// ids, values: the k largest logits of a row, by descending logit and then ascending id; log_sum_exp: the log of the sum of
// exp(logit * inverse_temperature) over the row.
//
// logits f32 [n_rows, vocab]; ids i32, values f32 [n_rows, k], k at most 256; log_sum_exp f32 [n_rows]. A logit and its id
// make one key of 64 bits, so all keys differ and their order is the order asked for. A block of 1,024 threads finds the k
// largest of 8,192 keys by radix select, digits of 8 bits from the top, and leaves them in scratch with its part of the
// sum; the last block of a row does the same with what all of them left, and sorts. At most 64 blocks a row; counters are
// zero before and after. Bytes: the logits once. Bound by latency.
#include "common.cuh"

constexpr int THREADS = 1024;
constexpr int KEYS = 8;
constexpr int SEGMENT = THREADS * KEYS;
constexpr int MAX_K = 256;
constexpr int MAX_SEGMENTS = 64;
constexpr int MERGED_KEYS = MAX_SEGMENTS * MAX_K / THREADS;

__device__ __forceinline__ u64 key_of(float logit, u32 id) {
  const u32 bits = __float_as_uint(logit);
  const u32 ascending = bits >> 31 == 1 ? ~bits : bits | 0x80000000u;
  return (u64)ascending << 32 | ~id;
}

__device__ __forceinline__ float logit_of(u64 key) {
  const u32 ascending = (u32)(key >> 32);
  return bits_to_f32(ascending >> 31 == 1 ? ascending & 0x7fffffffu : ~ascending);
}

struct Shared {
  u32 histogram[256];
  u32 digit, wanted, complete;
  u32 n_chosen;
  u64 chosen[MAX_K];
  float partial[32];
};

// Moves the k largest of the block's keys (N a thread; all different, 0 for none) to s.chosen, in any order; fewer where
// there are fewer.
template <int N>
__device__ __forceinline__ void select_top(const u64 (&keys)[N], u32 k, Shared& s) {
  const u32 tid = threadIdx.x;
  u64 prefix = 0;  // digits of the k-th largest key so far
  u32 wanted = k;
  int shift = 64;
  if (tid == 0) s.n_chosen = 0;
  while (shift > 0) {
    shift -= 8;
    if (tid < 256) s.histogram[tid] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) {
      const bool alive = shift == 56 || keys[i] >> (shift + 8) == prefix;
      if (keys[i] != 0 && alive) atomicAdd(&s.histogram[keys[i] >> shift & 255], 1u);
    }
    __syncthreads();
    if (tid < 32) {
      // Lane l looks at eight digits, the largest first.
      u32 own = 0;
      for (u32 i = 0; i < 8; i++) own += s.histogram[255 - tid * 8 - i];
      u32 above = own;
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const u32 other = __shfl_up_sync(FULL_WARP, above, lanes);
        if (tid >= (u32)lanes) above += other;
      }
      const u32 total = __shfl_sync(FULL_WARP, above, 31);
      above -= own;
      if (total < wanted) {
        // Fewer keys than wanted: all of them.
        if (tid == 0) {
          s.digit = 0;
          s.wanted = 0;
          s.complete = 1;
        }
      } else if (above < wanted && wanted <= above + own) {
        u32 digit = 255 - tid * 8;
        while (above + s.histogram[digit] < wanted) above += s.histogram[digit--];
        s.digit = digit;
        s.wanted = wanted - above;
        s.complete = s.histogram[digit] == wanted - above;
      }
    }
    __syncthreads();
    prefix = prefix << 8 | s.digit;
    wanted = s.wanted;
    if (s.complete == 1) break;
  }
  const u64 threshold = prefix << shift;
#pragma unroll
  for (int i = 0; i < N; i++) {
    if (keys[i] != 0 && keys[i] >= threshold) s.chosen[atomicAdd(&s.n_chosen, 1u)] = keys[i];
  }
  __syncthreads();
}

__device__ __forceinline__ float block_max(float v, float* partial) {
  v = warp_max(v);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  v = warp_max(threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : NEG_INFINITY);
  __syncthreads();
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    top_logits(TopLogitsParams p, int* ids, float* values, float* log_sum_exp, const float* logits,
               const float* inverse_temperatures, u64* found, float2* sums, u32* counters) {
  begin_kernel();
  __shared__ Shared s;
  const u32 tid = threadIdx.x, row = blockIdx.y, segment = blockIdx.x, n_segments = gridDim.x;
  const float* from = logits + (i64)row * p.vocab;
  const float scale = inverse_temperatures[row];

  u64 keys[KEYS];
  float scaled[KEYS];
  float max = NEG_INFINITY;
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    const u32 id = segment * SEGMENT + i * THREADS + tid;
    const float logit = id < p.vocab ? from[id] : 0.0f;
    keys[i] = id < p.vocab ? key_of(logit, id) : 0;
    scaled[i] = id < p.vocab ? logit * scale : NEG_INFINITY;
    max = fmaxf(max, scaled[i]);
  }
  max = block_max(max, s.partial);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < KEYS; i++) sum += exp_below(scaled[i], max);
  sum = block_sum(sum, s.partial);
  select_top<KEYS>(keys, p.k, s);
  u64* own = found + ((i64)row * n_segments + segment) * MAX_K;
  if (tid < MAX_K) own[tid] = tid < s.n_chosen ? s.chosen[tid] : 0;
  if (tid == 0) sums[row * n_segments + segment] = make_float2(max, sum);
  if (!is_last_block(counters + row, n_segments)) return;

  u64 merged[MERGED_KEYS];
#pragma unroll
  for (int i = 0; i < MERGED_KEYS; i++) {
    const u32 place = i * THREADS + tid;
    merged[i] = place < n_segments * MAX_K ? found[(i64)row * n_segments * MAX_K + place] : 0;
  }
  const float2 part = tid < n_segments ? sums[row * n_segments + tid] : make_float2(NEG_INFINITY, 0.0f);
  max = block_max(part.x, s.partial);
  sum = block_sum(part.y * exp_below(part.x, max), s.partial);
  if (tid == 0) log_sum_exp[row] = max + logf(sum);

  select_top<MERGED_KEYS>(merged, p.k, s);
  if (tid < MAX_K && tid >= s.n_chosen) s.chosen[tid] = 0;
  __syncthreads();
  // Bitonic sort, the largest first.
  for (u32 size = 2; size <= MAX_K; size *= 2) {
    for (u32 stride = size / 2; stride > 0; stride /= 2) {
      const u32 other = tid ^ stride;
      if (tid < MAX_K && other > tid) {
        const u64 a = s.chosen[tid], b = s.chosen[other];
        const bool descending = (tid & size) == 0;
        if (descending == (a < b)) {
          s.chosen[tid] = b;
          s.chosen[other] = a;
        }
      }
      __syncthreads();
    }
  }
  if (tid < p.k) {
    ids[(i64)row * p.k + tid] = (int)~(u32)s.chosen[tid];
    values[(i64)row * p.k + tid] = logit_of(s.chosen[tid]);
  }
}
