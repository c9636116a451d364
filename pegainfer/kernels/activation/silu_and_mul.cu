// SwiGLU of merged projections: out = silu(gate) * up, where a row holds [gate | up]. Float32 inside.
// A block takes PER_THREAD times THREADS vectors of a row; all loads are under way before the first result is computed.
// Defines: SIZE (columns of out), THREADS, PER_THREAD.
#include "cuda/common.cuh"

using namespace pega;

constexpr int VECTOR = SIZE % 8 == 0 ? 8 : 1;

extern "C" __global__ void __launch_bounds__(THREADS)
    silu_and_mul(const act_t* __restrict__ gate_up, int64_t in_stride, act_t* __restrict__ out, int64_t out_stride) {
  release_successor();
  const int first = (blockIdx.y * PER_THREAD * THREADS + threadIdx.x) * VECTOR;
  const act_t* row = gate_up + blockIdx.x * in_stride;
  Pack<act_t, VECTOR> gate[PER_THREAD], up[PER_THREAD];
  wait_for_predecessor();
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const int column = first + i * THREADS * VECTOR;
    if (column < SIZE) {
      gate[i] = *reinterpret_cast<const Pack<act_t, VECTOR>*>(row + column);
      up[i] = *reinterpret_cast<const Pack<act_t, VECTOR>*>(row + SIZE + column);
    }
  }
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const int column = first + i * THREADS * VECTOR;
    if (column >= SIZE) return;
    float result[VECTOR];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const float x = to_float(gate[i].value[j]);
      result[j] = x / (1.f + __expf(-x)) * to_float(up[i].value[j]);
    }
    store<VECTOR>(out + blockIdx.x * out_stride + column, result);
  }
}
