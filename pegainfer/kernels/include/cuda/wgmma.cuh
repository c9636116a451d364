// Hopper's warpgroup products: shared-memory descriptors, barriers, copies of boxes, and the m64nNk16 products. sm_90a
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

// Accumulators of products of other widths, 16 columns (8 registers) at a time, as text and as operands; %0 to %2 are the
// descriptors and whether to accumulate.
#define PEGA_R1 "%3,%4,%5,%6,%7,%8,%9,%10"
#define PEGA_R2 PEGA_R1 ",%11,%12,%13,%14,%15,%16,%17,%18"
#define PEGA_R3 PEGA_R2 ",%19,%20,%21,%22,%23,%24,%25,%26"
#define PEGA_R4 PEGA_R3 ",%27,%28,%29,%30,%31,%32,%33,%34"
#define PEGA_R5 PEGA_R4 ",%35,%36,%37,%38,%39,%40,%41,%42"
#define PEGA_R6 PEGA_R5 ",%43,%44,%45,%46,%47,%48,%49,%50"
#define PEGA_R7 PEGA_R6 ",%51,%52,%53,%54,%55,%56,%57,%58"
#define PEGA_R8 PEGA_R7 ",%59,%60,%61,%62,%63,%64,%65,%66"
#define PEGA_R9 PEGA_R8 ",%67,%68,%69,%70,%71,%72,%73,%74"
#define PEGA_R10 PEGA_R9 ",%75,%76,%77,%78,%79,%80,%81,%82"
#define PEGA_R11 PEGA_R10 ",%83,%84,%85,%86,%87,%88,%89,%90"
#define PEGA_R12 PEGA_R11 ",%91,%92,%93,%94,%95,%96,%97,%98"
#define PEGA_R13 PEGA_R12 ",%99,%100,%101,%102,%103,%104,%105,%106"
#define PEGA_R14 PEGA_R13 ",%107,%108,%109,%110,%111,%112,%113,%114"
#define PEGA_R15 PEGA_R14 ",%115,%116,%117,%118,%119,%120,%121,%122"
#define PEGA_R16 PEGA_R15 ",%123,%124,%125,%126,%127,%128,%129,%130"
#define PEGA_A1(c) PEGA_ACC8(c, 0)
#define PEGA_A2(c) PEGA_A1(c), PEGA_ACC8(c, 8)
#define PEGA_A3(c) PEGA_A2(c), PEGA_ACC8(c, 16)
#define PEGA_A4(c) PEGA_A3(c), PEGA_ACC8(c, 24)
#define PEGA_A5(c) PEGA_A4(c), PEGA_ACC8(c, 32)
#define PEGA_A6(c) PEGA_A5(c), PEGA_ACC8(c, 40)
#define PEGA_A7(c) PEGA_A6(c), PEGA_ACC8(c, 48)
#define PEGA_A8(c) PEGA_A7(c), PEGA_ACC8(c, 56)
#define PEGA_A9(c) PEGA_A8(c), PEGA_ACC8(c, 64)
#define PEGA_A10(c) PEGA_A9(c), PEGA_ACC8(c, 72)
#define PEGA_A11(c) PEGA_A10(c), PEGA_ACC8(c, 80)
#define PEGA_A12(c) PEGA_A11(c), PEGA_ACC8(c, 88)
#define PEGA_A13(c) PEGA_A12(c), PEGA_ACC8(c, 96)
#define PEGA_A14(c) PEGA_A13(c), PEGA_ACC8(c, 104)
#define PEGA_A15(c) PEGA_A14(c), PEGA_ACC8(c, 112)
#define PEGA_A16(c) PEGA_A15(c), PEGA_ACC8(c, 120)
#if defined(ACT_F16)
#define PEGA_TYPES "f32.f16.f16 "
#else
#define PEGA_TYPES "f32.bf16.bf16 "
#endif

// c[64, WIDTH] (+)= a[64, 16] b[WIDTH, 16]^T, both in shared memory with the reduced dimension contiguous.
template <int WIDTH>
__device__ __forceinline__ void product_of_width(float (&c)[WIDTH / 2], uint64_t a, uint64_t b, int accumulate);

#define PEGA_PRODUCT(STEPS, WIDTH)                                                                                    \
  template <>                                                                                                         \
  __device__ __forceinline__ void product_of_width<WIDTH>(float(&c)[WIDTH / 2], uint64_t a, uint64_t b,               \
                                                          int accumulate) {                                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nwgmma.mma_async.sync.aligned.m64n" #WIDTH "k16." PEGA_TYPES \
                 "{" PEGA_R##STEPS "}, %0, %1, p, 1, 1, 0, 0;\n}"                                                     \
                 : "+l"(a), "+l"(b), "+r"(accumulate), PEGA_A##STEPS(c));                                              \
  }
PEGA_PRODUCT(1, 16)
PEGA_PRODUCT(2, 32)
PEGA_PRODUCT(3, 48)
PEGA_PRODUCT(4, 64)
PEGA_PRODUCT(5, 80)
PEGA_PRODUCT(6, 96)
PEGA_PRODUCT(7, 112)
PEGA_PRODUCT(8, 128)
PEGA_PRODUCT(9, 144)
PEGA_PRODUCT(10, 160)
PEGA_PRODUCT(11, 176)
PEGA_PRODUCT(12, 192)
PEGA_PRODUCT(13, 208)
PEGA_PRODUCT(14, 224)
PEGA_PRODUCT(15, 240)
PEGA_PRODUCT(16, 256)
#undef PEGA_PRODUCT

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

// The same for a matrix.
__device__ __forceinline__ void copy_rows(uint32_t target, const TensorMap& map, int column, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          target),
      "l"(&map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

__device__ __forceinline__ void copy_rows(uint32_t target, const TensorMap& map, int column, int row, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], "
      "[%2], %5;" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "l"(policy)
      : "memory");
}

// The same to the same place in every block of the cluster that `blocks` has a bit for; each one's barrier counts.
__device__ __forceinline__ void copy_rows_to(int blocks, uint32_t target, const TensorMap& map, int column, int row,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "h"((unsigned short)blocks)
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

// Blocks of a cluster: this one's number, a barrier for all threads of all, and shared memory of any of them.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Arrive at a barrier of any block of the cluster. Releases nothing to other blocks: that would cost most of a microsecond.
__device__ __forceinline__ void barrier_arrive_in(uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}

__device__ __forceinline__ void add_shared(float2& sum, uint32_t address) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  sum.x += v.x;
  sum.y += v.y;
}

// Make shared memory that this thread wrote visible to the tensor cores.
__device__ __forceinline__ void fence_for_tensor_cores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace pega
