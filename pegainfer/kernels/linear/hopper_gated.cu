// out[M, N] = silu(x[M, K] * gate[N, K]^T) * (x * up[N, K]^T) for many rows on Hopper; the weight holds the gate rows, then
// the up rows.
//
// A tile is 128 rows of x and the gate and up rows of 128 columns of out, which meet in the registers of one thread: the
// 2 N columns of the product never exist in memory. Two blocks of a cluster take tiles below one another and copy half of
// the weights each, to both. Blocks stay and take tile after tile: one thread copies boxes of 64 columns into a ring of
// stages that runs on from tile to tile, and of the two warpgroups that multiply, 64 rows each, one multiplies while the
// other writes its results.
//
// Needs K % 8 == 0, N % 8 == 0, 16-byte aligned rows, no more clusters than tiles.
#include "cuda/wgmma.cuh"

using namespace pega;

constexpr int STAGES = 4;
constexpr int TOKENS = 128, COLUMNS = 128;                // of out, a tile
constexpr int WIDTH = 2 * COLUMNS;                        // of its products
constexpr int CHUNK = 64;                                 // columns of x and the weight, a stage
constexpr int CHUNK_BYTES = CHUNK * 2;
constexpr int X_BYTES = TOKENS * CHUNK_BYTES, HALF_BYTES = COLUMNS * CHUNK_BYTES;
constexpr int STAGE_BYTES = X_BYTES + 2 * HALF_BYTES;
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES;         // full [STAGES], free [STAGES]
constexpr int COPIERS = 128, COMPUTERS = 256;             // threads
constexpr int CLUSTER = 2;
constexpr int GROUP = 16;                                 // tiles side by side that are taken together; see `tile_at`
constexpr int LEAD = 2;                                   // chunks that one warpgroup is ahead of the other at the start
enum Meeting { AHEAD = 1 };                               // named barrier of the computing threads; 0 is __syncthreads

struct Tile {
  int row, column;  // of tiles; a row of tiles is what a cluster takes
};

// The order keeps what clusters read at a time small, in x as in the weights: it stays in the L2 cache.
__device__ __forceinline__ Tile tile_at(int index, int rows, int columns) {
  const int group = index / (rows * GROUP), first = group * GROUP, width = min(GROUP, columns - first);
  const int within = index - group * rows * GROUP;
  return {within / width, first + within % width};
}

__device__ __forceinline__ uint32_t gated_pair(float gate0, float gate1, float up0, float up1) {
  return pack_pair(__fdividef(gate0, 1.f + __expf(-gate0)) * up0, __fdividef(gate1, 1.f + __expf(-gate1)) * up1);
}

// Word i of thread t of a quad becomes word t of thread i.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int t) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit <<= 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t other = __shfl_xor_sync(0xffffffffu, t & bit ? words[i] : words[i + bit], bit);
      if (t & bit) {
        words[i] = other;
      } else {
        words[i + bit] = other;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(COPIERS + COMPUTERS, 1)
    hopper_gated(const __grid_constant__ TensorMap x_boxes, const __grid_constant__ TensorMap weight_boxes,
                 const float* __restrict__ bias, act_t* __restrict__ out, int64_t out_stride, int m, int n, int num_chunks) {
  release_successor();
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t full = shared + BARRIERS_AT, free = full + STAGES * 8;
  const int rank = cluster_rank(), first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  const int rows = (m + CLUSTER * TOKENS - 1) / (CLUSTER * TOKENS), columns = (n + COLUMNS - 1) / COLUMNS;
  const int num_tiles = rows * columns;

  auto copy_weights = [&](Tile tile, int chunk, int stage) {
    const int row = tile.column * COLUMNS + rank * n;
    copy_rows_to((1 << CLUSTER) - 1, shared + stage * STAGE_BYTES + X_BYTES + rank * HALF_BYTES, weight_boxes, chunk * CHUNK,
                 row, full + stage * 8);
  };
  auto copy_x = [&](Tile tile, int chunk, int stage) {
    copy_rows(shared + stage * STAGE_BYTES, x_boxes, chunk * CHUNK, (tile.row * CLUSTER + rank) * TOKENS, full + stage * 8);
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(free + i * 8, CLUSTER * COMPUTERS / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  cluster_meet();  // the other block copies into this one

  if (threadIdx.x < COPIERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      // Weights do not depend on the predecessor: as many as there is room for are under way before the wait for it.
      const int ahead = min(num_chunks, STAGES);
      for (int i = 0; i < ahead; ++i) {
        barrier_arrive_expecting(full + i * 8, STAGE_BYTES);
        copy_weights(tile_at(first, rows, columns), i, i);
      }
      wait_for_predecessor();
      int stage = 0, phase = 1, done = 0;  // the first time round every stage is free
      for (int index = first; index < num_tiles; index += step) {
        const Tile tile = tile_at(index, rows, columns);
        for (int chunk = 0; chunk < num_chunks; ++chunk, ++done) {
          if (done >= ahead) {
            barrier_wait(free + stage * 8, phase);
            barrier_arrive_expecting(full + stage * 8, STAGE_BYTES);
            copy_weights(tile, chunk, stage);
          }
          copy_x(tile, chunk, stage);
          if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait_for_predecessor();
    const int group = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    auto release = [&](int stage) {
      __syncwarp();
      if (lane < CLUSTER) barrier_arrive_in(address_in(free + stage * 8, lane));
    };
    if (group == 1) asm volatile("bar.sync %0, %1;" ::"r"((int)AHEAD), "r"(COMPUTERS) : "memory");
    int stage = 0, phase = 0;
    for (int index = first; index < num_tiles; index += step) {
      const Tile tile = tile_at(index, rows, columns);
      float sums[WIDTH / 2];
      int last_stage = 0;
      for (int chunk = 0; chunk < num_chunks; ++chunk) {
        const uint32_t base = shared + stage * STAGE_BYTES;
        barrier_wait(full + stage * 8, phase);
        fence_registers(sums);
        warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k) {
          product_of_width<WIDTH>(sums, operand_descriptor(base + group * 64 * CHUNK_BYTES + k * 32, 16),
                                  operand_descriptor(base + X_BYTES + k * 32, 16), chunk > 0 || k > 0);
        }
        warpgroup_commit();
        if (chunk > 0) {
          warpgroup_wait<1>();
          release(last_stage);
        }
        if (group == 0 && index == first && chunk == min(LEAD, num_chunks - 1)) {
          asm volatile("bar.arrive %0, %1;" ::"r"((int)AHEAD), "r"(COMPUTERS) : "memory");
        }
        last_stage = stage;
        if (++stage == STAGES) {
          stage = 0;
          phase ^= 1;
        }
      }
      warpgroup_wait<0>();
      fence_registers(sums);
      release(last_stage);

      const int row = (tile.row * CLUSTER + rank) * TOKENS + group * 64 + warp * 16 + g, column = tile.column * COLUMNS;
      if (bias != nullptr) {
#pragma unroll
        for (int j = 0; j < WIDTH / 8; ++j) {
          const int at = column + j % (COLUMNS / 8) * 8 + 2 * t;
          if (at >= n) continue;
          const float2 add = *reinterpret_cast<const float2*>(bias + (j < COLUMNS / 8 ? 0 : n) + at);
          sums[4 * j] += add.x, sums[4 * j + 1] += add.y, sums[4 * j + 2] += add.x, sums[4 * j + 3] += add.y;
        }
      }
      // Of 4 neighbouring blocks of 8 columns, each thread of a quad collects one: 16 bytes to store.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        act_t* target = out + (int64_t)(row + 8 * r) * out_stride + column;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j += 4) {
          uint32_t mine[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int gate = 4 * (j + i) + 2 * r, up = gate + WIDTH / 4;
            mine[i] = gated_pair(sums[gate], sums[gate + 1], sums[up], sums[up + 1]);
          }
          transpose_quad(mine, t);
          const int at = (j + t) * 8;
          if (row + 8 * r < m && column + at < n) {
            *reinterpret_cast<uint4*>(target + at) = make_uint4(mine[0], mine[1], mine[2], mine[3]);
          }
        }
      }
    }
  }
  __syncwarp();
  cluster_meet();  // no block goes while the other tells it that a stage is free
}
