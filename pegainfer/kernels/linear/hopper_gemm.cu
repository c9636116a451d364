// out[M, N] (+)= x[M, K] * weight[N, K]^T for M <= TOKENS on Hopper, bound by reading the weight once.
//
// A block's tile is the outputs of PARTS * ROWS weight rows; with GATED 1, of as many gate rows and the up rows that belong
// to them, and out = silu(gate) * up, which meet in the registers of one thread. One thread copies boxes of 64 columns of
// weights and of x into a ring of stages for the two warpgroups that multiply; before the wait for the predecessor it fills
// the ring with weights, which do not depend on it. With 64 tokens the warpgroups share the weight rows, with 128 the tokens.
//
// Where a multiprocessor's share of the weights is so narrow that it would read more of x than of them, SPLIT blocks of a
// cluster share K instead: each leaves its partial sums in shared memory, and adds up, in order, what all have of some of
// the tokens.
//
// Needs K % 8 == 0, even N and strides, 16-byte aligned rows, a cluster for every tile. Defines: TOKENS (64 or 128), ROWS
// (even, weight rows a box), STAGES, SPLIT, GATED.
#include "cuda/wgmma.cuh"

using namespace pega;

constexpr int CHUNK = 64;                                 // columns a stage
constexpr int CHUNK_BYTES = CHUNK * 2;
constexpr int PARTS = TOKENS == 64 ? 2 : 1;               // of the weight rows of a tile, one a warpgroup
constexpr int BOXES = GATED ? 2 : 1;                      // of weights a part
constexpr int BOX_ROWS = (ROWS + 7) / 8 * 8;              // in shared memory, where boxes begin at multiples of 8 rows
constexpr int WIDTH = (BOXES * BOX_ROWS + 15) / 16 * 16;  // of a warpgroup's product; the surplus is never read
constexpr int OUTPUTS = PARTS * ROWS;                     // columns of out a tile
constexpr int X_BYTES = TOKENS * CHUNK_BYTES, PART_BYTES = WIDTH * CHUNK_BYTES;
constexpr int STAGE_BYTES = X_BYTES + PARTS * PART_BYTES;
constexpr int COPIED_BYTES = PARTS * BOXES * ROWS * CHUNK_BYTES;  // of weights a stage
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES;         // full [STAGES], free [STAGES]
constexpr int COPIERS = 128, COMPUTERS = 256;             // threads
constexpr int PITCH = PARTS * WIDTH + 8;                  // floats of a token's partial sums
enum Meeting { RING_READ = 1 };                           // named barrier of the computing threads; 0 is __syncthreads

static_assert(SPLIT == 1 || TOKENS * PITCH * 4 <= BARRIERS_AT, "partial sums take the place of the ring");

// Two neighbouring results, with bias, gate and the sum that is there already.
struct Output {
  const float* bias;
  act_t* out;
  int64_t stride;
  int n, accumulate;

  __device__ __forceinline__ void put(int token, int column, float2 value, float2 up) const {
    if (bias != nullptr) {
      value.x += bias[column];
      value.y += bias[column + 1];
      if (GATED) {
        up.x += bias[n + column];
        up.y += bias[n + column + 1];
      }
    }
    float result[2] = {value.x, value.y};
    if (GATED) {
      result[0] = __fdividef(value.x, 1.f + __expf(-value.x)) * up.x;
      result[1] = __fdividef(value.y, 1.f + __expf(-value.y)) * up.y;
    }
    act_t* target = out + token * stride + column;
    if (accumulate) {
      float before[2];
      load<2>(before, target);
      result[0] += before[0];
      result[1] += before[1];
    }
    store<2>(target, result);
  }
};

extern "C" __global__ void __launch_bounds__(COPIERS + COMPUTERS, 1)
    hopper_gemm(const __grid_constant__ TensorMap x_boxes, const __grid_constant__ TensorMap weight_boxes,
                const float* __restrict__ bias, act_t* __restrict__ out, int64_t out_stride, int num_tokens, int n,
                int num_chunks, int accumulate) {
  release_successor();
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t full = shared + BARRIERS_AT, free = full + STAGES * 8;
  const int rank = SPLIT > 1 ? cluster_rank() : 0;
  const int first_column = blockIdx.x / SPLIT * OUTPUTS;
  const int first_chunk = SPLIT > 1 ? rank * num_chunks / SPLIT : 0;
  const int my_chunks = SPLIT > 1 ? (rank + 1) * num_chunks / SPLIT - first_chunk : num_chunks;
  const Output output{bias, out, out_stride, n, accumulate};

  const int ahead = min(my_chunks, STAGES);  // copies that need not wait for a stage
  const uint64_t policy = streaming_policy();
  auto copy_weights = [&](int chunk, int stage) {
    const uint32_t barrier = full + stage * 8, base = shared + stage * STAGE_BYTES + X_BYTES;
    barrier_arrive_expecting(barrier, COPIED_BYTES + num_tokens * CHUNK_BYTES);
#pragma unroll
    for (int box = 0; box < PARTS * BOXES; ++box) {
      const int part = box / BOXES, half = box % BOXES;
      copy_rows(base + part * PART_BYTES + half * BOX_ROWS * CHUNK_BYTES, weight_boxes, (first_chunk + chunk) * CHUNK,
                first_column + part * ROWS + half * n, barrier, policy);
    }
  };
  auto copy_x = [&](int chunk, int stage) {
    copy_rows(shared + stage * STAGE_BYTES, x_boxes, (first_chunk + chunk) * CHUNK, 0, full + stage * 8);
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(free + i * 8, COMPUTERS / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int i = 0; i < ahead; ++i) copy_weights(i, i);
  }
  __syncthreads();

  if (threadIdx.x < COPIERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      wait_for_predecessor();
      for (int i = 0; i < ahead; ++i) copy_x(i, i);
      for (int i = ahead, stage = 0, phase = 0; i < my_chunks; ++i) {
        barrier_wait(free + stage * 8, phase);
        copy_weights(i, stage);
        copy_x(i, stage);
        if (++stage == STAGES) {
          stage = 0;
          phase ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait_for_predecessor();
    const int group = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4, part = PARTS == 2 ? group : 0;
    const int row = (PARTS == 2 ? 0 : group * 64) + warp * 16 + g;  // of x, and the one 8 below
    const uint32_t x_at = PARTS == 2 ? 0 : group * 64 * CHUNK_BYTES, weight_at = X_BYTES + part * PART_BYTES;
    auto release = [&](int stage) {
      __syncwarp();
      if (lane == 0) barrier_arrive(free + stage * 8);
    };
    float sums[WIDTH / 2];
    for (int chunk = 0, stage = 0, last_stage = 0, phase = 0; chunk < my_chunks; ++chunk) {
      const uint32_t base = shared + stage * STAGE_BYTES;
      barrier_wait(full + stage * 8, phase);
      fence_registers(sums);
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < CHUNK / 16; ++k) {
        product_of_width<WIDTH>(sums, operand_descriptor(base + x_at + k * 32, 16),
                                operand_descriptor(base + weight_at + k * 32, 16), chunk > 0 || k > 0);
      }
      warpgroup_commit();
      if (chunk > 0) {
        warpgroup_wait<1>();
        release(last_stage);
      }
      last_stage = stage;
      if (++stage == STAGES) {
        stage = 0;
        phase ^= 1;
      }
    }
    warpgroup_wait<0>();
    fence_registers(sums);
#if SPLIT == 1
    const int column = first_column + part * ROWS;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= num_tokens) continue;
#pragma unroll
      for (int j = 0; j < BOX_ROWS / 8; ++j) {
        const int in_box = j * 8 + 2 * t;
        if (in_box >= ROWS || column + in_box >= n) continue;
        const int at = 4 * j + 2 * r, up = GATED ? at + BOX_ROWS / 2 : 0;
        output.put(row + 8 * r, column + in_box, make_float2(sums[at], sums[at + 1]),
                   make_float2(sums[up], sums[up + 1]));
      }
    }
#else
    asm volatile("bar.sync %0, %1;" ::"r"((int)RING_READ), "r"(COMPUTERS) : "memory");
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = 4 * j + 2 * r;
        store_shared(shared + ((row + 8 * r) * PITCH + part * WIDTH + j * 8 + 2 * t) * 4, sums[at], sums[at + 1]);
      }
    }
#endif
  }
#if SPLIT > 1
  cluster_meet();
  wait_for_predecessor();  // most of the copying threads have not
  const int tokens = (num_tokens + SPLIT - 1) / SPLIT, first = rank * tokens;
  uint32_t sources[SPLIT];
#pragma unroll
  for (int i = 0; i < SPLIT; ++i) sources[i] = address_in(shared, i);
  const int count = min(num_tokens - first, tokens) * (OUTPUTS / 2);
  for (int i = threadIdx.x; i < count; i += COPIERS + COMPUTERS) {
    const int token = first + i / (OUTPUTS / 2), in_tile = i % (OUTPUTS / 2) * 2, column = first_column + in_tile;
    if (column >= n) continue;
    const int offset = (token * PITCH + in_tile / ROWS * WIDTH + in_tile % ROWS) * 4;
    float2 sum = make_float2(0.f, 0.f), up = sum;
#pragma unroll
    for (int s = 0; s < SPLIT; ++s) {
      add_shared(sum, sources[s] + offset);
      if (GATED) add_shared(up, sources[s] + offset + BOX_ROWS * 4);
    }
    output.put(token, column, sum, up);
  }
  cluster_meet();  // no block goes while others read what it holds
#endif
}
