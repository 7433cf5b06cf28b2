// The host's part of a MoE layer inside one graph: bell_ring shows it what was routed and rings; bell_take waits for its
// answer, applies it and fetches records; bell_rows waits for the rows that it computed. Between ring and take run the
// experts that have a slot, between take and rows those to which `arrivals` gives a place.
//
// What host and device share lies in host memory, mapped: words of 64 bits with the number of the question in the upper half
// for reply, rows and bell; `asked_*` and `answer`, read behind such a word alone. answer u32: [n_experts] arrivals, then
// (expert, slot) of each record to fetch, then (entry, slot) of each change of the slot table.
// A layer whose routes all hit rings and waits for nothing. Each wait ends with the host's word, with its abort word, or after
// a second; then the step has failed, and nothing more is asked or awaited before the host clears `failed`. One block alone
// looks at the host's words and passes them on through memory of the device: looks of several blocks go one after the other,
// each for more than a microsecond.
// Bound by the latency of the link; bell_take by its bandwidth.
#include "expert_mlp_place.cuh"

// On the device, of all layers in turn.
struct BellState {
  // Number of the last question; whether the step failed; whether an answer is awaited; whether rows are.
  u32 sequence, failed, asks, has_rows;
  u64 fetched_bytes, fetch_start, fetch_end;
  // The host's last word of each kind, as block 0 passed it on; without a count where the wait came to nothing.
  u64 passed[2];
};

// What the kernels of one layer share, by value.
struct Bell {
  // f32 [n_rows, hidden]; i32 and f32 [n_rows, top_k]; f32 [n_rows, top_k, hidden].
  const float* x;
  const int* ids;
  const float* weights;
  float* parts;
  // i32, all layers; records [n_experts] of the layer, mapped.
  int* table;
  const u8* bank;
  // Mapped, written by the host: words, answer, f32 [n_rows, top_k, hidden].
  u64* words;
  const u32* answer;
  const float* rows;
  // Mapped, written here: the bell; bytes and nanoseconds of the last fetch; copies of ids, weights, the layer's row of the
  // table, and x.
  u64* bell;
  u64* asked_link;
  int* asked_ids;
  float* asked_weights;
  int* asked_table;
  float* asked_rows;
  // On the device, of all layers in turn; a copy of `answer`, of which the front says for each expert: a slot, a place in the
  // bank, NOWHERE or ON_HOST.
  BellState* state;
  int* arrivals;
  u32 n_rows, top_k, hidden, n_experts, first_entry, padding;
};

// Indices into `words`; the last two are flags.
constexpr u32 REPLY = 0, ROWS = 1, ABORT = 2, FAILED = 8;
constexpr int NOWHERE = -1, ON_HOST = -2;
constexpr u64 LIMIT_NANOSECONDS = 1000000000;

// One thread waits for the host's word about the last question. False: the step failed.
__device__ __forceinline__ bool wait_for_host(const Bell& b, u32 word, u32& value) {
  const u32 sequence = b.state->sequence;
  const u64 start = nanoseconds();
  for (;;) {
    // Behind an acquire a load waits, so this one goes first: one trip over the link for both.
    const u64 abort = load_shared_with_host(b.words + ABORT);
    const u64 got = load_acquire_from_host(b.words + word);
    value = (u32)got;
    if ((u32)(got >> 32) == sequence) return true;
    if (abort != 0 || nanoseconds() - start > LIMIT_NANOSECONDS) break;
  }
  b.state->failed = 1;
  store_release_to_host(b.words + FAILED, 1);
  return false;
}

// One thread of block 0 passes a word on, behind everything that the block wrote in front of a barrier.
__device__ __forceinline__ void pass_on(const Bell& b, u32 word, u32 value) {
  store_release(b.state->passed + word, (u64)b.state->sequence << 32 | value);
}

// One thread of another block waits for it. Block 0 gives up after a second; so does this, a little later.
__device__ __forceinline__ u32 wait_for_block_0(const Bell& b, u32 word) {
  const u32 sequence = b.state->sequence;
  const u64 start = nanoseconds();
  for (;;) {
    const u64 got = load_acquire(b.state->passed + word);
    if ((u32)(got >> 32) == sequence) return (u32)got;
    if (nanoseconds() - start > 2 * LIMIT_NANOSECONDS) return 0;
  }
}

// to[i] = load(from + i) of n elements, four a thread under way: each trip over the link takes as long as many loads.
template <u32 THREADS, class T, class Load>
__device__ __forceinline__ void copy(T* to, const T* from, u32 n, Load load) {
  constexpr u32 LOADS = 4;
  for (u32 start = threadIdx.x; start < n; start += LOADS * THREADS) {
    T v[LOADS];
#pragma unroll
    for (u32 j = 0; j < LOADS; j++) {
      if (start + j * THREADS < n) v[j] = load(from + start + j * THREADS);
    }
#pragma unroll
    for (u32 j = 0; j < LOADS; j++) {
      if (start + j * THREADS < n) to[start + j * THREADS] = v[j];
    }
  }
}

// The same of n words that the host wrote; both ends have room up to a multiple of four, and start at one.
template <u32 THREADS>
__device__ __forceinline__ void copy_from_host(u32* to, const u32* from, u32 n) {
  copy<THREADS>((uint4*)to, (const uint4*)from, (n + 3) / 4, load_from_host);
}

// One block.
extern "C" __global__ void __launch_bounds__(512) bell_ring(Bell b) {
  BellState* state = b.state;
  const BellState before = *state;
  const u32 n_routes = b.n_rows * b.top_k, sequence = before.sequence + 1;
  const int* table = b.table + b.first_entry;
  if (before.failed != 0) {
    if (threadIdx.x == 0) {
      state->sequence = sequence;
      state->asks = 0;
    }
    return;
  }
  bool misses = false;
  for (u32 route = threadIdx.x; route < n_routes; route += 512) {
    const int id = b.ids[route];
    b.asked_ids[route] = id;
    b.asked_weights[route] = b.weights[route];
    misses |= id >= 0 && table[id] < 0;
  }
  for (u32 expert = threadIdx.x; expert < b.n_experts; expert += 512) b.asked_table[expert] = table[expert];
  const bool asks = __syncthreads_or(misses);
  if (asks) {
    copy<512>(b.asked_rows, b.x, b.n_rows * b.hidden, [](const float* p) { return *p; });
  }
  if (threadIdx.x == 0) {
    b.asked_link[0] = before.fetched_bytes;
    b.asked_link[1] = before.fetch_end - before.fetch_start;
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    state->sequence = sequence;
    state->asks = asks;
    state->fetched_bytes = 0;
    state->fetch_end = 0;
    store_release_to_host(b.bell, (u64)sequence << 32 | (asks ? 1 : 0));
  }
}

// Any number of blocks: the first waits and applies the answer, all fetch.
extern "C" __global__ void __launch_bounds__(512) bell_take(Bell b, ExpertPlace place, const u64* chunks) {
  __shared__ u32 counts;
  BellState* state = b.state;
  const bool asks = state->asks != 0;
  if (blockIdx.x == 0) {
    bool answered = false;
    if (threadIdx.x == 0 && asks) answered = wait_for_host(b, REPLY, counts);
    answered = __syncthreads_or(answered);
    if (answered) {
      const u32 n_listed = (counts & 0xfff) + (counts >> 12 & 0xfff);
      copy_from_host<512>((u32*)b.arrivals, b.answer, b.n_experts + 2 * n_listed);
    } else {
      for (u32 expert = threadIdx.x; expert < b.n_experts; expert += 512) b.arrivals[expert] = NOWHERE;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      if (!answered) counts = 0;
      const u32 n_fetched = counts & 0xfff, n_changes = counts >> 12 & 0xfff;
      const int* changes = b.arrivals + b.n_experts + 2 * n_fetched;
      // In order: an entry may change twice.
      for (u32 i = 0; i < n_changes; i++) b.table[changes[2 * i]] = changes[2 * i + 1];
      state->has_rows = counts >> 24;
      state->fetched_bytes = (u64)n_fetched * place.record_bytes;
      state->fetch_start = nanoseconds();
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && asks) pass_on(b, REPLY, counts);
  } else {
    if (!asks) return;
    if (threadIdx.x == 0) counts = wait_for_block_0(b, REPLY);
    __syncthreads();
  }
  const u32 n_fetched = counts & 0xfff;
  if (n_fetched == 0) return;
  const int* fetched = b.arrivals + b.n_experts;
  constexpr u32 LOADS = 8, PIECE = LOADS * 512;
  const u32 n_vectors = place.record_bytes / 16, n_pieces = (n_vectors + PIECE - 1) / PIECE;
  for (u32 piece = blockIdx.x; piece < n_fetched * n_pieces; piece += gridDim.x) {
    const int* what = fetched + 2 * (piece / n_pieces);
    const uint4* from = (const uint4*)(b.bank + (u64)what[0] * place.record_bytes);
    uint4* to = (uint4*)record_of(place, chunks, what[1]);
    const u32 first = piece % n_pieces * PIECE + threadIdx.x;
    uint4 v[LOADS];
#pragma unroll
    for (u32 j = 0; j < LOADS; j++) {
      if (first + j * 512 < n_vectors) v[j] = load_stream(from + first + j * 512);
    }
#pragma unroll
    for (u32 j = 0; j < LOADS; j++) {
      if (first + j * 512 < n_vectors) to[first + j * 512] = v[j];
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(&state->fetch_end, nanoseconds());
}

// Any number of blocks: the first waits, each takes every gridDim.x-th route.
extern "C" __global__ void __launch_bounds__(256) bell_rows(Bell b) {
  if (b.state->has_rows == 0) return;
  bool arrived = false;
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    u32 nothing;
    arrived = wait_for_host(b, ROWS, nothing);
    pass_on(b, ROWS, arrived);
  } else if (threadIdx.x == 0) {
    arrived = wait_for_block_0(b, ROWS) != 0;
  }
  if (!__syncthreads_or(arrived)) return;
  for (u32 route = blockIdx.x; route < b.n_rows * b.top_k; route += gridDim.x) {
    const int id = b.ids[route];
    if (id < 0 || b.arrivals[id] != ON_HOST) continue;
    const i64 first = (i64)route * b.hidden;
    u32* to = (u32*)b.parts + first;
    const u32* from = (const u32*)b.rows + first;
    if (b.hidden % 4 == 0 && (u64)to % 16 == 0) {
      copy_from_host<256>(to, from, b.hidden);
    } else {
      copy<256>(to, from, b.hidden, [](const u32* p) { return *(const volatile u32*)p; });
    }
  }
}
