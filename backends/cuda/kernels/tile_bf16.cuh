// The core of tensor-core matrix products: BM rows of x in bf16 times 128 rows of a weight, sums in f32, 256 threads.
//
// Eight warps, two by four, own BM / 2 rows and 32 columns each. Four stages of 32 columns of x and weight are copied to
// shared memory ahead of their use. Row r of a stage keeps its 16-byte part c at c ^ (r / 2 % 4), so that eight rows read
// at once lie in different banks. Dynamic shared memory: STAGES * (BM + BN) * STAGE_COLUMNS * 2 bytes.
#pragma once
#include "scaled.cuh"

constexpr int BN = 128;
constexpr int STAGE_COLUMNS = 32;
constexpr int STAGES = 4;

__device__ __forceinline__ u32 stage_place(u32 row, u32 part) {
  return row * STAGE_COLUMNS + (part ^ (row / 2 % 4)) * 8;
}

// What weight row j of a GLU tile stands for: column of the tile, and whether it is of up.
__device__ __forceinline__ u32 glu_column(u32 j) { return j / 16 * 8 + j % 8; }
__device__ __forceinline__ bool glu_is_up(u32 j) { return j / 8 % 2 == 1; }

// BN rows of a bf16 weight: stages are what was copied.
class PlainStages {
  u16* stages;
  u32 n_columns;
  const u16* rows[BN / 64];

 public:
  template <class WeightRow>
  __device__ __forceinline__ PlainStages(u16* shared, u32 columns, const WeightRow& weight_row)
      : stages(shared), n_columns(columns) {
#pragma unroll
    for (int i = 0; i < BN / 64; i++) rows[i] = (const u16*)weight_row(threadIdx.x / 4 + i * 64).codes;
  }

  // Begins to bring a stage.
  __device__ __forceinline__ void fetch(u32 step) {
    const u32 part = threadIdx.x % 4, column = step * STAGE_COLUMNS + part * 8;
    u16* stage = stages + step % STAGES * (BN * STAGE_COLUMNS);
#pragma unroll
    for (int i = 0; i < BN / 64; i++) {
      const bool live = column < n_columns && rows[i] != nullptr;
      copy_async(stage + stage_place(threadIdx.x / 4 + i * 64, part), live ? rows[i] + column : stages, live);
    }
  }

  __device__ __forceinline__ void prepare(u32) {}

  // What this thread copied, and what has landed, becomes bf16; a barrier of the block follows.
  __device__ __forceinline__ void decode(u32) {}

  // The stage as bf16.
  __device__ __forceinline__ const u16* stage(u32 step) const { return stages + step % STAGES * (BN * STAGE_COLUMNS); }
};

// BN rows of a weight with scales, in the room of PlainStages: four stages of codes, and two of them as bf16. A thread copies
// and decodes 16 columns of a row. n_columns is a multiple of 16, rows start at eight bytes, with 8-bit codes at 16. Elements of
// FP8 are rounded to bf16 with their scale, the others are exact.
class ScaledStages {
  uint4* raw;
  u16* stages;
  u32 n_columns;
  StoredRow row;
  // The scale of the stage to be decoded next, as it is stored.
  u32 scale;

  // Eight 4-bit codes times `factor`, in order.
  static __device__ __forceinline__ uint4 eight(u32 word, u32 factor) {
    u32 pairs[4];
    e2m1_pairs(word, pairs);
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = mul_bf16x2(mul_bf16x2(pairs[i], bf16x2_power(E2M1_POWER)), factor);
    return make_uint4(lower_halves(pairs[0], pairs[1]), lower_halves(pairs[2], pairs[3]),
                      upper_halves(pairs[0], pairs[1]), upper_halves(pairs[2], pairs[3]));
  }

  // Four 8-bit codes times `factor`, in order.
  static __device__ __forceinline__ uint2 four(u32 word, float factor) {
    u32 even, odd;
    e4m3_pairs(word, even, odd);
    even = mul_bf16x2(even, bf16x2_power(E4M3_POWER));
    odd = mul_bf16x2(odd, bf16x2_power(E4M3_POWER));
    return make_uint2(pack_bf16(bits_to_f32(even << 16) * factor, bits_to_f32(odd << 16) * factor),
                      pack_bf16(bits_to_f32(even & 0xffff0000u) * factor, bits_to_f32(odd & 0xffff0000u) * factor));
  }

 public:
  template <class WeightRow>
  __device__ __forceinline__ ScaledStages(u16* shared, u32 columns, const WeightRow& weight_row)
      : raw((uint4*)shared), stages(shared + STAGES * 256 * 8), n_columns(columns), row(weight_row(threadIdx.x / 2)), scale(0) {}

  __device__ __forceinline__ u32 column_of(u32 step) const { return step * STAGE_COLUMNS + threadIdx.x % 2 * 16; }
  __device__ __forceinline__ bool is_live(u32 step) const { return row.codes != nullptr && column_of(step) < n_columns; }

  __device__ __forceinline__ void fetch(u32 step) {
    uint4* to = raw + step % STAGES * 256 + threadIdx.x;
    const bool live = is_live(step);
    const u32 column = column_of(step);
    if (row.format == FORMAT_FP8) {
      copy_async(to, live ? row.codes + column : (const u8*)raw, live);
    } else {
      copy_async_8(to, live ? row.codes + column / 2 : (const u8*)raw, live);
    }
  }

  // Begins to bring a stage's scale, which decode wants.
  __device__ __forceinline__ void prepare(u32 step) {
    const u32 column = column_of(step);
    scale = 0;
    if (!is_live(step)) return;
    if (row.format == FORMAT_FP8) scale = ((const u32*)row.scales)[column / 128];
    if (row.format == FORMAT_NVFP4) scale = row.scales[column / 16];
    if (row.format == FORMAT_MXFP4) scale = row.scales[column / 32];
  }

  __device__ __forceinline__ void decode(u32 step) {
    const uint4 codes = raw[step % STAGES * 256 + threadIdx.x];
    uint4 first, second;
    if (row.format == FORMAT_FP8) {
      // A row with a code that is no number gives no numbers, whichever column it is.
      const float factor = has_nan(codes) ? NOT_A_NUMBER : bits_to_f32(scale);
      const uint2 a = four(codes.x, factor), b = four(codes.y, factor);
      const uint2 c = four(codes.z, factor), d = four(codes.w, factor);
      first = make_uint4(a.x, a.y, b.x, b.y);
      second = make_uint4(c.x, c.y, d.x, d.y);
    } else {
      u32 factor = e8m0_to_bf16(scale), unused;
      if (row.format == FORMAT_NVFP4) {
        e4m3_pairs(scale, factor, unused);
        factor = mul_bf16x2(factor, bf16x2_power(E4M3_POWER));
      }
      factor = lower_halves(factor, factor);
      first = eight(codes.x, factor);
      second = eight(codes.y, factor);
    }
    u16* stage = stages + step % 2 * (BN * STAGE_COLUMNS);
    const u32 part = threadIdx.x % 2 * 2;
    *(uint4*)(stage + stage_place(threadIdx.x / 2, part)) = first;
    *(uint4*)(stage + stage_place(threadIdx.x / 2, part + 1)) = second;
  }

  __device__ __forceinline__ const u16* stage(u32 step) const { return stages + step % 2 * (BN * STAGE_COLUMNS); }
};

// store(row, column, a, b) gets elements of two neighbouring columns; with GLU store(row, column, a, b, up_a, up_b) and
// column < 64. x_row(i) gives a row's address, aligned to 16 bytes, or null outside; weight_row(j) a StoredRow, null outside.
// n_columns is a multiple of 8. All threads of the block take part.
template <int BM, bool GLU, class Weights, class XRow, class WeightRow, class Store>
__device__ __forceinline__ void tile_bf16(u32 n_columns, u8* shared, const XRow& x_row, const WeightRow& weight_row,
                                          const Store& store) {
  constexpr int STAGE = BM * STAGE_COLUMNS;
  constexpr int M_TILES = BM / 2 / 16, N_TILES = 4;
  u16* stages = (u16*)shared;
  const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const u32 warp_row = warp / 4 * (BM / 2), warp_column = warp % 4 * 32;

  const u32 part = tid % 4;
  const u16* x[BM / 64];
#pragma unroll
  for (int i = 0; i < BM / 64; i++) x[i] = (const u16*)x_row(tid / 4 + i * 64);
  Weights weights(stages + STAGES * STAGE, n_columns, weight_row);

  const u32 n_steps = (n_columns + STAGE_COLUMNS - 1) / STAGE_COLUMNS;
  const auto fetch = [&](u32 step) {
    u16* stage = stages + step % STAGES * STAGE;
    const u32 column = step * STAGE_COLUMNS + part * 8;
#pragma unroll
    for (int i = 0; i < BM / 64; i++) {
      const bool live = column < n_columns && x[i] != nullptr;
      copy_async(stage + stage_place(tid / 4 + i * 64, part), live ? x[i] + column : stages, live);
    }
    weights.fetch(step);
  };

  float sums[M_TILES][N_TILES][4] = {};
#pragma unroll
  for (u32 step = 0; step < STAGES - 1; step++) {
    if (step < n_steps) fetch(step);
    copy_commit();
  }
  weights.prepare(0);
  for (u32 step = 0; step < n_steps; step++) {
    copy_wait<STAGES - 2>();
    weights.decode(step);
    __syncthreads();
    if (step + STAGES - 1 < n_steps) fetch(step + STAGES - 1);
    copy_commit();
    weights.prepare(step + 1);
    const u16* xs = stages + step % STAGES * STAGE;
    const u16* ws = weights.stage(step);
#pragma unroll
    for (int k = 0; k < STAGE_COLUMNS / 16; k++) {
      u32 a[M_TILES][4], b[N_TILES / 2][4];
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
        load_matrices(a[m], xs + stage_place(warp_row + m * 16 + lane % 16, k * 2 + lane / 16));
      }
#pragma unroll
      for (int n = 0; n < N_TILES / 2; n++) {
        const u32 row = warp_column + n * 16 + lane / 16 * 8 + lane % 8;
        load_matrices(b[n], ws + stage_place(row, k * 2 + lane / 8 % 2));
      }
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
          mma_bf16(sums[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }
  copy_wait<0>();

#pragma unroll
  for (int m = 0; m < M_TILES; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 row = warp_row + m * 16 + half * 8 + lane / 4;
      if constexpr (GLU) {
#pragma unroll
        for (int n = 0; n < N_TILES; n += 2) {
          const u32 column = glu_column(warp_column + n * 8) + lane % 4 * 2;
          const float* gate = &sums[m][n][half * 2];
          const float* up = &sums[m][n + 1][half * 2];
          store(row, column, gate[0], gate[1], up[0], up[1]);
        }
      } else {
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
          const u32 column = warp_column + n * 8 + lane % 4 * 2;
          store(row, column, sums[m][n][half * 2], sums[m][n][half * 2 + 1]);
        }
      }
    }
  }
}
