// RMSNorm of rows: out = x * rsqrt(mean(x^2) + eps) * weight, computed in float32. One block a row.
// Defines: SIZE (row width), THREADS.
#include "cuda/common.cuh"

using namespace pega;

constexpr int VECTOR = SIZE % 8 == 0 ? 8 : (SIZE % 4 == 0 ? 4 : 1);
constexpr int VECTORS = SIZE / VECTOR;
constexpr int PER_THREAD = (VECTORS + THREADS - 1) / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const act_t* __restrict__ x, int64_t x_stride, const float* __restrict__ weight, act_t* __restrict__ out,
             int64_t out_stride, float eps) {
  release_successor();
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  float values[PER_THREAD][VECTOR], scale[PER_THREAD][VECTOR];
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const int column = (i * THREADS + threadIdx.x) * VECTOR;
    if (column < SIZE) load<VECTOR>(scale[i], weight + column);
  }
  wait_for_predecessor();
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const int column = (i * THREADS + threadIdx.x) * VECTOR;
    if (column < SIZE) {
      load<VECTOR>(values[i], x + row * x_stride + column);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) sum += values[i][j] * values[i][j];
    }
  }
  const float inverse = rsqrtf(block_sum<THREADS>(sum, scratch) / SIZE + eps);
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const int column = (i * THREADS + threadIdx.x) * VECTOR;
    if (column < SIZE) {
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) values[i][j] *= inverse * scale[i][j];
      store<VECTOR>(out + row * out_stride + column, values[i]);
    }
  }
}
