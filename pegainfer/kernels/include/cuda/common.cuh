// What every kernel needs: the activation type, vector access, reductions, programmatic dependent launch.
// The activation type is chosen at compile time: ACT_BF16, ACT_F16 or ACT_F32.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifdef __CUDACC_RTC__
using uint8_t = unsigned char;
using int64_t = long;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
#define INFINITY __int_as_float(0x7f800000)
#else
#include <cmath>
#include <cstdint>
#endif

namespace pega {

#if defined(ACT_F32)
using act_t = float;
#elif defined(ACT_F16)
using act_t = __half;
#else
using act_t = __nv_bfloat16;
#endif

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) { return v; }
template <>
__device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

// Wait until everything that was launched before this kernel has ended and is visible. Nothing that earlier work
// writes may be read, and nothing that it reads may be written, before this.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the next kernel start as soon as all blocks have come here. Called first thing: the next kernel waits for our end
// before it touches results, but until then it loads its weights, and its own successor may do the same.
__device__ __forceinline__ void release_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 2^v with the hardware's approximation (2 ulp); far below zero it is zero.
__device__ __forceinline__ float power_of_two(float v) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}

// N consecutive values, loaded and stored with 16-byte accesses where N allows it.
template <typename T, int N>
struct alignas((sizeof(T) * N <= 16) ? sizeof(T) * N : 16) Pack {
  T value[N];
};

template <int N, typename T>
__device__ __forceinline__ void load(float (&out)[N], const T* source) {
  const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(source);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = to_float(pack.value[i]);
}

template <int N, typename T>
__device__ __forceinline__ void store(T* target, const float (&in)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.value[i] = from_float<T>(in[i]);
  *reinterpret_cast<Pack<T, N>*>(target) = pack;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}

// Sum over the block; every thread gets it. `scratch` holds 32 floats.
template <int BLOCK>
__device__ __forceinline__ float block_sum(float v, float* scratch) {
  constexpr int warps = BLOCK / 32;
  v = warp_sum(v);
  if (warps == 1) return v;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < warps; ++i) total += scratch[i];
  return total;
}

}  // namespace pega
