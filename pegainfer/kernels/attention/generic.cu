// Paged causal attention for any element type and head size: one warp a query head of a token, two passes over nothing
// but its own keys, float32 throughout. It serves what the tensor-core kernels do not: float32 models and odd sizes.
//
// A KV block of a layer holds keys [kv_head][BLOCK_SIZE][HEAD_DIM], then values alike.
// Defines: HEAD_DIM (at most 256), NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, KV_*.
#include "cuda/common.cuh"

using namespace pega;

#if defined(KV_F32)
using kv_t = float;
#elif defined(KV_F16)
using kv_t = __half;
#else
using kv_t = __nv_bfloat16;
#endif

constexpr int WARPS = 4;
constexpr int PER_LANE = (HEAD_DIM + 31) / 32;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    paged_attention_generic(const act_t* __restrict__ q, int64_t q_stride, const uint8_t* __restrict__ kv,
                            int64_t kv_block_stride, const int* __restrict__ block_tables, int64_t table_stride,
                            const int* __restrict__ query_start_loc, const int* __restrict__ seq_lens,
                            act_t* __restrict__ out, int64_t out_stride, int num_requests, float scale) {
  release_successor();
  const int head = blockIdx.y * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = blockIdx.x;
  wait_for_predecessor();
  if (head >= NUM_HEADS) return;
  int request = 0;
  while (request < num_requests && token >= query_start_loc[request + 1]) ++request;
  float query[PER_LANE], output[PER_LANE] = {};
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int d = i * 32 + lane;
    query[i] = d < HEAD_DIM ? to_float(q[token * q_stride + head * HEAD_DIM + d]) * scale : 0.f;
  }
  const int num_keys = request < num_requests ? seq_lens[request] - (query_start_loc[request + 1] - token) + 1 : 0;
  float maximum = -1e30f, sum = 0.f;
  for (int key = 0; key < num_keys; ++key) {
    const int block = block_tables[request * table_stride + key / BLOCK_SIZE];
    const kv_t* keys = reinterpret_cast<const kv_t*>(kv + block * kv_block_stride) +
                       (head / (NUM_HEADS / NUM_KV_HEADS) * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM;
    const kv_t* values = keys + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM;
    float score = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int d = i * 32 + lane;
      if (d < HEAD_DIM) score += query[i] * to_float(keys[d]);
    }
    score = warp_sum(score);
    const float top = fmaxf(maximum, score), rescale = expf(maximum - top), weight = expf(score - top);
    maximum = top;
    sum = sum * rescale + weight;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int d = i * 32 + lane;
      output[i] = output[i] * rescale + (d < HEAD_DIM ? weight * to_float(values[d]) : 0.f);
    }
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int d = i * 32 + lane;
    if (d < HEAD_DIM) {
      out[token * out_stride + head * HEAD_DIM + d] = from_float<act_t>(sum > 0.f ? output[i] / sum : 0.f);
    }
  }
}
