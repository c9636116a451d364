// out[N, K] = weight[N, K] * scale of its block, rounded to the activation type: e4m3 numbers for a library that
// multiplies 16-bit ones. A thread expands 16 numbers. Needs K % 128 == 0.
#include "cuda/fp8.cuh"

using namespace pega;

constexpr int NUMBERS = 16;  // a thread's
constexpr int BLOCK = 128;   // rows and columns of a scale

extern "C" __global__ void __launch_bounds__(256)
    expand_fp8(const uint8_t* __restrict__ weight, const float* __restrict__ scales, act_t* __restrict__ out, int n,
               int k) {
  release_successor();
  const int units = k / NUMBERS;
  const int64_t unit = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  const int row = unit / units, column = unit % units * NUMBERS;
  const bool exists = row < n;
  uint4 result[2];
  if (exists) {
    const uint4 numbers = *reinterpret_cast<const uint4*>(weight + unit * NUMBERS);
    const float scale = scales[row / BLOCK * (k / BLOCK) + column / BLOCK];
    const uint32_t words[4] = {numbers.x, numbers.y, numbers.z, numbers.w};
    uint32_t pairs[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t even, odd;
      widen(words[i], even, odd);
      const float2 low = unpack_pair(even), high = unpack_pair(odd);
      pairs[2 * i] = pack_pair(low.x * scale, high.x * scale);
      pairs[2 * i + 1] = pack_pair(low.y * scale, high.y * scale);
    }
    result[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    result[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
  }
  wait_for_predecessor();  // it may still read what `out` held before
  if (exists) {
    uint4* target = reinterpret_cast<uint4*>(out + unit * NUMBERS);
    target[0] = result[0];
    target[1] = result[1];
  }
}
