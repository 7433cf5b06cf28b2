// The core of tensor-core matrix products: BM rows of x in bf16 times BN rows of a weight, sums in f32.
//
// A warp owns BN / WARPS_N columns and every WARPS_M-th 16 rows of the tile, so that a tile of few rows is few rows for all of its
// warps. STAGES stages of COLUMNS columns of x and weight are copied to shared memory ahead of their use, and what 16 columns take
// comes from there to registers while the 16 before are multiplied. Parts of 16 bytes of a stage lie where eight rows read at once
// are in different banks. Dynamic shared memory: STAGES * BM * COLUMNS * 2 bytes, and what Weights asks for.
#pragma once
#include "scaled.cuh"

template <int BM_, int BN_, int WARPS_M_, int WARPS_N_, int COLUMNS_, int STAGES_, int LEAST_>
struct Tile {
  static constexpr int BM = BM_, BN = BN_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, COLUMNS = COLUMNS_, STAGES = STAGES_;
  static constexpr int THREADS = 32 * WARPS_M * WARPS_N;
  // 16-row tiles of a warp, and as few of them as there is code for, where a tile may have few rows.
  static constexpr int M_TILES = BM / 16 / WARPS_M, LEAST = LEAST_;
  static constexpr int WARP_COLUMNS = BN / WARPS_N, N_TILES = WARP_COLUMNS / 8;
  // Parts of 16 bytes of a row of a stage, and rows that the threads copy at once.
  static constexpr int PARTS = COLUMNS / 8, ROWS_AT_ONCE = THREADS / PARTS;
  static_assert(COLUMNS == 32 || COLUMNS == 64, "");

  // Where a part of a row lies in its stage.
  static __device__ __forceinline__ u32 place(u32 row, u32 part) {
    return row * COLUMNS + (part ^ (COLUMNS == 32 ? row / 2 % 4 : row % 8)) * 8;
  }
};

// For few rows: small blocks, many at once, since bytes of the weight count. For many: 64 x 64 a warp, so that reads of shared
// memory take less time than products. The same with room for rows that are left over, which else are a tile of their own and
// bring the weight once more.
typedef Tile<64, 64, 2, 2, 64, 3, 1> LowTile;
typedef Tile<128, 128, 2, 2, 32, 4, 4> HighTile;
typedef Tile<160, 128, 2, 2, 32, 4, 3> TallTile;

// What weight row j of a GLU tile stands for: column of the tile, and whether it is of up.
__device__ __forceinline__ u32 glu_column(u32 j) { return j / 16 * 8 + j % 8; }
__device__ __forceinline__ bool glu_is_up(u32 j) { return j / 8 % 2 == 1; }

// BN rows of a bf16 weight: stages are what was copied, STAGES * BN * COLUMNS * 2 bytes.
template <class Shape>
class PlainStages {
  static constexpr int N = Shape::BN / Shape::ROWS_AT_ONCE, STAGE = Shape::BN * Shape::COLUMNS;
  u16* stages;
  u32 n_columns;
  const u16* rows[N];

 public:
  // How many steps of 16 columns a stage is ready ahead of its use.
  static constexpr int LEAD = 1;

  template <class WeightRow>
  __device__ __forceinline__ PlainStages(u16* shared, u32 columns, const WeightRow& weight_row)
      : stages(shared), n_columns(columns) {
#pragma unroll
    for (int i = 0; i < N; i++) rows[i] = (const u16*)weight_row(threadIdx.x / Shape::PARTS + i * Shape::ROWS_AT_ONCE).codes;
  }

  // Begins to bring a stage.
  __device__ __forceinline__ void fetch(u32 step) {
    const u32 part = threadIdx.x % Shape::PARTS, column = step * Shape::COLUMNS + part * 8;
    u16* stage = stages + step % Shape::STAGES * STAGE;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const bool live = column < n_columns && rows[i] != nullptr;
      const u32 row = threadIdx.x / Shape::PARTS + i * Shape::ROWS_AT_ONCE;
      copy_async(stage + Shape::place(row, part), live ? rows[i] + column : stages, live);
    }
  }

  __device__ __forceinline__ void prepare(u32) {}

  // What this thread copied, and what has landed, becomes bf16; a barrier of the block follows.
  __device__ __forceinline__ void decode(u32) {}

  // The stage as bf16.
  __device__ __forceinline__ const u16* stage(u32 step) const { return stages + step % Shape::STAGES * STAGE; }
};

// BN rows of a weight with scales: STAGES stages of codes, each code in the room of a byte, and two stages as bf16, which is
// (STAGES + 4) * BN * COLUMNS bytes. A thread copies and decodes 16 columns of a row. n_columns is a multiple of 16, rows start at
// eight bytes, with 8-bit codes at 16. Elements of FP8 are rounded to bf16 with their scale, the others are exact.
template <class Shape>
class ScaledStages {
  // Parts of 16 columns in a row of a stage, rows that the threads take at once, and how often they do.
  static constexpr int WIDE_PARTS = Shape::COLUMNS / 16, ROWS_AT_ONCE = Shape::THREADS / WIDE_PARTS;
  static constexpr int N = Shape::BN / ROWS_AT_ONCE, RAW = Shape::BN * WIDE_PARTS, STAGE = Shape::BN * Shape::COLUMNS;
  uint4* raw;
  u16* stages;
  u32 n_columns;
  StoredRow rows[N];
  // The scales of the stage to be decoded next, as they are stored.
  u32 scales[N];

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
  // Decoding goes on beside products.
  static constexpr int LEAD = 2;

  template <class WeightRow>
  __device__ __forceinline__ ScaledStages(u16* shared, u32 columns, const WeightRow& weight_row)
      : raw((uint4*)shared), stages(shared + Shape::STAGES * RAW * 8), n_columns(columns) {
#pragma unroll
    for (int i = 0; i < N; i++) rows[i] = weight_row(threadIdx.x / WIDE_PARTS + i * ROWS_AT_ONCE), scales[i] = 0;
  }

  __device__ __forceinline__ u32 column_of(u32 step) const { return step * Shape::COLUMNS + threadIdx.x % WIDE_PARTS * 16; }
  __device__ __forceinline__ bool is_live(int i, u32 step) const { return rows[i].codes != nullptr && column_of(step) < n_columns; }

  __device__ __forceinline__ void fetch(u32 step) {
    const u32 column = column_of(step);
#pragma unroll
    for (int i = 0; i < N; i++) {
      uint4* to = raw + step % Shape::STAGES * RAW + i * Shape::THREADS + threadIdx.x;
      const bool live = is_live(i, step);
      if (rows[i].format == FORMAT_FP8) {
        copy_async(to, live ? rows[i].codes + column : (const u8*)raw, live);
      } else {
        copy_async_8(to, live ? rows[i].codes + column / 2 : (const u8*)raw, live);
      }
    }
  }

  // Begins to bring a stage's scales, which decode wants.
  __device__ __forceinline__ void prepare(u32 step) {
    const u32 column = column_of(step);
#pragma unroll
    for (int i = 0; i < N; i++) {
      const StoredRow& row = rows[i];
      scales[i] = 0;
      if (!is_live(i, step)) continue;
      if (row.format == FORMAT_FP8) scales[i] = ((const u32*)row.scales)[column / 128];
      if (row.format == FORMAT_NVFP4) scales[i] = row.scales[column / 16];
      if (row.format == FORMAT_MXFP4) scales[i] = row.scales[column / 32];
    }
  }

  __device__ __forceinline__ void decode(u32 step) {
    u16* stage = stages + step % 2 * STAGE;
    const u32 part = threadIdx.x % WIDE_PARTS * 2;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const uint4 codes = raw[step % Shape::STAGES * RAW + i * Shape::THREADS + threadIdx.x];
      const u32 scale = scales[i], format = rows[i].format;
      uint4 first, second;
      if (format == FORMAT_FP8) {
        // A row with a code that is no number gives no numbers, whichever column it is.
        const float factor = has_nan(codes) ? NOT_A_NUMBER : bits_to_f32(scale);
        const uint2 a = four(codes.x, factor), b = four(codes.y, factor);
        const uint2 c = four(codes.z, factor), d = four(codes.w, factor);
        first = make_uint4(a.x, a.y, b.x, b.y);
        second = make_uint4(c.x, c.y, d.x, d.y);
      } else {
        u32 factor = e8m0_to_bf16(scale), unused;
        if (format == FORMAT_NVFP4) {
          e4m3_pairs(scale, factor, unused);
          factor = (scale & 0x7f) == 0x7f ? 0x7fc0 : mul_bf16x2(factor, bf16x2_power(E4M3_POWER));
        }
        factor = lower_halves(factor, factor);
        first = eight(codes.x, factor);
        second = eight(codes.y, factor);
      }
      const u32 row = threadIdx.x / WIDE_PARTS + i * ROWS_AT_ONCE;
      *(uint4*)(stage + Shape::place(row, part)) = first;
      *(uint4*)(stage + Shape::place(row, part + 1)) = second;
    }
  }

  __device__ __forceinline__ const u16* stage(u32 step) const { return stages + step % 2 * STAGE; }
};

// store(row, column, before, sums) gets four neighbouring columns; with GLU store(row, column, before, sums, sums of up), and half
// as many columns. What before(row, column) gave comes back to store: it is asked of several quads at once, so that loads of it are
// on their way together. x_row(i) gives a row's address, aligned to 16 bytes, or null outside; weight_row(j) a StoredRow, null
// outside. n_columns is a multiple of 8. Of each warp's 16-row tiles only the first M_TILES are computed. All threads of the block
// take part.
template <class Shape, int M_TILES, bool GLU, class Weights, class XRow, class WeightRow, class Before, class Store>
__device__ __forceinline__ void tile_bf16(u32 n_columns, u8* shared, const XRow& x_row, const WeightRow& weight_row,
                                          const Before& before, const Store& store) {
  constexpr int STAGES = Shape::STAGES, STAGE = Shape::BM * Shape::COLUMNS, K_STEPS = Shape::COLUMNS / 16;
  constexpr int WARPS_M = Shape::WARPS_M, N_TILES = Shape::N_TILES, PARTS = Shape::PARTS, ROWS_AT_ONCE = Shape::ROWS_AT_ONCE;
  constexpr int X_COPIES = (M_TILES * 16 * WARPS_M + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  u16* stages = (u16*)shared;
  const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const u32 warp_row = warp % WARPS_M * 16, warp_column = warp / WARPS_M * Shape::WARP_COLUMNS;

  const u32 part = tid % PARTS;
  const u16* x[X_COPIES];
#pragma unroll
  for (int i = 0; i < X_COPIES; i++) x[i] = (const u16*)x_row(tid / PARTS + i * ROWS_AT_ONCE);
  Weights weights(stages + STAGES * STAGE, n_columns, weight_row);

  const u32 n_steps = (n_columns + Shape::COLUMNS - 1) / Shape::COLUMNS;
  const auto fetch = [&](u32 step) {
    u16* stage = stages + step % STAGES * STAGE;
    const u32 column = step * Shape::COLUMNS + part * 8;
#pragma unroll
    for (int i = 0; i < X_COPIES; i++) {
      const bool live = column < n_columns && x[i] != nullptr;
      copy_async(stage + Shape::place(tid / PARTS + i * ROWS_AT_ONCE, part), live ? x[i] + column : stages, live);
    }
    weights.fetch(step);
  };

  // Registers for rows of x one step ahead are not left beside five tiles.
  constexpr int X_LEAD = M_TILES < 5 ? 1 : 0;
  u32 a[X_LEAD + 1][M_TILES][4], b[2][N_TILES / 2][4];
  const auto load_x = [&](u32 step, int k) {
    const u16* xs = stages + step % STAGES * STAGE;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
      load_matrices(a[k & X_LEAD][m], xs + Shape::place(m * 16 * WARPS_M + warp_row + lane % 16, k * 2 + lane / 16));
    }
  };
  const auto load_weight = [&](u32 step, int k) {
    const u16* ws = weights.stage(step);
#pragma unroll
    for (int n = 0; n < N_TILES / 2; n++) {
      const u32 row = warp_column + n * 16 + lane / 16 * 8 + lane % 8;
      load_matrices(b[k & 1][n], ws + Shape::place(row, k * 2 + lane / 8 % 2));
    }
  };
  float sums[M_TILES][N_TILES][4] = {};
  const auto multiply = [&](int k) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        mma_bf16(sums[m][n], a[k & X_LEAD][m], b[k & 1][n / 2][n % 2 * 2], b[k & 1][n / 2][n % 2 * 2 + 1]);
      }
    }
  };

#pragma unroll
  for (u32 step = 0; step < STAGES - 1; step++) {
    if (step < n_steps) fetch(step);
    copy_commit();
  }
  weights.prepare(0);
  copy_wait<STAGES - 2>();
  weights.decode(0);
  __syncthreads();
  weights.prepare(1);
  load_x(0, 0);
  load_weight(0, 0);
  for (u32 step = 0; step < n_steps; step++) {
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
      const bool is_last = k + 1 == K_STEPS;
      if (k == 0) {
        if (step + STAGES - 1 < n_steps) fetch(step + STAGES - 1);
        copy_commit();
      }
      if (k == K_STEPS - Weights::LEAD) {
        copy_wait<STAGES - 2>();
        weights.decode(step + 1);
        weights.prepare(step + 2);
      }
      if (is_last) __syncthreads();
      const u32 next_step = is_last ? step + 1 : step;
      const int next = is_last ? 0 : k + 1;
      load_weight(next_step, next);
      if (X_LEAD == 1) load_x(next_step, next);
      multiply(k);
      if (X_LEAD == 0) load_x(next_step, next);
    }
  }
  copy_wait<0>();

  // Sums pass through the memory of the stages, 16 rows of a warp at a time, into quads of neighbouring columns. Rows lie eight
  // floats apart from each other's banks.
  constexpr int STRIDE = Shape::WARP_COLUMNS + 8, QUADS = Shape::WARP_COLUMNS / (GLU ? 8 : 4);
  constexpr int BATCH = QUADS / 2 < 4 ? QUADS / 2 : 4;
  static_assert(Shape::THREADS / 32 * 16 * STRIDE * 4 <= STAGES * (Shape::BM + Shape::BN) * Shape::COLUMNS * 2, "");
  float* result = (float*)shared + warp * 16 * STRIDE;
  __syncthreads();
#pragma unroll
  for (int m = 0; m < M_TILES; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        *(float2*)(result + (half * 8 + lane / 4) * STRIDE + n * 8 + lane % 4 * 2) =
            make_float2(sums[m][n][half * 2], sums[m][n][half * 2 + 1]);
      }
    }
    __syncwarp();
#pragma unroll 1
    for (u32 first = lane; first < 16 * QUADS; first += 32 * BATCH) {
      const auto row_of = [&](int i) { return (first + i * 32) / QUADS; };
      const u32 column = first % QUADS * 4, to_row = m * 16 * WARPS_M + warp_row;
      const u32 to_column = (GLU ? warp_column / 2 : warp_column) + column;
      decltype(before(0u, 0u)) befores[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++) befores[i] = before(to_row + row_of(i), to_column);
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const float* from = result + row_of(i) * STRIDE;
        if constexpr (GLU) {
          const float4 gate = *(const float4*)(from + column / 8 * 16 + column % 8);
          const float4 up = *(const float4*)(from + column / 8 * 16 + column % 8 + 8);
          store(to_row + row_of(i), to_column, befores[i], gate, up);
        } else {
          store(to_row + row_of(i), to_column, befores[i], *(const float4*)(from + column));
        }
      }
    }
    __syncwarp();
  }
}

// The same of no more rows than hold the first n_rows, as far as there is code for it.
template <class Shape, bool GLU, class Weights, int M_TILES = Shape::LEAST, class XRow, class WeightRow, class Before, class Store>
__device__ __forceinline__ void tile_bf16_of_rows(u32 n_rows, u32 n_columns, u8* shared, const XRow& x_row,
                                                  const WeightRow& weight_row, const Before& before,
                                                  const Store& store) {
  if constexpr (M_TILES < Shape::M_TILES) {
    if (n_rows > 16 * Shape::WARPS_M * M_TILES) {
      return tile_bf16_of_rows<Shape, GLU, Weights, M_TILES + 1>(n_rows, n_columns, shared, x_row, weight_row, before, store);
    }
  }
  tile_bf16<Shape, M_TILES, GLU, Weights>(n_columns, shared, x_row, weight_row, before, store);
}
