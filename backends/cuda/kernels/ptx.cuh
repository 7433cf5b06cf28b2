// The instructions that CUDA C++ has no word for, one function each, and nothing else.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Dynamic shared memory of the block, as bytes.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]

// Waits until all can be seen that kernels before this one wrote. A kernel that comes onto the device ahead of its turn reads nothing in
// front of this but what the host wrote, or what the kernel before it in its op had waited for, and writes nothing; of each grid a block
// comes here, so that grids end in order.
__device__ __forceinline__ void begin_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel behind this one may come onto the device when all blocks have come here or left. Its blocks crowd on the multiprocessors
// that are free first, so what reads much is better not in front of others.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
// Rank of this block in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Writes a number of the shared memory of another block of the cluster, where it lies as `own` does here.
__device__ __forceinline__ void store_in_cluster(float* own, u32 rank, float v) {
  const u32 here = (u32)__cvta_generic_to_shared(own);
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(v) : "memory");
}

// A barrier of all threads of a cluster in two halves: behind the second one, all is seen that was written in front of the first.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#endif

// 16 bytes of a weight: read once, so kept out of L1.
__device__ __forceinline__ uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// 16 bytes that the host wrote before it released a word that a thread of this block has acquired, in front of a barrier. Loads
// of a warp travel together, which those of single shared words do not.
__device__ __forceinline__ uint4 load_from_host(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Eight bytes that the host writes while kernels run.
__device__ __forceinline__ u64 load_shared_with_host(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p));
  return v;
}

// The same; loads behind it see what the host wrote before it released the value.
__device__ __forceinline__ u64 load_acquire_from_host(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

// The host that acquires the value sees what this thread wrote before it, and what others did in front of a barrier.
__device__ __forceinline__ void store_release_to_host(u64* p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// The same between blocks.
__device__ __forceinline__ u64 load_acquire(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_release(u64* p, u64 v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// A clock of the whole device.
__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ float f16_to_f32(u16 v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
}

// 2^v within 2^-22 of itself, 0 below 2^-126.
__device__ __forceinline__ float exp2_fast(float v) {
  float f;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(f) : "f"(v));
  return f;
}

// Two f32 rounded to nearest even: `low` in the lower half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

// Products of two pairs of bf16, rounded to nearest even; subnormal numbers count.
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
  u32 v;
  // Plus minus zero: a product alone has no instruction before sm_90.
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(0x80008000u));
  return v;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copies 16 bytes to shared memory behind the thread's back; writes zeros where `live` is false, and then reads nothing.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool live) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(live ? 16 : 0)
               : "memory");
}

// The same of eight bytes.
__device__ __forceinline__ void copy_async_8(void* shared, const void* global, bool live) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(live ? 8 : 0)
               : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N groups of this thread's copies are under way.
template <int N>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane i names row i % 8 of matrix i / 8. Lane l receives elements 2 * (l % 4) and
// the next one of row l / 4 of each.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], const void* row) { load_matrices(r, shared_address(row)); }

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], const void* row) { load_matrices_transposed(r, shared_address(row)); }

// d[16, 8] += a[16, 16] . b[16, 8], bf16 in and f32 out. With g = lane / 4 and t = lane % 4: d = (g, 2t), (g, 2t + 1),
// (g + 8, 2t), (g + 8, 2t + 1); a = pairs from (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); b = pairs from
// (2t, g), (2t + 8, g), down.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
