// The core of decode where weights have scales: a block multiplies rows of a weight with up to N rows of x on tensor cores.
//
// A row of x is the sum of three bf16 vectors, each a column of a product: column 3 n + i is part i of row n. Products of bf16
// are exact and sums are f32, so nothing is lost. Warps take steps of 128 columns in turn. In a step the four lanes that share
// a row of the weight load it 16 bytes each; which column a lane calls which does not matter to a sum, so codes become
// fragments as they come, in units of eight columns. The warp brings x into the same order in shared memory.
#pragma once
#include "scaled.cuh"
#include "split.cuh"

constexpr u32 STEP = 128;
// Units of a lane in a step.
constexpr int UNITS = 4;

// What a format is to this core. LOADS: 16-byte loads of a lane in a step of a row, of LANE_COLUMNS columns each; PAIR: distance
// of the columns of a pair in a unit; POWER: sums are over this power of two.
struct Fp8 {
  static constexpr int LOADS = 2, LANE_COLUMNS = 16, PAIR = 2, POWER = 0;
  static constexpr bool SCALES_SUMS = true;
  static __device__ __forceinline__ u32 column(u32 t, u32 unit) { return unit / 2 * 64 + t * 16 + unit % 2 * 8; }
  static __device__ __forceinline__ u32 code_bytes(u32 columns) { return columns; }
  static __device__ __forceinline__ u32 scale_bytes(u32 columns) { return (columns + 127) / 128 * 4; }
  static __device__ __forceinline__ u32 load_scales(const u8* row, u32 column) { return ((const u32*)row)[column / 128]; }
  static __device__ __forceinline__ void factors(u32, u32 (&out)[2]) { out[0] = out[1] = bf16x2_power(E4M3_POWER); }
  // What the four lanes of a row scale their sums with: no number where a code of theirs is none.
  static __device__ __forceinline__ float sum_scale(const uint4 (&raw)[2], u32 scale) {
    const u32 lanes = __ballot_sync(FULL_WARP, has_nan(raw[0]) || has_nan(raw[1])) >> (threadIdx.x % 32 & ~3u);
    return (lanes & 15) != 0 ? NOT_A_NUMBER : bits_to_f32(scale);
  }
  // The pairs of a unit: of its columns 0 and 2, 1 and 3, 4 and 6, 5 and 7.
  static __device__ __forceinline__ void decode(const uint4 (&raw)[2], int unit, const u32 (&factors)[2], u32 (&out)[4]) {
    const uint4 v = raw[unit / 2];
    e4m3_pairs(unit % 2 == 0 ? v.x : v.z, out[0], out[1]);
    e4m3_pairs(unit % 2 == 0 ? v.y : v.w, out[2], out[3]);
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = mul_bf16x2(out[i], factors[0]);
  }
};

struct Nibbles {
  static constexpr int LOADS = 1, LANE_COLUMNS = 32, PAIR = 4;
  static constexpr bool SCALES_SUMS = false;
  static __device__ __forceinline__ u32 column(u32 t, u32 unit) { return t * 32 + unit * 8; }
  static __device__ __forceinline__ u32 code_bytes(u32 columns) { return columns / 2; }
  // The pairs of a unit, over 2^126: of its columns 0 and 4, 1 and 5, 2 and 6, 3 and 7.
  static __device__ __forceinline__ void pairs(const uint4 (&raw)[1], int unit, u32 (&out)[4]) {
    const u32 words[4] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w};
    e2m1_pairs(words[unit], out);
  }
};

struct Nvfp4 : Nibbles {
  static constexpr int POWER = NVFP4_POWER;
  static __device__ __forceinline__ u32 scale_bytes(u32 columns) { return columns / 16; }
  // Those of the 32 columns from `column` on.
  static __device__ __forceinline__ u32 load_scales(const u8* row, u32 column) { return *(const u16*)(row + column / 16); }
  static __device__ __forceinline__ void factors(u32 scales, u32 (&out)[2]) {
    const u32 both = nvfp4_factors(scales);
    out[0] = lower_halves(both, both);
    out[1] = upper_halves(both, both);
  }
  static __device__ __forceinline__ void decode(const uint4 (&raw)[1], int unit, const u32 (&factors)[2], u32 (&out)[4]) {
    pairs(raw, unit, out);
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = mul_bf16x2(out[i], factors[unit / 2]);
  }
};

struct Mxfp4 : Nibbles {
  static constexpr int POWER = 0;
  static __device__ __forceinline__ u32 scale_bytes(u32 columns) { return columns / 32; }
  static __device__ __forceinline__ u32 load_scales(const u8* row, u32 column) { return row[column / 32]; }
  static __device__ __forceinline__ void factors(u32 scales, u32 (&out)[2]) {
    const u32 scale = e8m0_to_bf16(scales);
    out[0] = out[1] = scale | scale << 16;
  }
  // Codes become numbers first: not every scale times 2^126 is a bf16.
  static __device__ __forceinline__ void decode(const uint4 (&raw)[1], int unit, const u32 (&factors)[2], u32 (&out)[4]) {
    pairs(raw, unit, out);
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = mul_bf16x2(mul_bf16x2(out[i], bf16x2_power(E2M1_POWER)), factors[0]);
  }
};

// A row of a weight.
struct ScaledRow {
  const u8* codes;
  const u8* scales;
};

template <class W>
__device__ __forceinline__ ScaledRow scaled_row(const Stored& weight, u32 row, u32 n_columns) {
  return {(const u8*)weight.codes + (i64)row * W::code_bytes(n_columns),
          (const u8*)weight.scales + (i64)row * W::scale_bytes(n_columns)};
}

// M: tiles of 16 rows of the weight.
template <class W, int N, int M, int WARPS>
struct DotScaled {
  static constexpr int ROWS = 16 * M;
  static constexpr int N_TILES = (3 * N + 7) / 8;
  // Units whose x is in shared memory at once, and what a lane brings there of a row or of two: half a unit.
  static constexpr int AT_ONCE = N <= 2 ? 4 : 2;
  static constexpr int HALVES = 8 * AT_ONCE;
  static constexpr int ROWS_AT_ONCE = 32 / HALVES;
  static constexpr int TURNS = N / ROWS_AT_ONCE;
  // Steps of a warp whose weight is under way together; with two tiles of rows, more than one was slower.
  static constexpr int UNROLL = M == 1 ? 4 / W::LOADS : 1;

  struct Shared {
    union {
      // Of a lane's unit, four pairs.
      uint4 x[WARPS][AT_ONCE][8 * N_TILES][4];
      float sums[WARPS][ROWS][8 * N_TILES + 1];
    };
    float squares[N];
  };

  // What a lane has of a step of a row.
  struct Loaded {
    uint4 raw[W::LOADS];
    u32 scales;
  };

  // weight_row(r) for r < ROWS; x_row(n) for n < n_live <= N, aligned to 16 bytes. With NORM x is multiplied with it. n_columns is
  // a multiple of 32, with 8-bit codes of 16; rows of the weight start at 16 bytes. All threads of the block take part, and
  // afterwards `sum` and `square` answer.
  template <bool NORM, class WeightRow, class XRow>
  static __device__ __forceinline__ void dot(Shared& shared, const WeightRow& weight_row, const XRow& x_row, u32 n_live,
                                             const void* norm, u32 norm_format, u32 n_columns) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 g = lane / 4, t = lane % 4;
    ScaledRow w[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) w[m][half] = weight_row(m * 16 + half * 8 + g);
    }
    // Behind the last column x is zero, and the weight's last columns do as well as any.
    const auto load = [&](u32 start, Loaded (&to)[M][2]) {
#pragma unroll
      for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
          for (int i = 0; i < W::LOADS; i++) {
            const u32 column = min(start + W::column(t, i * 2), n_columns - W::LANE_COLUMNS);
            to[m][half].raw[i] = load_stream(w[m][half].codes + W::code_bytes(column));
          }
          const u32 column = W::SCALES_SUMS ? start : min(start + W::column(t, 0), n_columns - W::LANE_COLUMNS);
          to[m][half].scales = W::load_scales(w[m][half].scales, column);
        }
      }
    };

    // What this lane brings: a half of a unit of a lane, as two pairs.
    const u32 own_unit = lane % HALVES / 8, own_t = lane / 2 % 4, own_half = lane % 2;
    // Few rows are found once; for many, registers are dearer.
    const float* from[N <= 2 ? N : 1];
    if constexpr (N <= 2) {
#pragma unroll
      for (int n = 0; n < N; n++) from[n] = x_row(min((u32)n, n_live - 1));
    }
    const auto bring = [&](u32 start, int unit) {
      const u32 column = start + W::column(own_t, unit + own_unit) + own_half * (8 / W::PAIR);
      const bool inside = column < n_columns;
      float norms[4];
      if (NORM && inside) {
#pragma unroll
        for (int i = 0; i < 4; i++) norms[i] = element(norm, norm_format, column + i / 2 * W::PAIR + i % 2);
      }
#pragma unroll
      for (int i = 0; i < TURNS; i++) {
        const u32 n = i * ROWS_AT_ONCE + lane / HALVES;
        if (n >= n_live) continue;
        float v[4] = {};
        if (inside) {
          const float* row;
          if constexpr (N <= 2) row = from[i];
          else row = x_row(n);
          const float2 first = *(const float2*)(row + column), second = *(const float2*)(row + column + W::PAIR);
          v[0] = first.x, v[1] = first.y, v[2] = second.x, v[3] = second.y;
          if (NORM) {
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] *= norms[j];
          }
        }
        const Split a(v[0], v[2]), b(v[1], v[3]);
#pragma unroll
        for (int part = 0; part < 3; part++) {
          *((uint2*)&shared.x[warp][own_unit][3 * n + part][own_t] + own_half) = make_uint2(a.parts[part], b.parts[part]);
        }
      }
    };

    float sums[M][N_TILES][4] = {};
    const auto multiply = [&](int first, const Loaded (&loaded)[M][2]) {
#pragma unroll
      for (int m = 0; m < M; m++) {
        u32 factors[2][2];
#pragma unroll
        for (int half = 0; half < 2; half++) W::factors(loaded[m][half].scales, factors[half]);
        float scales[2];
        if constexpr (W::SCALES_SUMS) {
#pragma unroll
          for (int half = 0; half < 2; half++) scales[half] = W::sum_scale(loaded[m][half].raw, loaded[m][half].scales);
        }
#pragma unroll
        for (int unit = 0; unit < AT_ONCE; unit++) {
          u32 a[2][4];
#pragma unroll
          for (int half = 0; half < 2; half++) W::decode(loaded[m][half].raw, first + unit, factors[half], a[half]);
          const u32 low[4] = {a[0][0], a[1][0], a[0][1], a[1][1]};
          const u32 high[4] = {a[0][2], a[1][2], a[0][3], a[1][3]};
#pragma unroll
          for (int j = 0; j < N_TILES; j++) {
            if (j > 0 && j * 8 >= 3 * n_live) continue;
            const uint4 b = shared.x[warp][unit][j * 8 + g][t];
            if constexpr (W::SCALES_SUMS) {
              float part[4] = {};
              mma_bf16(part, low, b.x, b.y);
              mma_bf16(part, high, b.z, b.w);
#pragma unroll
              for (int i = 0; i < 4; i++) sums[m][j][i] += part[i] * scales[i / 2];
            } else {
              mma_bf16(sums[m][j], low, b.x, b.y);
              mma_bf16(sums[m][j], high, b.z, b.w);
            }
          }
        }
      }
    };

    for (u32 first = warp * STEP; first < n_columns; first += UNROLL * WARPS * STEP) {
      Loaded loaded[UNROLL][M][2];
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        const u32 start = first + u * WARPS * STEP;
        if (start < n_columns) load(start, loaded[u]);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        const u32 start = first + u * WARPS * STEP;
        if (start >= n_columns) continue;
#pragma unroll
        for (int unit = 0; unit < UNITS; unit += AT_ONCE) {
          __syncwarp();
          bring(start, unit);
          __syncwarp();
          multiply(unit, loaded[u]);
        }
      }
    }

    __syncthreads();
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
      for (int j = 0; j < N_TILES; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          shared.sums[warp][m * 16 + i / 2 * 8 + g][j * 8 + t * 2 + i % 2] = sums[m][j][i];
        }
      }
    }
    if (NORM) {
      for (u32 n = warp; n < n_live; n += WARPS) {
        const float* row = x_row(n);
        float square = 0.0f;
        for (u32 i = lane * 4; i < n_columns; i += 128) {
          const float4 v = *(const float4*)(row + i);
          square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
        square = warp_sum(square);
        if (lane == 0) shared.squares[n] = square;
      }
    }
    __syncthreads();
  }

  // Row r of the weight times row n of x, without the global factor.
  static __device__ __forceinline__ float sum(const Shared& shared, u32 r, u32 n) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
#pragma unroll
      for (int part = 0; part < 3; part++) sum += shared.sums[warp][r][3 * n + part];
    }
    return sum * (float)(1 << W::POWER);
  }

  // The sum of squares of row n of x, after a dot with NORM.
  static __device__ __forceinline__ float square(const Shared& shared, u32 n) {
    return shared.squares[n];
  }
};
