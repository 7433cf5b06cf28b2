// The gated delta rule, row by row: S = exp(g) S; u = beta (v - S^T k); S += k u^T; o = S^T q; out = rms(o) * norm *
// silu(z), with q and k of unit length and q over sqrt(key_dim).
//
// qkv f32 [n_rows, qkv_width]; z and ba f32, rows of their own widths; out f32 [n_rows, n_value_heads, value_dim];
// state f32 [n_slots, n_value_heads, key_dim, value_dim]; constants f32: A_log, dt_bias, norm. A block owns one value
// head of one span.
#include "gated_delta.cuh"

constexpr int D = 128;
constexpr int WARPS = 16;
// Rows of the state that a warp owns.
constexpr int OWN = D / WARPS;

// Heads of 128 by 128 and spans of at most `max_rows`: decode. The state lies in registers, eight rows a warp and four
// columns a lane, all of it on its way at once; it is asked with k and q in one pass, since o = exp(g) S^T q + (k . q)
// u. Bytes: the state once in and once out. Bound by memory bandwidth for many sequences, by latency for one.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) gated_delta_rows(GATED_DELTA_ARGUMENTS, u32 max_rows) {
  __shared__ __align__(16) float partial[2][WARPS][D];
  __shared__ __align__(16) float correction[D];
  __shared__ float squares[D / 32];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x, column = threadIdx.x;
  const Span span = spans[blockIdx.y];
  const u32 n_rows = span_rows(span);
  if (n_rows == 0 || n_rows > max_rows) return;

  float4* own = (float4*)(state + (((i64)span.slot * p.n_value_heads + head) * D + warp * OWN) * D) + lane;
  float4 s[OWN];
#pragma unroll
  for (int j = 0; j < OWN; j++) s[j] = span.resumes == 1 ? own[j * (D / 4)] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  for (u32 row = span.first; row < (u32)span.end; row++) {
    const float* from = qkv + (i64)row * qkv_width(p);
    const float* query = from + query_column(p, head);
    const float* key = query + p.n_key_heads * D;
    const Rates rate = rates(p, ba, constants, row, head);
    float v = 0.0f, gate = 0.0f;
    if (column < D) {
      v = from[value_column(p, head) + column];
      gate = silu(z[(i64)row * p.z_width + p.z_start + head * D + column]) * constants[2 * p.n_value_heads + column];
    }
    const float4 q4 = ((const float4*)query)[lane], k4 = ((const float4*)key)[lane];
    const float q_scale = unit_scale(warp_sum(q4.x * q4.x + q4.y * q4.y + q4.z * q4.z + q4.w * q4.w)) * ONE_BY_SQRT_128;
    const float k_scale = unit_scale(warp_sum(k4.x * k4.x + k4.y * k4.y + k4.z * k4.z + k4.w * k4.w));
    const float qk = warp_sum(q4.x * k4.x + q4.y * k4.y + q4.z * k4.z + q4.w * k4.w);
    const float decay = expf(rate.log_decay);

    float4 known = make_float4(0.0f, 0.0f, 0.0f, 0.0f), asked = known;
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      const float k = key[warp * OWN + j], q = query[warp * OWN + j];
      known.x += k * s[j].x;
      known.y += k * s[j].y;
      known.z += k * s[j].z;
      known.w += k * s[j].w;
      asked.x += q * s[j].x;
      asked.y += q * s[j].y;
      asked.z += q * s[j].z;
      asked.w += q * s[j].w;
    }
    *(float4*)&partial[0][warp][lane * 4] = known;
    *(float4*)&partial[1][warp][lane * 4] = asked;
    __syncthreads();
    float o = 0.0f;
    if (column < D) {
      float known = 0.0f, asked = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        known += partial[0][w][column];
        asked += partial[1][w][column];
      }
      const float u = rate.beta * (v - decay * k_scale * known);
      o = q_scale * (decay * asked + qk * k_scale * u);
      correction[column] = u * k_scale;
      const float square = warp_sum(o * o);
      if (lane == 0) squares[warp] = square;
    }
    __syncthreads();
    const float4 u4 = *(const float4*)&correction[lane * 4];
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      const float k = key[warp * OWN + j];
      s[j].x = decay * s[j].x + k * u4.x;
      s[j].y = decay * s[j].y + k * u4.y;
      s[j].z = decay * s[j].z + k * u4.z;
      s[j].w = decay * s[j].w + k * u4.w;
    }
    if (column < D) {
      const float mean = (squares[0] + squares[1] + squares[2] + squares[3]) / D;
      out[((i64)row * p.n_value_heads + head) * D + column] = o * rsqrtf(mean + p.eps) * gate;
    }
  }
#pragma unroll
  for (int j = 0; j < OWN; j++) own[j * (D / 4)] = s[j];
}

#if __CUDA_ARCH__ >= 900
constexpr u32 SLICES = 4, SLICE = D / SLICES;
constexpr int SLICE_WARPS = 8;
// Rows of the state that a thread has a part of.
constexpr int SLICE_OWN = D / SLICE_WARPS / 4;

// The same where there are few heads: a cluster owns a head, a block of it 32 columns, a thread four of them in every fourth row of
// sixteen. Blocks meet once a row, for the squares of the norm. On a quarter of the multiprocessors the state comes and goes at the
// rate of their ports; this is four times as many.
extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(32 * SLICE_WARPS)
    gated_delta_slices(GATED_DELTA_ARGUMENTS) {
  __shared__ __align__(16) float partial[2][SLICE_WARPS][SLICE];
  __shared__ __align__(16) float correction[SLICE];
  // Of two rows in turn, so that one barrier a row is enough.
  __shared__ float squares[2][SLICES];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = cluster_rank(), head = blockIdx.x / SLICES;
  const u32 first_row = warp * 4 * SLICE_OWN + lane / 8, own_column = lane % 8 * 4, column = rank * SLICE + lane;
  const Span span = spans[blockIdx.y];
  if (span_rows(span) == 0) return;
  // Nothing may be written to a block that has not begun.
  cluster_arrive();

  float* own = state + (((i64)span.slot * p.n_value_heads + head) * D + first_row) * D + rank * SLICE + own_column;
  float4 s[SLICE_OWN];
#pragma unroll
  for (int j = 0; j < SLICE_OWN; j++) {
    s[j] = span.resumes == 1 ? *(const float4*)(own + j * 4 * D) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  cluster_wait();

  for (u32 row = span.first; row < (u32)span.end; row++) {
    const float* from = qkv + (i64)row * qkv_width(p);
    const float* query = from + query_column(p, head);
    const float* key = query + p.n_key_heads * D;
    const Rates rate = rates(p, ba, constants, row, head);
    float v = 0.0f, gate = 0.0f;
    if (warp == 0) {
      v = from[value_column(p, head) + column];
      gate = silu(z[(i64)row * p.z_width + p.z_start + head * D + column]) * constants[2 * p.n_value_heads + column];
    }
    float keys[SLICE_OWN], queries[SLICE_OWN];
#pragma unroll
    for (int j = 0; j < SLICE_OWN; j++) {
      keys[j] = key[first_row + j * 4];
      queries[j] = query[first_row + j * 4];
    }
    const float4 q4 = ((const float4*)query)[lane], k4 = ((const float4*)key)[lane];
    const float q_scale = unit_scale(warp_sum(q4.x * q4.x + q4.y * q4.y + q4.z * q4.z + q4.w * q4.w)) * ONE_BY_SQRT_128;
    const float k_scale = unit_scale(warp_sum(k4.x * k4.x + k4.y * k4.y + k4.z * k4.z + k4.w * k4.w));
    const float qk = warp_sum(q4.x * k4.x + q4.y * k4.y + q4.z * k4.z + q4.w * k4.w);
    const float decay = expf(rate.log_decay);

    float known[4] = {}, asked[4] = {};
#pragma unroll
    for (int j = 0; j < SLICE_OWN; j++) {
      const float elements[4] = {s[j].x, s[j].y, s[j].z, s[j].w};
#pragma unroll
      for (int c = 0; c < 4; c++) {
        known[c] += keys[j] * elements[c];
        asked[c] += queries[j] * elements[c];
      }
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
      for (int lanes = 8; lanes < 32; lanes *= 2) {
        known[c] += __shfl_xor_sync(FULL_WARP, known[c], lanes);
        asked[c] += __shfl_xor_sync(FULL_WARP, asked[c], lanes);
      }
    }
    if (lane < 8) {
      *(float4*)&partial[0][warp][own_column] = make_float4(known[0], known[1], known[2], known[3]);
      *(float4*)&partial[1][warp][own_column] = make_float4(asked[0], asked[1], asked[2], asked[3]);
    }
    __syncthreads();
    float o = 0.0f;
    const u32 turn = row % 2;
    if (warp == 0) {
      float known = 0.0f, asked = 0.0f;
#pragma unroll
      for (int w = 0; w < SLICE_WARPS; w++) {
        known += partial[0][w][lane];
        asked += partial[1][w][lane];
      }
      const float u = rate.beta * (v - decay * k_scale * known);
      o = q_scale * (decay * asked + qk * k_scale * u);
      correction[lane] = u * k_scale;
      const float square = warp_sum(o * o);
      if (lane < SLICES) store_in_cluster(&squares[turn][rank], lane, square);
    }
    cluster_arrive();
    __syncthreads();
    const float4 u4 = *(const float4*)&correction[own_column];
#pragma unroll
    for (int j = 0; j < SLICE_OWN; j++) {
      s[j].x = decay * s[j].x + keys[j] * u4.x;
      s[j].y = decay * s[j].y + keys[j] * u4.y;
      s[j].z = decay * s[j].z + keys[j] * u4.z;
      s[j].w = decay * s[j].w + keys[j] * u4.w;
    }
    if (row + 1 == (u32)span.end) {
#pragma unroll
      for (int j = 0; j < SLICE_OWN; j++) *(float4*)(own + j * 4 * D) = s[j];
    }
    cluster_wait();
    if (warp == 0) {
      const float* all = squares[turn];
      const float mean = (all[0] + all[1] + all[2] + all[3]) / D;
      out[((i64)row * p.n_value_heads + head) * D + column] = o * rsqrtf(mean + p.eps) * gate;
    }
  }
}
#endif

// Heads of any size and spans of any length; the state stays where it is, a thread owns columns of it. Dynamic shared
// memory: (2 * key_dim + value_dim) * 4 bytes. Bound by latency.
extern "C" __global__ void __launch_bounds__(128, 4) gated_delta_any(GATED_DELTA_ARGUMENTS) {
  DYNAMIC_SHARED(shared);
  __shared__ float partial[32];
  const u32 head = blockIdx.x, dk = p.key_dim, dv = p.value_dim;
  float* query = (float*)shared;
  float* key = query + dk;
  float* read = key + dk;
  const Span span = spans[blockIdx.y];
  float* own = state + ((i64)span.slot * p.n_value_heads + head) * dk * dv;
  for (int row = span.first; row < span.end; row++) {
    const float* from = qkv + (i64)row * qkv_width(p);
    float qq = 0.0f, kk = 0.0f;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < dk; i += blockDim.x) {
      query[i] = from[query_column(p, head) + i];
      key[i] = from[query_column(p, head) + p.n_key_heads * dk + i];
      qq += query[i] * query[i];
      kk += key[i] * key[i];
    }
    const float q_scale = unit_scale(block_sum(qq, partial)) * rsqrtf((float)dk);
    const float k_scale = unit_scale(block_sum(kk, partial));
    const Rates rate = rates(p, ba, constants, row, head);
    // What is left of a state that is not there yet.
    const float decay = row == span.first && span.resumes == 0 ? 0.0f : expf(rate.log_decay);
    float squares = 0.0f;
#pragma unroll 1
    for (u32 c = threadIdx.x; c < dv; c += blockDim.x) {
      const auto left = [&](u32 i) { return decay == 0.0f ? 0.0f : decay * own[(i64)i * dv + c]; };
      float known = 0.0f, o = 0.0f;
#pragma unroll 4
      for (u32 i = 0; i < dk; i++) known += left(i) * key[i];
      const float u = rate.beta * (from[value_column(p, head) + c] - known * k_scale) * k_scale;
#pragma unroll 4
      for (u32 i = 0; i < dk; i++) {
        const float s = left(i) + key[i] * u;
        own[(i64)i * dv + c] = s;
        o += s * query[i];
      }
      read[c] = o * q_scale;
      squares += read[c] * read[c];
    }
    const float scale = rsqrtf(__fdividef(block_sum(squares, partial), (float)dv) + p.eps);
#pragma unroll 1
    for (u32 c = threadIdx.x; c < dv; c += blockDim.x) {
      const float gate = silu(z[(i64)row * p.z_width + p.z_start + head * dv + c]);
      out[((i64)row * p.n_value_heads + head) * dv + c] = read[c] * scale * constants[2 * p.n_value_heads + c] * gate;
    }
  }
}
