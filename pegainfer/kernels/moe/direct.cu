// Experts of a few tokens: every (token, slot) pair reads the weights of its expert, whoever else does.
//
// `direct_gate_up` leaves silu(gate) * up in `activated`, a row a pair; `direct_down` multiplies them by the down
// matrices and adds a token's slots, weighted, to its row of out. A warp makes one column of a result. Any sizes and
// types. Defines: HIDDEN, INTERMEDIATE, TOP_K, WARPS. Dynamic shared memory: WARPS * 8 KB.
#include "cuda/mma.cuh"

using namespace pega;

constexpr int VECTOR = HIDDEN % 8 == 0 && INTERMEDIATE % 8 == 0 ? 16 / sizeof(act_t) : 1;
constexpr int LOADS = 16;                                           // of 16 bytes that a thread has under way
constexpr int SLOTS = TOP_K % 4 == 0 ? 4 : TOP_K % 2 == 0 ? 2 : 1;  // that `direct_down` reads side by side

// Add this lane's part of the dot products of N rows with their vectors to `sums`. Weights pass through shared memory
// that is the lane's own, since the compiler would put each load to a register beside its use.
template <int N, int SIZE>
__device__ __forceinline__ void add_dots(float (&sums)[N], const act_t* const (&rows)[N], const act_t* const (&x)[N],
                                         int lane) {
  if constexpr (VECTOR == 1) {
    for (int column = lane; column < SIZE; column += 32) {
#pragma unroll
      for (int n = 0; n < N; ++n) sums[n] += to_float(rows[n][column]) * to_float(x[n][column]);
    }
  } else {
    extern __shared__ __align__(16) uint4 shared[];  // [WARPS][LOADS][32]
    uint4* mine = shared + (threadIdx.x / 32 * LOADS) * 32 + lane;
    const uint64_t policy = streaming_policy();
    constexpr int STEP = 32 * VECTOR;
    constexpr int STEPS = (SIZE + STEP - 1) / STEP;
    constexpr int BATCH = STEPS < LOADS / N ? STEPS : LOADS / N;
    auto column_of = [&](int step) { return step * STEP + lane * VECTOR; };
    auto inside = [&](int step) { return SIZE % (BATCH * STEP) == 0 || column_of(step) < SIZE; };
#pragma unroll 1
    for (int first = 0; first < STEPS; first += BATCH) {
#pragma unroll
      for (int i = 0; i < BATCH * N; ++i) {
        const int step = first + i / N, n = i % N;
        if (inside(step)) copy_async_streaming(shared_address(mine + i * 32), rows[n] + column_of(step), policy);
      }
      commit_copies();
      wait_for_copies<0>();
#pragma unroll
      for (int i = 0; i < BATCH * N; ++i) {
        const int step = first + i / N, n = i % N;
        if (!inside(step)) continue;
        const uint4 piece = mine[i * 32];
        const act_t* weights = reinterpret_cast<const act_t*>(&piece);
        float values[VECTOR];
        load<VECTOR>(values, x[n] + column_of(step));
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) sums[n] += to_float(weights[j]) * values[j];
      }
    }
  }
}

// Grid: (columns of `activated` / WARPS, pairs).
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    direct_gate_up(const act_t* __restrict__ x, int64_t x_stride, const act_t* __restrict__ gate_up,
                   const int* __restrict__ ids, int64_t ids_stride, act_t* __restrict__ activated) {
  release_successor();
  const int column = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t pair = blockIdx.y, token = pair / TOP_K;
  wait_for_predecessor();
  if (column >= INTERMEDIATE) return;
  const int64_t expert = ids[token * ids_stride + pair % TOP_K];
  const act_t* gate = gate_up + (expert * 2 * INTERMEDIATE + column) * HIDDEN;
  const act_t* rows[2] = {gate, gate + static_cast<int64_t>(INTERMEDIATE) * HIDDEN};
  const act_t* row = x + token * x_stride;
  float sums[2] = {};
  add_dots<2, HIDDEN>(sums, rows, {row, row}, lane);
  const float gated = warp_sum(sums[0]), up = warp_sum(sums[1]);
  if (lane == 0) activated[pair * INTERMEDIATE + column] = from_float<act_t>(gated / (1.f + __expf(-gated)) * up);
}

// Grid: (columns of out / WARPS, tokens).
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    direct_down(const act_t* __restrict__ activated, const act_t* __restrict__ down, const int* __restrict__ ids,
                int64_t ids_stride, const float* __restrict__ weights, int64_t weights_stride,
                act_t* __restrict__ out, int64_t out_stride) {
  release_successor();
  const int column = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = blockIdx.y;
  wait_for_predecessor();
  if (column >= HIDDEN) return;
  float total = 0.f;
  for (int first = 0; first < TOP_K; first += SLOTS) {
    const act_t *rows[SLOTS], *vectors[SLOTS];
    float sums[SLOTS] = {};
#pragma unroll
    for (int j = 0; j < SLOTS; ++j) {
      const int64_t expert = ids[token * ids_stride + first + j];
      rows[j] = down + (expert * HIDDEN + column) * INTERMEDIATE;
      vectors[j] = activated + (token * TOP_K + first + j) * INTERMEDIATE;
    }
    add_dots<SLOTS, INTERMEDIATE>(sums, rows, vectors, lane);
#pragma unroll
    for (int j = 0; j < SLOTS; ++j) total += weights[token * weights_stride + first + j] * sums[j];
  }
  total = warp_sum(total);
  if (lane == 0) {
    act_t* target = out + token * out_stride + column;
    *target = from_float<act_t>(to_float(*target) + total);
  }
}
