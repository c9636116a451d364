// e4m3 numbers as 16-bit activations, which hold all of them exactly. The same bits on every architecture: sign and
// seven bits are moved to where the wider type has them, and a product with a power of two sets the exponent right,
// that of the subnormal numbers too. The two codes of NaN, which no checkpoint has, become 480.
#pragma once
#include "cuda/mma.cuh"

namespace pega {

// Two numbers from the high bytes of the halves of `bytes`; the low bytes are zero.
__device__ __forceinline__ uint32_t widen_pair(uint32_t bytes) {
#if defined(ACT_F16)
  const uint32_t bits = (bytes & 0x80008000u) | ((bytes >> 1) & 0x3f803f80u), factor = 0x5c005c00u;  // 2^8
  const __half2 pair = __hmul2(*reinterpret_cast<const __half2*>(&bits), *reinterpret_cast<const __half2*>(&factor));
#else
  const uint32_t bits = (bytes & 0x80008000u) | ((bytes >> 4) & 0x07f007f0u), factor = 0x7b807b80u;  // 2^120
  const __nv_bfloat162 pair =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), *reinterpret_cast<const __nv_bfloat162*>(&factor));
#endif
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Four numbers as two pairs, in order.
__device__ __forceinline__ void widen(uint32_t numbers, uint32_t& first, uint32_t& second) {
  first = widen_pair(__byte_perm(numbers, 0u, 0x1404));
  second = widen_pair(__byte_perm(numbers, 0u, 0x3424));
}

}  // namespace pega
