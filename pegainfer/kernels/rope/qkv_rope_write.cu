// One pass over the merged projections of a token: optional RMSNorm of each q and k head, half-split rotation,
// q to `out`, k and v to their slots of the paged cache.
// LANES lanes take one head of one token: half a warp where that leaves each of them two pairs or more.
// Layout of a layer's block: keys [kv_head][BLOCK_SIZE][HEAD_DIM], then values alike.
// Defines: HEAD_DIM (even; half of it at most 32 or a multiple of 32), NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, QK_NORM, WARPS,
// KV_*.
#include "cuda/common.cuh"

using namespace pega;

#if defined(KV_F32)
using kv_t = float;
#elif defined(KV_F16)
using kv_t = __half;
#else
using kv_t = __nv_bfloat16;
#endif

constexpr int HALF = HEAD_DIM / 2;
constexpr int LANES = HALF < 32 ? 32 : 16;
constexpr int PAIRS = HALF < 32 ? 1 : HALF / LANES;  // pairs (i, i + HALF) a lane; lane l holds i = l * PAIRS ...
constexpr int HEADS = NUM_HEADS + 2 * NUM_KV_HEADS;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    qkv_rope_write(const act_t* __restrict__ qkv, int64_t qkv_stride, const int* __restrict__ positions,
                   const int* __restrict__ slot_mapping, const float* __restrict__ cos_sin,
                   const float* __restrict__ q_norm, const float* __restrict__ k_norm, uint8_t* __restrict__ kv,
                   int64_t kv_block_stride, act_t* __restrict__ out, int64_t out_stride, float eps) {
  release_successor();
  const int head = blockIdx.y * (WARPS * 32 / LANES) + threadIdx.x / LANES;
  const int lane = threadIdx.x % LANES;
  const int64_t token = blockIdx.x;
  if (head >= HEADS) return;
  wait_for_predecessor();
  const act_t* source = qkv + token * qkv_stride + head * HEAD_DIM;
  const bool active = lane * PAIRS < HALF;
  float low[PAIRS] = {}, high[PAIRS] = {};
  if (active) {
    load<PAIRS>(low, source + lane * PAIRS);
    load<PAIRS>(high, source + HALF + lane * PAIRS);
  }
  const bool is_query = head < NUM_HEADS, is_value = head >= NUM_HEADS + NUM_KV_HEADS;
  if (!is_value) {
#if QK_NORM
    const float* weight = is_query ? q_norm : k_norm;
    float sum = 0.f, w_low[PAIRS] = {}, w_high[PAIRS] = {};
    if (active) {
      load<PAIRS>(w_low, weight + lane * PAIRS);
      load<PAIRS>(w_high, weight + HALF + lane * PAIRS);
    }
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) sum += low[i] * low[i] + high[i] * high[i];
    // Of these lanes only: the other half of the warp may have no head, or one of values.
    const uint32_t mates = LANES == 32 ? 0xffffffffu : 0xffffu << (threadIdx.x & 16);
#pragma unroll
    for (int offset = 1; offset < LANES; offset <<= 1) sum += __shfl_xor_sync(mates, sum, offset);
    const float inverse = rsqrtf(sum / HEAD_DIM + eps);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) low[i] *= inverse * w_low[i], high[i] *= inverse * w_high[i];
#endif
    const float* table = cos_sin + (int64_t)positions[token] * HEAD_DIM;
    float cosine[PAIRS] = {}, sine[PAIRS] = {};
    if (active) {
      load<PAIRS>(cosine, table + lane * PAIRS);
      load<PAIRS>(sine, table + HALF + lane * PAIRS);
    }
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float a = low[i], b = high[i];
      low[i] = a * cosine[i] - b * sine[i];
      high[i] = b * cosine[i] + a * sine[i];
    }
  }
  if (!active) return;
  if (is_query) {
    act_t* target = out + token * out_stride + head * HEAD_DIM;
    store<PAIRS>(target + lane * PAIRS, low);
    store<PAIRS>(target + HALF + lane * PAIRS, high);
    return;
  }
  const int slot = slot_mapping[token];
  if (slot < 0) return;
  const int kv_head = (head - NUM_HEADS) % NUM_KV_HEADS;
  kv_t* block = reinterpret_cast<kv_t*>(kv + (int64_t)(slot / BLOCK_SIZE) * kv_block_stride);
  kv_t* target = block + ((is_value ? NUM_KV_HEADS : 0) + kv_head) * BLOCK_SIZE * HEAD_DIM +
                 (slot % BLOCK_SIZE) * HEAD_DIM;
  store<PAIRS>(target + lane * PAIRS, low);
  store<PAIRS>(target + HALF + lane * PAIRS, high);
}
