// out[n, :] (+)= activation(weight . norm(x[rows[n], :]) + bias) for at most 16 rows and a weight with scales: decode.
//
// Layouts as in matmul_gemv, in_features a multiple of 32 (16 with 8-bit codes). A block owns 16 or 32 rows of the weight, with
// a GLU half of them of up, and multiplies N rows of x at a time. Bytes: the weight once, for more than eight rows again from
// L2; x from L1 and L2 once a block. Bound by the instructions that decode and, with many rows, that split x.
#include "dot_scaled.cuh"
#include "matmul.cuh"

#define SCALED_ARGUMENTS MATMUL_ARGUMENTS, SCALE_ARGUMENTS

template <class W, int N, int M, int WARPS, bool NORM>
__device__ __forceinline__ void gemv(SCALED_ARGUMENTS) {
  typedef DotScaled<W, N, M, WARPS> Dot;
  __shared__ typename Dot::Shared shared;
  begin_kernel();
  const bool glu = p.activation == SILU_GLU;
  const u32 n_own = glu ? Dot::ROWS / 2 : Dot::ROWS;
  const u32 first = blockIdx.x * n_own;
  const Stored gate_rows = {weight, scales, globals}, up_rows = {up, up_scales, up_globals};
  for (u32 start = 0; start < p.n_rows; start += N) {
    const u32 n_live = min(p.n_rows - start, (u32)N);
    Dot::template dot<NORM>(
        shared,
        [&](u32 r) {
          const u32 c = min(first + r % n_own, n_columns - 1);
          return scaled_row<W>(r < n_own ? gate_rows : up_rows, c, p.in_features);
        },
        [&](u32 n) { return x + (i64)(rows != nullptr ? (u32)rows[start + n] : start + n) * p.in_features; }, n_live, norm,
        norm_format, p.in_features);
    for (u32 i = threadIdx.x; i < n_own * n_live; i += WARPS * 32) {
      const u32 n = i / n_own, r = i % n_own, c = first + r;
      if (c >= n_columns) continue;
      const float scale = NORM ? 1.0f / sqrtf(Dot::square(shared, n) / (float)p.in_features + p.eps) : 1.0f;
      const float gate = Dot::sum(shared, r, n) * scale * gate_rows.global(c);
      const float lower = glu ? Dot::sum(shared, n_own + r, n) * scale * up_rows.global(c) : 0.0f;
      finish(p, out, start + n, c, gate, lower, bias, up_bias, bias_format);
    }
    __syncthreads();
  }
}

#define GEMV_SCALED(name, W, N, M, WARPS)                                                                              \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, N > 2 ? 3 : 2)                                              \
      matmul_gemv_##name##_n##N(SCALED_ARGUMENTS) {                                                                    \
    gemv<W, N, M, WARPS, false>(p, out, x, rows, norm, weight, up, bias, up_bias, n_columns, norm_format, bias_format, \
                                scales, up_scales, globals, up_globals);                                               \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, N > 2 ? 3 : 2)                                              \
      matmul_gemv_norm_##name##_n##N(SCALED_ARGUMENTS) {                                                               \
    gemv<W, N, M, WARPS, true>(p, out, x, rows, norm, weight, up, bias, up_bias, n_columns, norm_format, bias_format,  \
                               scales, up_scales, globals, up_globals);                                                \
  }

GEMV_SCALED(fp8, Fp8, 2, 1, 8)
GEMV_SCALED(fp8, Fp8, 8, 2, 4)
GEMV_SCALED(nvfp4, Nvfp4, 2, 1, 8)
GEMV_SCALED(nvfp4, Nvfp4, 8, 2, 4)
GEMV_SCALED(mxfp4, Mxfp4, 2, 1, 8)
GEMV_SCALED(mxfp4, Mxfp4, 8, 2, 4)
