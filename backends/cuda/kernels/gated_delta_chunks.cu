// The gated delta rule for long spans, 32 rows at a time, on tensor cores: heads of 128 by 128. With G_i = g_1 + ... +
// g_i in a chunk and S in front of it:
//
//   A_ij = beta_i exp(G_i - G_j) (k_i . k_j) for j < i;   M = (I + A)^-1;   W = M diag(beta exp(G)) K;   U = M diag(beta) V
//   V' = U - W S;   O = diag(exp(G)) Q S + P V', P_ij = exp(G_i - G_j) (q_i . k_j) for j <= i
//   S = exp(G_32) S + sum over i of exp(G_32 - G_i) k_i V'_i^T
//
// What needs no state comes first, a block a chunk and head: a record of bf16 in scratch, W, diag(exp(G)) Q,
// diag(exp(G_32 - G)) K and U [32, 128] each and P [32, 32], and exp(G_32) in f32. Then a block walks the chunks of one
// head of one span. Chunk c of span s has the number span.first / 32 + s + c, which no two share, since spans follow
// each other; a pair of launches does the chunks of a range of numbers, and the state waits in its slot for the next.
// In a record part c of 16 bytes of row r lies at c ^ (r % 8), in P at c ^ (r / 2 % 4), so that eight rows read at once
// lie in different banks. Sums, A, M and S are f32.
#include "gated_delta.cuh"

constexpr int D = 128;
constexpr int CHUNK = 32;
// 16-bit elements of the parts of a record.
constexpr int WIDE = CHUNK * D, RECORD = 4 * WIDE + CHUNK * CHUNK;

// Element (row, column) of a matrix 128 wide, and of one 32 wide.
__device__ __forceinline__ u32 wide(u32 row, u32 column) {
  return row * D + ((column / 8 ^ row % 8) * 8) + column % 8;
}

__device__ __forceinline__ u32 narrow(u32 row, u32 column) {
  return row * CHUNK + ((column / 8 ^ row / 2 % 4) * 8) + column % 8;
}

// First number of a span's chunks.
__device__ __forceinline__ u32 first_chunk(const Span& span, u32 sequence) { return span.first / CHUNK + sequence; }

__device__ __forceinline__ u32 n_chunks(const Span& span) { return (span_rows(span) + CHUNK - 1) / CHUNK; }

// I + A of one chunk to its inverse, by forward substitution of two blocks of 16 rows and what is left of them below
// the first. lower[j][i] = A_ij; 128 threads.
__device__ __forceinline__ void invert(const float (&lower)[CHUNK][CHUNK + 4], float (&inverse)[CHUNK][CHUNK + 4]) {
  constexpr int HALF = CHUNK / 2;
  __shared__ float below[HALF][HALF + 1];
  if (threadIdx.x < 32) {
    // A lane has a column of a block.
    const u32 block = threadIdx.x / HALF * HALF, c = threadIdx.x % HALF;
    float m[HALF];
#pragma unroll
    for (int r = 0; r < HALF; r++) m[r] = r == (int)c ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < HALF - 1; i++) {
#pragma unroll
      for (int r = i + 1; r < HALF; r++) m[r] -= lower[block + i][block + r] * m[i];
    }
#pragma unroll
    for (int r = 0; r < HALF; r++) inverse[block + r][block + c] = m[r];
  }
  __syncthreads();
  // Eight lanes have a column.
  const u32 c = threadIdx.x / 8;
  for (u32 r = threadIdx.x % 8; r < HALF; r += 8) {
    float sum = 0.0f;
#pragma unroll 4
    for (u32 l = 0; l < HALF; l++) sum += lower[l][HALF + r] * inverse[l][c];
    below[c][r] = sum;
  }
  __syncwarp();
  for (u32 r = threadIdx.x % 8; r < HALF; r += 8) {
    float sum = 0.0f;
#pragma unroll 4
    for (u32 l = 0; l < HALF; l++) sum += inverse[HALF + r][HALF + l] * below[c][l];
    inverse[HALF + r][c] = -sum;
    inverse[c][HALF + r] = 0.0f;
  }
  __syncthreads();
}

// Bytes: q, k and v of the rows once in, k and q again for each value head of theirs, from L2; 34 KiB a chunk and head
// out. Bound by shared memory and latency.
extern "C" __global__ void __launch_bounds__(128)
    gated_delta_chunks(GATED_DELTA_ARGUMENTS, u16* records, float* decays, u32 first, u32 max_rows) {
  __shared__ __align__(128) u16 keys[WIDE], queries[WIDE], values[WIDE];
  // M times beta, and that times exp(G).
  __shared__ __align__(128) u16 scaled[2][CHUNK * CHUNK];
  __shared__ __align__(16) float lower[CHUNK][CHUNK + 4], inverse[CHUNK][CHUNK + 4];
  __shared__ float beta_of[CHUNK], sum_of[CHUNK];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, head = blockIdx.x;
  const u32 number = first + blockIdx.y;
  u32 begin = 0, n_rows = 0;
  for (u32 s = 0; s < p.n_sequences; s++) {
    const Span span = spans[s];
    const u32 place = number - first_chunk(span, s);
    if (span_rows(span) <= max_rows || place >= n_chunks(span)) continue;
    begin = span.first + place * CHUNK;
    n_rows = min((u32)CHUNK, span.end - begin);
  }
  if (n_rows == 0) return;
  u16* record = records + ((i64)blockIdx.y * p.n_value_heads + head) * RECORD;
  u16* w_out = record;
  u16* q_out = record + WIDE;
  u16* k_out = record + 2 * WIDE;
  u16* u_out = record + 3 * WIDE;
  u16* p_out = record + 4 * WIDE;

  // Lane i has row i; rows behind the last one neither forget nor correct.
  Rates rate = {0.0f, 0.0f};
  if (lane < n_rows) rate = rates(p, ba, constants, begin + lane, head);
  float sum = rate.log_decay;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const float before = __shfl_up_sync(FULL_WARP, sum, lanes);
    if (lane >= lanes) sum += before;
  }
  const float total = __shfl_sync(FULL_WARP, sum, 31);
  if (warp == 0) {
    beta_of[lane] = rate.beta;
    sum_of[lane] = sum;
    if (lane == 0) decays[blockIdx.y * p.n_value_heads + head] = __expf(total);
  }
#pragma unroll 2
  for (u32 i = 0; i < CHUNK / 4; i++) {
    const u32 r = warp * (CHUNK / 4) + i;
    float4 q = make_float4(0.0f, 0.0f, 0.0f, 0.0f), k = q, v = q;
    if (r < n_rows) {
      const float* from = qkv + (i64)(begin + r) * qkv_width(p);
      const float* query = from + query_column(p, head);
      q = ((const float4*)query)[lane];
      k = ((const float4*)(query + p.n_key_heads * D))[lane];
      v = ((const float4*)(from + value_column(p, head)))[lane];
    }
    const float q_scale = unit_scale(warp_sum(q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w)) * ONE_BY_SQRT_128;
    const float k_scale = unit_scale(warp_sum(k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w));
    const float own = __shfl_sync(FULL_WARP, sum, r);
    const u32 to = wide(r, lane * 4);
    const auto store = [&](u16* base, const float4& x, float scale) {
      *(uint2*)(base + to) = make_uint2(pack_bf16(x.x * scale, x.y * scale), pack_bf16(x.z * scale, x.w * scale));
    };
    store(queries, q, q_scale);
    store(keys, k, k_scale);
    store(values, v, 1.0f);
    store(q_out, q, q_scale * __expf(own));
    store(k_out, k, k_scale * __expf(total - own));
  }
  __syncthreads();

  // Warps 0 and 1: A; 2 and 3: P; sixteen rows each.
  const u32 m = warp % 2 * 16;
  {
    const u16* from = warp < 2 ? keys : queries;
    float products[CHUNK / 8][4] = {};
#pragma unroll 2
    for (int step = 0; step < D / 16; step++) {
      u32 a[4];
      load_matrices(a, from + wide(m + lane % 16, step * 16 + lane / 16 * 8));
#pragma unroll
      for (int n = 0; n < CHUNK / 8; n += 2) {
        u32 b[4];
        load_matrices(b, keys + wide(n * 8 + lane / 16 * 8 + lane % 8, step * 16 + lane / 8 % 2 * 8));
        mma_bf16(products[n], a, b[0], b[1]);
        mma_bf16(products[n + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 i = m + half * 8 + g, j = n * 8 + t * 2;
        const float left = j <= i ? __expf(sum_of[i] - sum_of[j]) * products[n][half * 2] : 0.0f;
        const float right = j + 1 <= i ? __expf(sum_of[i] - sum_of[j + 1]) * products[n][half * 2 + 1] : 0.0f;
        if (warp < 2) {
          lower[j][i] = j < i ? beta_of[i] * left : 0.0f;
          lower[j + 1][i] = j + 1 < i ? beta_of[i] * right : 0.0f;
        } else {
          *(u32*)(p_out + narrow(i, j)) = pack_bf16(left, right);
        }
      }
    }
  }
  __syncthreads();
  invert(lower, inverse);
  {
    const u32 i = threadIdx.x / 4, j = threadIdx.x % 4 * 8;
    u32 with_decay[4], without[4];
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      const u32 a = j + pair * 2, b = a + 1;
      const float left = inverse[i][a] * beta_of[a], right = inverse[i][b] * beta_of[b];
      without[pair] = pack_bf16(left, right);
      with_decay[pair] = pack_bf16(left * __expf(sum_of[a]), right * __expf(sum_of[b]));
    }
    *(uint4*)(scaled[0] + narrow(i, j)) = make_uint4(with_decay[0], with_decay[1], with_decay[2], with_decay[3]);
    *(uint4*)(scaled[1] + narrow(i, j)) = make_uint4(without[0], without[1], without[2], without[3]);
  }
  __syncthreads();

  // Warps 0 and 1: W; 2 and 3: U. Both take the place of what they were made from, and leave in whole lines.
  u16* operand = warp < 2 ? keys : values;
  float products[D / 8][4] = {};
#pragma unroll
  for (int step = 0; step < CHUNK / 16; step++) {
    u32 a[4];
    load_matrices(a, scaled[warp / 2] + narrow(m + lane % 16, step * 16 + lane / 16 * 8));
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      u32 b[4];
      load_matrices_transposed(b, operand + wide(step * 16 + lane % 16, n * 8 + lane / 16 * 8));
      mma_bf16(products[n], a, b[0], b[1]);
      mma_bf16(products[n + 1], a, b[2], b[3]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < D / 8; n++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 pair = pack_bf16(products[n][half * 2], products[n][half * 2 + 1]);
      *(u32*)(operand + wide(m + half * 8 + g, n * 8 + t * 2)) = pair;
    }
  }
  __syncthreads();
#pragma unroll 4
  for (u32 i = threadIdx.x * 8; i < WIDE; i += blockDim.x * 8) {
    *(uint4*)(w_out + i) = *(const uint4*)(keys + i);
    *(uint4*)(u_out + i) = *(const uint4*)(values + i);
  }
}

// Everything is transposed, so that what one product leaves in registers is what the next one takes: a warp owns 16
// columns of the values, S^T [16, 128] for the whole walk and V'^T and O^T [16, 32] for a chunk. For the norm O goes
// through shared memory, from where a warp takes whole rows. Records are copied to shared memory one ahead. Dynamic
// shared memory: 2 * RECORD * 2 bytes and CHUNK * STRIDE * 4. Bytes: a record a chunk, z and out once, the state once a
// launch. Bound by latency: a head is one block.
constexpr int STRIDE = D + 4;

extern "C" __global__ void __launch_bounds__(256)
    gated_delta_states(GATED_DELTA_ARGUMENTS, const u16* records, const float* decays, u32 first, u32 n_numbers,
                       u32 max_rows) {
  DYNAMIC_SHARED(shared);
  float* read = (float*)(shared + 2 * RECORD * sizeof(u16));
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const u32 head = blockIdx.x, heads = p.n_value_heads;
  const Span span = spans[blockIdx.y];
  const u32 own_first = first_chunk(span, blockIdx.y);
  const u32 begin = max(first, own_first), end = min(first + n_numbers, own_first + n_chunks(span));
  if (span_rows(span) <= max_rows || begin >= end) return;

  const auto fetch = [&](u32 number, u32 stage) {
    const u16* from = records + ((i64)(number - first) * heads + head) * RECORD + threadIdx.x * 8;
    u16* to = (u16*)shared + stage * RECORD + threadIdx.x * 8;
#pragma unroll
    for (u32 i = 0; i < RECORD / 8; i += 256) {
      if (i + 256 <= RECORD / 8 || i + threadIdx.x < RECORD / 8) copy_async(to + i * 8, from + i * 8, true);
    }
  };
  fetch(begin, 0);
  copy_commit();

  // Element e of tile n: column g + e / 2 * 8 of the warp's values, row n * 8 + 2 * t + e % 2 of the state.
  const u32 value = warp * 16 + g;
  float* own = state + ((i64)span.slot * heads + head) * D * D + value;
  float s[D / 8][4];
  const bool resumes = begin > own_first || span.resumes == 1;
#pragma unroll
  for (int n = 0; n < D / 8; n++) {
#pragma unroll
    for (int e = 0; e < 4; e++) s[n][e] = resumes ? own[(n * 8 + t * 2 + e % 2) * D + e / 2 * 8] : 0.0f;
  }
  // Of the rows that a warp finishes, warp + 8 * i, lane + 32 * j.
  const float* norm = constants + 2 * heads + lane;
  const float weights[4] = {norm[0], norm[32], norm[64], norm[96]};

  for (u32 number = begin, stage = 0; number < end; number++, stage ^= 1) {
    const u32 row = span.first + (number - own_first) * CHUNK, n_rows = min((u32)CHUNK, span.end - row);
    const float decay = decays[(number - first) * heads + head];
    float gate[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float* from = z + (i64)(row + warp + i * 8) * p.z_width + p.z_start + head * D + lane;
#pragma unroll
      for (int j = 0; j < 4; j++) gate[i][j] = warp + i * 8 < n_rows ? from[j * 32] : 0.0f;
    }
    if (number + 1 < end) fetch(number + 1, stage ^ 1);
    copy_commit();
    copy_wait<1>();
    __syncthreads();
    const u16* w_of = (const u16*)shared + stage * RECORD;
    const u16* q_of = w_of + WIDE;
    const u16* k_of = w_of + 2 * WIDE;
    const u16* u_of = w_of + 3 * WIDE;
    const u16* p_of = w_of + 4 * WIDE;

    // Element e of tile n from here on: the same columns, row n * 8 + 2 * t + e % 2 of the chunk.
    float v[CHUNK / 8][4] = {}, o[CHUNK / 8][4] = {};
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
      const float(&left)[4] = s[2 * step], (&right)[4] = s[2 * step + 1];
      const u32 a[4] = {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]), pack_bf16(right[0], right[1]),
                        pack_bf16(right[2], right[3])};
#pragma unroll
      for (int n = 0; n < CHUNK / 8; n += 2) {
        const u32 place = wide(n * 8 + lane / 16 * 8 + lane % 8, step * 16 + lane / 8 % 2 * 8);
        u32 b[4];
        load_matrices(b, w_of + place);
        mma_bf16(v[n], a, b[0], b[1]);
        mma_bf16(v[n + 1], a, b[2], b[3]);
        load_matrices(b, q_of + place);
        mma_bf16(o[n], a, b[0], b[1]);
        mma_bf16(o[n + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n += 2) {
      u32 u[4];
      load_matrices_transposed(u, u_of + wide((n + lane / 16) * 8 + lane % 8, warp * 16 + lane / 8 % 2 * 8));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float(&to)[4] = v[n + i / 2];
        to[i % 2 * 2] = bits_to_f32(u[i] << 16) - to[i % 2 * 2];
        to[i % 2 * 2 + 1] = bits_to_f32(u[i] & 0xffff0000u) - to[i % 2 * 2 + 1];
      }
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][e] *= decay;
    }
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++) {
      const float(&left)[4] = v[2 * step], (&right)[4] = v[2 * step + 1];
      const u32 a[4] = {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]), pack_bf16(right[0], right[1]),
                        pack_bf16(right[2], right[3])};
      // The first rows of P see nothing of the last ones.
#pragma unroll
      for (int n = step * 2; n < CHUNK / 8; n += 2) {
        u32 b[4];
        load_matrices(b, p_of + narrow(n * 8 + lane / 16 * 8 + lane % 8, step * 16 + lane / 8 % 2 * 8));
        mma_bf16(o[n], a, b[0], b[1]);
        mma_bf16(o[n + 1], a, b[2], b[3]);
      }
#pragma unroll
      for (int n = 0; n < D / 8; n += 2) {
        u32 b[4];
        load_matrices_transposed(b, k_of + wide(step * 16 + lane % 16, n * 8 + lane / 16 * 8));
        mma_bf16(s[n], a, b[0], b[1]);
        mma_bf16(s[n + 1], a, b[2], b[3]);
      }
    }

#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) read[(n * 8 + t * 2 + e % 2) * STRIDE + value + e / 2 * 8] = o[n][e];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 r = warp + i * 8;
      if (r >= n_rows) break;
      float squares = 0.0f, result[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        result[j] = read[r * STRIDE + lane + j * 32];
        squares += result[j] * result[j];
      }
      const float scale = rsqrtf(warp_sum(squares) / D + p.eps);
      float* to = out + ((i64)(row + r) * heads + head) * D + lane;
#pragma unroll
      for (int j = 0; j < 4; j++) to[j * 32] = result[j] * scale * weights[j] * silu(gate[i][j]);
    }
  }
#pragma unroll
  for (int n = 0; n < D / 8; n++) {
#pragma unroll
    for (int e = 0; e < 4; e++) own[(n * 8 + t * 2 + e % 2) * D + e / 2 * 8] = s[n][e];
  }
}
