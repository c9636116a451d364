// SwiGLU of merged projections: out = silu(gate) * up, where a row holds [gate | up]. Float32 inside.
// Defines: SIZE (columns of out), THREADS.
#include "cuda/common.cuh"

using namespace pega;

constexpr int VECTOR = SIZE % 8 == 0 ? 8 : 1;

extern "C" __global__ void __launch_bounds__(THREADS)
    silu_and_mul(const act_t* __restrict__ gate_up, int64_t in_stride, act_t* __restrict__ out, int64_t out_stride) {
  release_successor();
  const int column = (blockIdx.y * THREADS + threadIdx.x) * VECTOR;
  const int64_t row = blockIdx.x;
  wait_for_predecessor();
  if (column >= SIZE) return;
  float gate[VECTOR], up[VECTOR];
  load<VECTOR>(gate, gate_up + row * in_stride + column);
  load<VECTOR>(up, gate_up + row * in_stride + SIZE + column);
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) gate[j] = gate[j] / (1.f + __expf(-gate[j])) * up[j];
  store<VECTOR>(out + row * out_stride + column, gate);
}
