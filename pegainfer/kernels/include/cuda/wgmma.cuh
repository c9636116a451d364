// Hopper's warpgroup products: shared-memory descriptors, barriers, copies of boxes, and the m64n128k16 product. sm_90a
// only.
// Operands in shared memory lie in rows of 128 bytes with the hardware's 128-byte swizzle: the 16-byte unit u of row r
// stands at r * 128 + ((u ^ (r & 7)) * 16), from a base aligned to 1024 bytes.
#pragma once
#include "cuda/mma.cuh"

namespace pega {

__device__ __forceinline__ uint32_t swizzled_offset(int row, int unit) {
  return row * 128 + ((unit ^ (row & 7)) * 16);
}

// Descriptor of an operand. `leading` is the distance in bytes of 64-element column blocks (used where the contiguous
// dimension is not the reduced one); groups of 8 rows lie 1024 bytes apart.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t address, uint32_t leading) {
  return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
         (uint64_t)1 << 62;
}

__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keep the compiler from moving accesses of accumulators across asynchronous products.
template <int N>
__device__ __forceinline__ void fence_registers(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

#define PEGA_ACC8(a, i) "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3]), "+f"(a[i + 4]), "+f"(a[i + 5]), \
                        "+f"(a[i + 6]), "+f"(a[i + 7])
#define PEGA_ACC64(a) PEGA_ACC8(a, 0), PEGA_ACC8(a, 8), PEGA_ACC8(a, 16), PEGA_ACC8(a, 24), PEGA_ACC8(a, 32), \
                      PEGA_ACC8(a, 40), PEGA_ACC8(a, 48), PEGA_ACC8(a, 56)
#define PEGA_REGS64                                                                                              \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
  "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,"     \
  "%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#if defined(ACT_F16)
#define PEGA_WGMMA "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
#else
#define PEGA_WGMMA "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
#endif

// c[64, 128] (+)= a[64, 16] b[128, 16]^T, both in shared memory with the reduced dimension contiguous.
__device__ __forceinline__ void product_shared(float (&c)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n" PEGA_WGMMA PEGA_REGS64 ", %64, %65, p, 1, 1, 0, 0;\n}"
               : PEGA_ACC64(c)
               : "l"(a), "l"(b), "r"(accumulate));
}

// c[64, 128] += a[64, 16] b[16, 128]: a in registers, b in shared memory with its 128 columns contiguous.
__device__ __forceinline__ void product_registers(float (&c)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                  uint64_t b, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n" PEGA_WGMMA PEGA_REGS64
               ", {%64,%65,%66,%67}, %68, p, 1, 1, 1;\n}"
               : PEGA_ACC64(c)
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate));
}

// Barriers in shared memory that count arrivals; a phase ends when all have arrived.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive, and let the phase wait for `bytes` of copies, too.
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// What the driver makes of a tensor's address, sizes and strides; a parameter of a kernel (`__grid_constant__`).
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// Copy the box that begins at these coordinates, fastest first, to shared memory; `barrier` counts its bytes.
__device__ __forceinline__ void copy_box(uint32_t target, const TensorMap& map, int c0, int c1, int c2, int c3,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          target),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Wait until the phase with this parity has ended.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  int done = 0;
  while (!done) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  }
}

// Make shared memory that this thread wrote visible to the tensor cores.
__device__ __forceinline__ void fence_for_tensor_cores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace pega
