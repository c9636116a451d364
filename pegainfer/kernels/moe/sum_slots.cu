// out[token] += the rows of `said` of a token's slots, added in their order. Needs HIDDEN % 8 == 0.
// Defines: HIDDEN, TOP_K, THREADS. Grid: (tokens, HIDDEN / 8 / THREADS).
#include "cuda/common.cuh"

using namespace pega;

extern "C" __global__ void __launch_bounds__(THREADS)
    sum_slots(const act_t* __restrict__ said, act_t* __restrict__ out, int64_t out_stride) {
  release_successor();
  const int column = (blockIdx.y * THREADS + threadIdx.x) * 8;
  const int64_t token = blockIdx.x;
  wait_for_predecessor();
  if (column >= HIDDEN) return;
  act_t* target = out + token * out_stride + column;
  const act_t* source = said + token * TOP_K * HIDDEN + column;
  float total[8];
  load<8>(total, target);
#pragma unroll 8
  for (int j = 0; j < TOP_K; ++j) {
    float values[8];
    load<8>(values, source + j * HIDDEN);
#pragma unroll
    for (int i = 0; i < 8; ++i) total[i] += values[i];
  }
  store<8>(target, total);
}
