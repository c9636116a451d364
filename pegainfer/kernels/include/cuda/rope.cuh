// Norm and rotation of one head of one token, spread over LANES lanes: half a warp where that leaves each of them two
// pairs or more. Pairs are (i, i + HALF); lane l holds i = l * PAIRS and so on.
#pragma once
#include "cuda/common.cuh"

namespace pega {

constexpr int HALF = HEAD_DIM / 2;
constexpr int LANES = HALF < 32 ? 32 : 16;
constexpr int PAIRS = HALF < 32 ? 1 : HALF / LANES;

struct HeadPairs {
  float low[PAIRS] = {}, high[PAIRS] = {};

  template <typename T>
  __device__ __forceinline__ void take(const T* source, int lane) {
    if (lane * PAIRS >= HALF) return;
    load<PAIRS>(low, source + lane * PAIRS);
    load<PAIRS>(high, source + HALF + lane * PAIRS);
  }

  template <typename T>
  __device__ __forceinline__ void put(T* target, int lane) const {
    if (lane * PAIRS >= HALF) return;
    store<PAIRS>(target + lane * PAIRS, low);
    store<PAIRS>(target + HALF + lane * PAIRS, high);
  }

  // RMSNorm of the head. Only these lanes meet: the other half of the warp may have no head, or one of values.
  __device__ __forceinline__ void normalise(const float* weight, float eps, int lane) {
    HeadPairs factors;
    factors.take(weight, lane);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) sum += low[i] * low[i] + high[i] * high[i];
    const uint32_t mates = LANES == 32 ? 0xffffffffu : 0xffffu << (threadIdx.x & 16);
#pragma unroll
    for (int offset = 1; offset < LANES; offset <<= 1) sum += __shfl_xor_sync(mates, sum, offset);
    const float inverse = rsqrtf(sum / HEAD_DIM + eps);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) low[i] *= inverse * factors.low[i], high[i] *= inverse * factors.high[i];
  }

  // `table`: the position's cosines, then its sines.
  __device__ __forceinline__ void rotate(const float* table, int lane) {
    HeadPairs angle;  // cosine and sine
    angle.take(table, lane);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float a = low[i], b = high[i];
      low[i] = a * angle.low[i] - b * angle.high[i];
      high[i] = b * angle.low[i] + a * angle.high[i];
    }
  }
};

}  // namespace pega
