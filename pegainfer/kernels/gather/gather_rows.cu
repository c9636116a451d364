// Rows by index: out[i] = table[indices[i]]. Serves the embedding lookup and the choice of rows that yield logits.
// Defines: SIZE (columns), THREADS. An index outside [0, num_rows) gives zeros: padding rows carry such indices.
#include "cuda/common.cuh"

using namespace pega;

constexpr int VECTOR = SIZE % 8 == 0 ? 8 : 1;

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_rows(const act_t* __restrict__ table, int64_t table_stride, int64_t num_rows,
                const int* __restrict__ indices, act_t* __restrict__ out, int64_t out_stride) {
  release_successor();
  wait_for_predecessor();
  const int64_t row = indices[blockIdx.x];
  const bool valid = row >= 0 && row < num_rows;
  for (int column = threadIdx.x * VECTOR; column < SIZE; column += THREADS * VECTOR) {
    Pack<act_t, VECTOR> pack;
    if (valid) {
      pack = *reinterpret_cast<const Pack<act_t, VECTOR>*>(table + row * table_stride + column);
    } else {
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) pack.value[j] = from_float<act_t>(0.f);
    }
    *reinterpret_cast<Pack<act_t, VECTOR>*>(out + blockIdx.x * out_stride + column) = pack;
  }
}
