// e4m3 numbers as 16-bit activations, which hold all of them exactly. The same bits on every architecture: sign and
// seven bits are moved to where the wider type has them, and a product with a power of two sets the exponent right,
// that of the subnormal numbers too. The two codes of NaN, which no checkpoint has, become 480.
#pragma once
#include "cuda/mma.cuh"

namespace pega {

#if defined(ACT_F16)
constexpr uint32_t MAGNITUDE = 0x3f803f80u;
constexpr int NARROWER = 1;  // bits of the exponent that e4m3 lacks
#else
constexpr uint32_t MAGNITUDE = 0x07f007f0u;
constexpr int NARROWER = 4;
#endif

// Two numbers whose signs are at the top of the halves of `signs`, and whose other bits are where MAGNITUDE is set.
__device__ __forceinline__ uint32_t widen_pair(uint32_t signs, uint32_t magnitudes) {
  const uint32_t bits = (signs & 0x80008000u) | (magnitudes & MAGNITUDE);
#if defined(ACT_F16)
  const uint32_t factor = 0x5c005c00u;  // 2^8
  const __half2 pair = __hmul2(*reinterpret_cast<const __half2*>(&bits), *reinterpret_cast<const __half2*>(&factor));
#else
  const uint32_t factor = 0x7b807b80u;  // 2^120
  const __nv_bfloat162 pair =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), *reinterpret_cast<const __nv_bfloat162*>(&factor));
#endif
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Four numbers as two pairs: the first and the third, the second and the fourth. Neighbours would cost more.
__device__ __forceinline__ void widen(uint32_t numbers, uint32_t& even, uint32_t& odd) {
  even = widen_pair(numbers << 8, numbers << (8 - NARROWER));
  odd = widen_pair(numbers, numbers >> NARROWER);
}

}  // namespace pega
