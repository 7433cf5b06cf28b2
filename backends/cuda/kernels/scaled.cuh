// Weights with scales: how codes become numbers. An element is code * scale, times a global factor of its row in NVFP4.
//
// | format | code | columns of a group | scale |
// |---|---|---|---|
// | fp8 | e4m3 | 128 | f32 |
// | nvfp4 | e2m1 | 16 | e4m3 |
// | mxfp4 | e2m1 | 32 | e8m0 |
//
// Bits of a code put at the right place of a float are the code over a power of two, subnormal codes too; one product puts
// that right. Codes times scales of NVFP4 and MXFP4 have at most six bits: in bf16 they are exact.
#pragma once
#include "common.cuh"

// A power of two as bf16, twice.
__device__ constexpr u32 bf16x2_power(int exponent) { return (u32)(127 + exponent) << 7 | (u32)(127 + exponent) << 23; }

// What powers of two are over what the bits of codes are.
constexpr int E2M1_POWER = 126;
constexpr int E4M3_POWER = 120;
// Codes of NVFP4 times scales are kept over this power of two, since 2^126 times the largest scale is no bf16.
constexpr int NVFP4_POWER = 7;

// Pairs of the 4-bit codes of a word, (i, i + 4) in place i, over 2^126. One product is two shifts that meet nowhere, of the
// sign and of the rest; it spares the units of whole numbers, which bound decode.
__device__ __forceinline__ void e2m1_pairs(u32 word, u32 (&out)[4]) {
  constexpr u32 EVEN = 0x000f000fu, ODD = 0x00f000f0u, PLACES = 0x81c081c0u;
  const u32 upper = word >> 8;
  out[0] = (word & EVEN) * (1 << 12 | 1 << 6) & PLACES;
  out[1] = (word & ODD) * (1 << 8 | 1 << 2) & PLACES;
  out[2] = (upper & EVEN) * (1 << 12 | 1 << 6) & PLACES;
  out[3] = (upper & ODD) * (1 << 8 | 1 << 2) & PLACES;
}

// Pairs of the 8-bit codes of a word, (0, 2) and (1, 3), over 2^120.
__device__ __forceinline__ void e4m3_pairs(u32 word, u32& even, u32& odd) {
  constexpr u32 SIGN = 0x80008000u, REST = 0x07f007f0u;
  even = (word << 8 & SIGN) | (word << 4 & REST);
  odd = (word & SIGN) | (word >> 4 & REST);
}

// Lower halves of both, and upper halves.
__device__ __forceinline__ u32 lower_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 upper_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

__device__ __forceinline__ float e2m1_to_f32(u32 code) {
  return bits_to_f32((code & 8) << 28 | (code & 7) << 22) * 0x1p126f;
}

// Sets a bit of 0x80808080 where one of the four 8-bit codes of a word is no number.
__device__ __forceinline__ u32 e4m3_nans(u32 word) { return (word & 0x7f7f7f7fu) + 0x01010101u; }

__device__ __forceinline__ bool has_nan(uint4 codes) {
  const u32 nans = e4m3_nans(codes.x) | e4m3_nans(codes.y) | e4m3_nans(codes.z) | e4m3_nans(codes.w);
  return (nans & 0x80808080u) != 0;
}

__device__ __forceinline__ float e4m3_to_f32(u32 code) {
  if ((code & 0x7f) == 0x7f) return NOT_A_NUMBER;
  return bits_to_f32((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f;
}

// The bits of 2^(code - 127) as bf16, and so the upper half of it as f32; code 255 is no number.
__device__ __forceinline__ u32 e8m0_to_bf16(u32 code) { return code == 0 ? 0x40 : code == 255 ? 0x7fc0 : code << 7; }

// Two scales of NVFP4, in 16 bits, times 2^119: what turns codes over 2^126 into elements over 2^7. A code that is no number
// gives none.
__device__ __forceinline__ u32 nvfp4_factors(u32 scales) {
  const u32 spread = (scales | scales << 8) & 0x00ff00ffu;
  u32 bits = (spread << 8 & 0x80008000u) | (spread << 4 & 0x07f007f0u);
  // One more than such a code carries into bit 11; with the four bits from there on set, its exponent is all ones.
  bits += (bits + 0x00100010u & 0x08000800u) * 15;
  return mul_bf16x2(mul_bf16x2(bits, bf16x2_power(E4M3_POWER)), bf16x2_power(E2M1_POWER - NVFP4_POWER));
}

// A row of a weight of any format, null outside of it.
struct StoredRow {
  u32 format;
  const u8* codes;
  const u8* scales;

  // An element without the global factor.
  __device__ __forceinline__ float at(u32 column) const {
    if (codes == nullptr) return 0.0f;
    if (format < FORMAT_FP8) return element(codes, format, column);
    if (format == FORMAT_FP8) return e4m3_to_f32(codes[column]) * ((const float*)scales)[column / 128];
    const float code = e2m1_to_f32(codes[column / 2] >> column % 2 * 4);
    if (format == FORMAT_NVFP4) return code * e4m3_to_f32(scales[column / 16]);
    return code * bits_to_f32(e8m0_to_bf16(scales[column / 32]) << 16);
  }
};

// Where the parts of a weight lie: codes [*, n_columns], the scales of each row, and a factor a row or null.
struct Stored {
  const void* codes;
  const void* scales;
  const float* globals;

  __device__ __forceinline__ StoredRow row(u32 format, u32 row, u32 n_columns) const {
    u32 code_bytes = n_columns * 2, scale_bytes = 0;
    if (format == FORMAT_F32) code_bytes = n_columns * 4;
    if (format == FORMAT_FP8) code_bytes = n_columns, scale_bytes = (n_columns + 127) / 128 * 4;
    if (format == FORMAT_NVFP4) code_bytes = n_columns / 2, scale_bytes = n_columns / 16;
    if (format == FORMAT_MXFP4) code_bytes = n_columns / 2, scale_bytes = n_columns / 32;
    return {format, (const u8*)codes + (i64)row * code_bytes, (const u8*)scales + (i64)row * scale_bytes};
  }

  __device__ __forceinline__ float global(u32 row) const { return globals != nullptr ? globals[row] : 1.0f; }
};

// A row times x, element by element: for rows that start anywhere.
__device__ __forceinline__ float dot_any(const Stored& weight, u32 format, u32 row, const float* x, u32 n_columns) {
  const StoredRow w = weight.row(format, row, n_columns);
  float sum = 0.0f;
  for (u32 i = threadIdx.x % 32; i < n_columns; i += 32) sum += w.at(i) * x[i];
  return warp_sum(sum) * weight.global(row);
}
