// Token ids ~i become the token of row i of the last sampling, in place; no token (-1) becomes 0.
// Defines: THREADS.
#include "cuda/common.cuh"

using namespace pega;

extern "C" __global__ void __launch_bounds__(THREADS)
    feed_tokens(int* __restrict__ token_ids, int num_tokens, const int* __restrict__ sampled, int num_sampled) {
  release_successor();
  wait_for_predecessor();
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= num_tokens) return;
  const int row = ~token_ids[i];
  if (row >= 0 && row < num_sampled) token_ids[i] = max(sampled[row], 0);
}
