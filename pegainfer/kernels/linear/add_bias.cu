// out += bias, where a product came from a library. Defines: ACT_* for the type of out.
#include "cuda/common.cuh"

using namespace pega;

extern "C" __global__ void add_bias(const float* __restrict__ bias, act_t* __restrict__ out, int64_t out_stride,
                                    int columns) {
  release_successor();
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  const float value = bias[column];
  wait_for_predecessor();
  act_t* target = out + blockIdx.x * out_stride + column;
  *target = from_float<act_t>(to_float(*target) + value);
}
