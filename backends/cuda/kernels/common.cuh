// What kernels share: elements of weights, sums over a warp, the last block of several.
#pragma once
#include "ptx.cuh"

#define FULL_WARP 0xffffffffu

#define NEG_INFINITY __int_as_float(0xff800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)

// How elements of a weight are stored, as the host numbers it.
constexpr u32 FORMAT_F32 = 0;
constexpr u32 FORMAT_BF16 = 1;
constexpr u32 FORMAT_F16 = 2;
constexpr u32 FORMAT_FP8 = 3;
constexpr u32 FORMAT_NVFP4 = 4;
constexpr u32 FORMAT_MXFP4 = 5;

__device__ __forceinline__ float bits_to_f32(u32 bits) { return __uint_as_float(bits); }

struct F32 {
  typedef float Element;
  static constexpr int PER_16_BYTES = 4;
  static __device__ __forceinline__ float to_f32(float v) { return v; }
  static __device__ __forceinline__ void unpack(uint4 v, float (&out)[4]) {
    out[0] = bits_to_f32(v.x);
    out[1] = bits_to_f32(v.y);
    out[2] = bits_to_f32(v.z);
    out[3] = bits_to_f32(v.w);
  }
};

struct Bf16 {
  typedef u16 Element;
  static constexpr int PER_16_BYTES = 8;
  static __device__ __forceinline__ float to_f32(u16 v) { return bits_to_f32((u32)v << 16); }
  static __device__ __forceinline__ void unpack(uint4 v, float (&out)[8]) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      out[2 * i] = bits_to_f32(words[i] << 16);
      out[2 * i + 1] = bits_to_f32(words[i] & 0xffff0000u);
    }
  }
};

struct F16 {
  typedef u16 Element;
  static constexpr int PER_16_BYTES = 8;
  static __device__ __forceinline__ float to_f32(u16 v) { return f16_to_f32(v); }
  static __device__ __forceinline__ void unpack(uint4 v, float (&out)[8]) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      out[2 * i] = f16_to_f32((u16)words[i]);
      out[2 * i + 1] = f16_to_f32((u16)(words[i] >> 16));
    }
  }
};

// Element i of a weight whose format is known at run time only.
__device__ __forceinline__ float element(const void* weight, u32 format, i64 i) {
  if (format == FORMAT_F32) return ((const float*)weight)[i];
  const u16 v = ((const u16*)weight)[i];
  return format == FORMAT_BF16 ? Bf16::to_f32(v) : F16::to_f32(v);
}

__device__ __forceinline__ u16 to_bf16(float v) { return (u16)pack_bf16(v, 0.0f); }

// Divisions within two units in the last place: an exact one is a call, which spills registers.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) v += __shfl_xor_sync(FULL_WARP, v, lanes);
  return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, lanes));
  return v;
}

// Sum over the block, in every thread. `partial` has room for a float a warp; the block may use it again afterwards.
__device__ __forceinline__ float block_sum(float v, float* partial) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  v = warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : 0.0f);
  __syncthreads();
  return v;
}

// `exp(v - max)` where both may be minus infinity: nothing weighs nothing.
__device__ __forceinline__ float exp_below(float v, float max) {
  return v == NEG_INFINITY ? 0.0f : expf(v - max);
}

// The same of powers of two.
__device__ __forceinline__ float exp2_below(float v, float max) {
  return v == NEG_INFINITY ? 0.0f : exp2f(v - max);
}

// exp(x) = exp2(x * LOG2_E)
constexpr float LOG2_E = 1.4426950408889634f;

// Whether this block is the last of `n_blocks` to come here; what all of them wrote before is visible to it. Resets the
// counter, so that the next launch finds it at zero.
__device__ __forceinline__ bool is_last_block(u32* counter, u32 n_blocks) {
  __threadfence();
  u32 before = 0;
  __syncthreads();
  if (threadIdx.x == 0) before = atomicAdd(counter, 1u);
  const bool last = __syncthreads_or(threadIdx.x == 0 && before == n_blocks - 1);
  if (last) {
    if (threadIdx.x == 0) *counter = 0;
    __threadfence();
  }
  return last;
}

// Parameters of the ops, as the host lays them out.
struct EmbedParams {
  u32 n_rows, hidden, vocab;
};

struct MatMulParams {
  u32 n_rows, in_features, out_features, activation, accumulate;
  float eps;
};

struct RopeCacheParams {
  u32 n_rows, n_heads, n_kv_heads, head_dim, rotary_dim, max_positions;
  float eps;
};

struct AttentionParams {
  u32 n_rows, n_sequences, max_pages, n_heads, n_kv_heads, head_dim;
  float scale;
};

struct ShortConvParams {
  u32 n_rows, n_sequences, n_slots, channels, x_width, kernel;
};

struct GatedDeltaParams {
  u32 n_rows, n_sequences, n_slots, n_key_heads, n_value_heads, key_dim, value_dim, z_width, z_start, ba_width, ba_start;
  float eps;
};

// The rows of a sequence in a batch, `first` to before `end`, and the slot of its state, which holds something if `resumes` is 1.
struct Span {
  int first, end, slot, resumes;
};

struct RouteParams {
  u32 n_rows, hidden, n_experts, top_k, renormalize;
  float eps;
};

struct ExpertMlpParams {
  u32 n_rows, top_k, hidden, intermediate, n_experts, in_place;
};

struct CombineParams {
  u32 n_rows, top_k, hidden;
};

struct EditLogitsParams {
  u32 n_rows, vocab, capacity;
};

struct TopLogitsParams {
  u32 n_rows, vocab, k;
};

constexpr u32 SILU_GLU = 1;
constexpr int PAGE_TOKENS = 16;
