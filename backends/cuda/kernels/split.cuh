// f32 on tensor cores that take bf16.
#pragma once
#include "common.cuh"

// Two f32, each as a sum of three bf16 that is the value to the last bit or nearly.
struct Split {
  u32 parts[3];
  __device__ __forceinline__ Split(float a, float b) {
#pragma unroll
    for (int i = 0; i < 3; i++) {
      parts[i] = pack_bf16(a, b);
      a -= bits_to_f32(parts[i] << 16);
      b -= bits_to_f32(parts[i] & 0xffff0000u);
    }
  }
};
