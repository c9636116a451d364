// Which experts a token goes to: softmax over all of them in float32, the TOP_K largest, equal ones by the lower id.
// One warp a token. Defines: NUM_EXPERTS, TOP_K (at most 32), RENORMALIZE, WARPS.
#include "cuda/common.cuh"

using namespace pega;

constexpr int PER_LANE = (NUM_EXPERTS + 31) / 32;
constexpr unsigned ALL = 0xffffffffu;

// Unsigned integers in the order of floats: 0 is below everything, 1 is NaN, and the two zeros are one.
__device__ __forceinline__ uint32_t order_key(float v) {
  const uint32_t bits = __float_as_uint(v + 0.f);
  return v != v ? 1 : bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_key(uint32_t key) {
  return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    moe_router(const act_t* __restrict__ logits, int64_t logits_stride, int* __restrict__ ids, int64_t ids_stride,
               float* __restrict__ weights, int64_t weights_stride, int num_tokens) {
  release_successor();
  const int token = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_predecessor();
  if (token >= num_tokens) return;
  const act_t* row = logits + token * logits_stride;
  uint32_t keys[PER_LANE], highest = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int id = i * 32 + lane;
    keys[i] = id < NUM_EXPERTS ? order_key(to_float(row[id])) : 0;
    highest = max(highest, keys[i]);
  }
  const float maximum = from_key(__reduce_max_sync(ALL, highest));
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    if (i * 32 + lane < NUM_EXPERTS) sum += expf(from_key(keys[i]) - maximum);
  }
  sum = warp_sum(sum);

  uint32_t my_key = 0;  // lane j keeps choice j
  int my_id = 0;
#pragma unroll
  for (int j = 0; j < TOP_K; ++j) {
    uint32_t best = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      if (keys[i] > best) best = keys[i], at = i * 32 + lane;
    }
    const uint32_t top = __reduce_max_sync(ALL, best);
    const int winner = __reduce_min_sync(ALL, best == top ? static_cast<unsigned>(at) : ALL);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      if (i * 32 + lane == winner) keys[i] = 0;
    }
    if (lane == j) my_key = top, my_id = winner;
  }
  float weight = lane < TOP_K ? expf(from_key(my_key) - maximum) / sum : 0.f;
#if RENORMALIZE
  weight /= warp_sum(weight);
#endif
  if (lane < TOP_K) {
    ids[token * ids_stride + lane] = my_id;
    weights[token * weights_stride + lane] = weight;
  }
}
