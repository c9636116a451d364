// One pass over the merged projections of a token: optional RMSNorm of each q and k head, half-split rotation,
// q to `out`, k and v to their slots of the paged cache.
// LANES lanes take one head of one token (see rope.cuh).
// Layout of a layer's block: keys [kv_head][BLOCK_SIZE][HEAD_DIM], then values alike.
// Defines: HEAD_DIM (even; half of it at most 32 or a multiple of 32), NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, QK_NORM, WARPS,
// KV_*.
#include "cuda/rope.cuh"

using namespace pega;

#if defined(KV_F32)
using kv_t = float;
#elif defined(KV_F16)
using kv_t = __half;
#else
using kv_t = __nv_bfloat16;
#endif

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
  HeadPairs pairs;
  pairs.take(source, lane);
  const bool is_query = head < NUM_HEADS, is_value = head >= NUM_HEADS + NUM_KV_HEADS;
  if (!is_value) {
#if QK_NORM
    pairs.normalise(is_query ? q_norm : k_norm, eps, lane);
#endif
    pairs.rotate(cos_sin + (int64_t)positions[token] * HEAD_DIM, lane);
  }
  if (is_query) {
    pairs.put(out + token * out_stride + head * HEAD_DIM, lane);
    return;
  }
  const int slot = slot_mapping[token];
  if (slot < 0) return;
  const int kv_head = (head - NUM_HEADS) % NUM_KV_HEADS;
  kv_t* block = reinterpret_cast<kv_t*>(kv + (int64_t)(slot / BLOCK_SIZE) * kv_block_stride);
  pairs.put(block + ((is_value ? NUM_KV_HEADS : 0) + kv_head) * BLOCK_SIZE * HEAD_DIM + (slot % BLOCK_SIZE) * HEAD_DIM,
            lane);
}
