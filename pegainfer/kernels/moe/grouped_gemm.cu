// Products of many experts in one launch, with m16n8k16 tensor cores: a block takes up to TILE_ROWS pairs of one expert
// (a tile of sort_slots.cu) and 128 rows of its weight. Both pass through a ring of 64 columns a stage in shared memory.
//
// GATED 1: out[position] = silu(gate) * up, where the row of a pair is that of its token in x; of the 128 weight rows
// 64 are gate rows, in groups of 8 before the 8 up rows that belong to them, so that a thread holds both.
// GATED 0: out[pair] = weight of the pair * x[position] * down^T.
// A sum runs over the columns in order, whatever TILE_ROWS is. Needs HIDDEN % 8 == 0, INTERMEDIATE % 8 == 0.
// Defines: HIDDEN, INTERMEDIATE, TOP_K, GATED, TILE_ROWS (16, 64, 128), STAGES.
#include "cuda/mma.cuh"

using namespace pega;

constexpr int WARPS = 8;
constexpr int K = GATED ? HIDDEN : INTERMEDIATE;
constexpr int N = GATED ? INTERMEDIATE : HIDDEN;  // columns of out
constexpr int WEIGHT_ROWS = 128;
constexpr int OUTPUTS = GATED ? WEIGHT_ROWS / 2 : WEIGHT_ROWS;
constexpr int WARPS_DOWN = TILE_ROWS > 16 ? 2 : 1;  // warps over pairs; the others are over weight rows
constexpr int WARPS_ACROSS = WARPS / WARPS_DOWN;
constexpr int FRAGMENTS_DOWN = TILE_ROWS / WARPS_DOWN / 16;
constexpr int FRAGMENTS_ACROSS = WEIGHT_ROWS / WARPS_ACROSS / 16;  // each two n8 tiles
constexpr int CHUNK = 64;
constexpr int CHUNKS = (K + CHUNK - 1) / CHUNK;
constexpr int ROW_BYTES = CHUNK * 2;
constexpr int X_BYTES = TILE_ROWS * ROW_BYTES;
constexpr int STAGE_BYTES = X_BYTES + WEIGHT_ROWS * ROW_BYTES;
constexpr int COPY_ROWS = WARPS * 32 / 8;  // rows that the block copies at once: 8 threads a row
constexpr int X_COPIES = (TILE_ROWS + COPY_ROWS - 1) / COPY_ROWS;
constexpr int WEIGHT_COPIES = WEIGHT_ROWS / COPY_ROWS;

__device__ __forceinline__ uint32_t unit_offset(int row, int unit) { return row * ROW_BYTES + ((unit ^ (row & 7)) * 16); }

// Grid: (tiles of columns, tiles of pairs).
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
    grouped_gemm(const act_t* __restrict__ x, int64_t x_stride, const act_t* __restrict__ weight,
                 const int* __restrict__ order, const int4* __restrict__ tiles,
                 const float* __restrict__ pair_weights, int64_t pair_weights_stride, act_t* __restrict__ out) {
  release_successor();
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_column = blockIdx.x * OUTPUTS;
  const uint32_t ring = shared_address(shared);
  wait_for_predecessor();
  const int4 tile = tiles[blockIdx.y];
  const int64_t expert = tile.x;
  const int first = tile.y, count = tile.z;
  if (expert < 0) return;

  // This thread copies unit `unit` of rows `copy_row`, + COPY_ROWS, ...
  const int copy_row = threadIdx.x / 8, unit = threadIdx.x % 8;
  const act_t* sources[X_COPIES];
#pragma unroll
  for (int i = 0; i < X_COPIES; ++i) {
    const int row = copy_row + i * COPY_ROWS;
    const int position = first + (row < count ? row : 0);
    sources[i] = x + (GATED ? order[position] / TOP_K : position) * x_stride + unit * 8;
  }
  const int copy_column = GATED ? copy_row / 16 * 8 + copy_row % 8 : copy_row;
  const int64_t weight_row = expert * (GATED ? 2 * N : N) + first_column + copy_column +
                             (GATED && copy_row % 16 >= 8 ? N : 0);
  const act_t* weight_source = weight + weight_row * K + unit * 8;

  auto issue = [&](int chunk) {
    if (chunk < CHUNKS) {
      const uint32_t stage = ring + chunk % STAGES * STAGE_BYTES;
      const int column = chunk * CHUNK;
      const bool inside = K % CHUNK == 0 || column + unit * 8 < K;
#pragma unroll
      for (int i = 0; i < X_COPIES; ++i) {
        const int row = copy_row + i * COPY_ROWS;
        const bool valid = inside && row < count;
        if (row < TILE_ROWS) copy_async(stage + unit_offset(row, unit), valid ? sources[i] + column : x, valid);
      }
#pragma unroll
      for (int i = 0; i < WEIGHT_COPIES; ++i) {
        const int columns = i * OUTPUTS / WEIGHT_COPIES;
        const bool valid = inside && (N % OUTPUTS == 0 || first_column + copy_column + columns < N);
        const act_t* source = weight_source + static_cast<int64_t>(columns) * K + column;
        copy_async(stage + X_BYTES + unit_offset(copy_row + i * COPY_ROWS, unit), valid ? source : weight, valid);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) issue(i);

  const int top = warp / WARPS_ACROSS * (TILE_ROWS / WARPS_DOWN);             // this warp's first pair
  const int left = warp % WARPS_ACROSS * (WEIGHT_ROWS / WARPS_ACROSS);        // and weight row
  const int matrix = lane / 8, row = lane % 8;
  float sums[FRAGMENTS_DOWN][2 * FRAGMENTS_ACROSS][4] = {};
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    issue(chunk + STAGES - 1);
    const uint32_t stage = ring + chunk % STAGES * STAGE_BYTES;
#pragma unroll
    for (int k = 0; k < CHUNK / 16; ++k) {
      uint32_t a[FRAGMENTS_DOWN][4];
#pragma unroll
      for (int m = 0; m < FRAGMENTS_DOWN; ++m) {
        load_matrices(a[m], stage + unit_offset(top + m * 16 + matrix % 2 * 8 + row, k * 2 + matrix / 2));
      }
#pragma unroll
      for (int n = 0; n < FRAGMENTS_ACROSS; ++n) {
        uint32_t b[4];
        load_matrices(b, stage + X_BYTES + unit_offset(left + n * 16 + matrix / 2 * 8 + row, k * 2 + matrix % 2));
#pragma unroll
        for (int m = 0; m < FRAGMENTS_DOWN; ++m) {
          mma_m16n8k16(sums[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
          mma_m16n8k16(sums[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < FRAGMENTS_DOWN; ++m) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int at = top + m * 16 + high * 8 + g, position = first + at;
      if (at >= count) continue;
#if GATED
      act_t* target = out + static_cast<int64_t>(position) * N;
#pragma unroll
      for (int n = 0; n < FRAGMENTS_ACROSS; ++n) {
        const int column = first_column + left / 2 + n * 8 + 2 * t;
        float result[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float gate = sums[m][2 * n][high * 2 + i];
          result[i] = gate / (1.f + __expf(-gate)) * sums[m][2 * n + 1][high * 2 + i];
        }
        if (column < N) *reinterpret_cast<uint32_t*>(target + column) = pack_pair(result[0], result[1]);
      }
#else
      const int pair = order[position];
      const float factor = pair_weights[pair / TOP_K * pair_weights_stride + pair % TOP_K];
      act_t* target = out + static_cast<int64_t>(pair) * N;
#pragma unroll
      for (int n = 0; n < 2 * FRAGMENTS_ACROSS; ++n) {
        const int column = first_column + left + n * 8 + 2 * t;
        const float* sum = sums[m][n] + high * 2;
        if (column < N) *reinterpret_cast<uint32_t*>(target + column) = pack_pair(factor * sum[0], factor * sum[1]);
      }
#endif
    }
  }
}
