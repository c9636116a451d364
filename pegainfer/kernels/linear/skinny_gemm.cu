// out[M, N] (+)= x[M, K] * weight[N, K]^T for few rows M <= TOKENS, bound by reading the weight once.
//
// A block owns a contiguous range of weight rows, so that all blocks read equally many bytes whatever N is. Its warps
// split K in chunks of 64 columns; each streams its chunks, weight and activations side by side, through a ring of its
// own in shared memory (cp.async), so no block-wide barrier stands between a load and its use. The ring is filled with
// weights before the wait for the predecessor: they do not depend on it. A 16-byte piece of a row feeds two m16n8k16
// products under one permutation of K that weight and activations share, so no value is shuffled. Partial sums of the
// warps meet in shared memory in a fixed order.
//
// NORM 1: x is normalised first (RMSNorm with `norm_weight`); its scale is a factor of a whole row, so it is applied to
// the sums, and the squares are summed on the way. GATED 1: the weight has 2 N rows, gate then up, and
// out = silu(gate) * up; tiles hold 8 gate rows and the 8 up rows that belong to them.
//
// Needs K % 64 == 0, 16-byte aligned rows. Defines: TOKENS (8 or 16), ROW_TILES (16 weight rows each, a tile), STAGES,
// NORM, GATED; OUT_F32 for float32 results.
#include "cuda/mma.cuh"

using namespace pega;

#if defined(OUT_F32)
using out_t = float;
#else
using out_t = act_t;
#endif

constexpr int WARPS = 8;
constexpr int ROWS = 16 * ROW_TILES;      // weight rows a tile
constexpr int CHUNK = 64;                 // columns a chunk
constexpr int ROW_BYTES = CHUNK * 2;
constexpr int WEIGHT_BYTES = ROWS * ROW_BYTES;
constexpr int NORM_AT = WEIGHT_BYTES + TOKENS * ROW_BYTES;  // float32 norm weights of a chunk
constexpr int STAGE_BYTES = NORM_AT + NORM * CHUNK * 4;
constexpr int OUTPUTS = GATED ? ROWS / 2 : ROWS;  // columns of out a tile
constexpr int COLUMNS = TOKENS / 8;       // n8 tiles of tokens
constexpr int PARTIAL = ROWS * TOKENS;    // floats a warp contributes to a tile
constexpr int BUFFERS = TOKENS > 8 ? 1 : 2;  // of partial sums: two save a barrier, one leaves room for another stage

#if defined(ACT_F16)
using pair_t = __half2;
#else
using pair_t = __nv_bfloat162;
#endif

__device__ __forceinline__ float2 unpack(uint32_t pair) {
#if defined(ACT_F16)
  return __half22float2(*reinterpret_cast<const pair_t*>(&pair));
#else
  return __bfloat1622float2(*reinterpret_cast<const pair_t*>(&pair));
#endif
}

// A pair times its norm weights (as bits); the squares of the pair are added to `squares`.
__device__ __forceinline__ uint32_t scale_pair(uint32_t x, uint32_t low, uint32_t high, float& squares) {
  const float2 values = unpack(x);
  squares += values.x * values.x + values.y * values.y;
  return pack_pair(values.x * __uint_as_float(low), values.y * __uint_as_float(high));
}

// Byte offset of the 16-byte unit `unit` (0..7) of row `row`: odd rows swap halves, which keeps the banks apart.
__device__ __forceinline__ uint32_t unit_offset(int row, int unit) {
  return row * ROW_BYTES + ((unit ^ ((row & 1) << 2)) * 16);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    skinny_gemm(const act_t* __restrict__ x, int64_t x_stride, const act_t* __restrict__ weight,
                const float* __restrict__ bias, const float* __restrict__ norm_weight, out_t* __restrict__ out,
                int64_t out_stride, int num_tokens, int n, int k, int accumulate, float eps) {
  release_successor();
  extern __shared__ __align__(128) uint8_t shared[];
#if NORM
  __shared__ float squares[WARPS][TOKENS];
#endif
  float* partials = reinterpret_cast<float*>(shared + WARPS * STAGES * STAGE_BYTES);  // [BUFFERS][WARPS][PARTIAL]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_column = (int64_t)blockIdx.x * n / gridDim.x;
  const int last_column = (int64_t)(blockIdx.x + 1) * n / gridDim.x;
  // Tiles of equal width: a narrow last one would keep few bytes under way for as long as a full one takes.
  const int num_tiles = (last_column - first_column + OUTPUTS - 1) / OUTPUTS;
  const int tile_columns = (last_column - first_column + num_tiles - 1) / max(num_tiles, 1);
  const int all_chunks = k / CHUNK;
  const int num_chunks = all_chunks > warp ? (all_chunks - warp - 1) / WARPS + 1 : 0;  // of this warp
  const int total = num_tiles * num_chunks;
  const uint32_t ring = shared_address(shared) + warp * STAGES * STAGE_BYTES;

  const uint64_t policy = streaming_policy();

  // Lane copies unit lane % 8 of rows lane / 8 + 0, 4, 8, ...
  const int copy_row = lane / 8, copy_unit = lane % 8;
  int load_tile = 0, load_chunk = 0, token_chunk = 0;
  auto column_of = [&](int chunk) { return (chunk * WARPS + warp) * CHUNK + copy_unit * 8; };
  auto issue_weight = [&](int iteration) {
    const uint32_t stage = ring + (iteration % STAGES) * STAGE_BYTES;
    const int first = first_column + load_tile * tile_columns;
    const int last = min(first + tile_columns, last_column);
    const act_t* source = weight + column_of(load_chunk);
#pragma unroll
    for (int i = 0; i < ROWS; i += 4) {
      const int tile_row = copy_row + i;
      const int column = first + (GATED ? tile_row / 16 * 8 + tile_row % 8 : tile_row);
      const int row = GATED && tile_row % 16 >= 8 ? n + column : column;
      if (column < last) {
        copy_async_streaming(stage + unit_offset(tile_row, copy_unit), source + (int64_t)row * k, policy);
      }
    }
    if (++load_chunk == num_chunks) load_chunk = 0, ++load_tile;
  };
  auto issue_tokens = [&](int iteration) {  // rows of absent tokens keep whatever they hold: nobody reads their results
    const uint32_t stage = ring + (iteration % STAGES) * STAGE_BYTES + WEIGHT_BYTES;
    const act_t* source = x + copy_row * x_stride + column_of(token_chunk);
#pragma unroll
    for (int i = 0; i < TOKENS; i += 4) {
      if (copy_row + i < num_tokens) copy_async(stage + unit_offset(copy_row + i, copy_unit), source + i * x_stride);
    }
#if NORM
    if (lane < CHUNK / 4) {
      copy_async(stage - WEIGHT_BYTES + NORM_AT + lane * 16, norm_weight + (token_chunk * WARPS + warp) * CHUNK + lane * 4);
    }
#endif
    if (++token_chunk == num_chunks) token_chunk = 0;
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < total) issue_weight(i);
    commit_copies();
  }
  wait_for_predecessor();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < total) issue_tokens(i);
    commit_copies();
  }

  int iteration = 0;
#if NORM
  float my_squares[COLUMNS] = {};
#endif
  for (int tile = 0; tile < num_tiles; ++tile) {
    float sums[ROW_TILES][COLUMNS][4] = {};
    for (int chunk = 0; chunk < num_chunks; ++chunk, ++iteration) {
      wait_for_copies<STAGES - 2>();
      __syncwarp();
      const uint32_t stage = ring + (iteration % STAGES) * STAGE_BYTES;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 tokens[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          tokens[c] = load_shared(stage + WEIGHT_BYTES + unit_offset(c * 8 + g, half * 4 + t));
        }
#if NORM
        const uint4 first = load_shared(stage + NORM_AT + (half * 4 + t) * 32);
        const uint4 second = load_shared(stage + NORM_AT + (half * 4 + t) * 32 + 16);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          tokens[c].x = scale_pair(tokens[c].x, first.x, first.y, my_squares[c]);
          tokens[c].y = scale_pair(tokens[c].y, first.z, first.w, my_squares[c]);
          tokens[c].z = scale_pair(tokens[c].z, second.x, second.y, my_squares[c]);
          tokens[c].w = scale_pair(tokens[c].w, second.z, second.w, my_squares[c]);
        }
#endif
#pragma unroll
        for (int rows = 0; rows < ROW_TILES; ++rows) {
          const uint4 low = load_shared(stage + unit_offset(rows * 16 + g, half * 4 + t));
          const uint4 high = load_shared(stage + unit_offset(rows * 16 + g + 8, half * 4 + t));
#pragma unroll
          for (int c = 0; c < COLUMNS; ++c) {
            mma_m16n8k16(sums[rows][c], low.x, high.x, low.y, high.y, tokens[c].x, tokens[c].y);
            mma_m16n8k16(sums[rows][c], low.z, high.z, low.w, high.w, tokens[c].z, tokens[c].w);
          }
        }
      }
      __syncwarp();
      if (iteration + STAGES - 1 < total) {
        issue_weight(iteration + STAGES - 1);
        issue_tokens(iteration + STAGES - 1);
      }
      commit_copies();
    }
    float* mine = partials + (tile % BUFFERS * WARPS + warp) * PARTIAL;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
      for (int rows = 0; rows < ROW_TILES; ++rows) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          mine[(c * 8 + 2 * t + i % 2) * ROWS + rows * 16 + g + (i / 2) * 8] = sums[rows][c][i];
        }
      }
#if NORM
      if (tile == 0) {  // every tile sees the same activations
        my_squares[c] += __shfl_xor_sync(0xffffffffu, my_squares[c], 1);
        my_squares[c] += __shfl_xor_sync(0xffffffffu, my_squares[c], 2);
        if (t == 0) squares[warp][c * 8 + g] = my_squares[c];
      }
#endif
    }
    __syncthreads();
    const float* all = partials + tile % BUFFERS * WARPS * PARTIAL;
    for (int i = threadIdx.x; i < num_tokens * OUTPUTS; i += WARPS * 32) {
      const int token = i / OUTPUTS, at = i % OUTPUTS, column = first_column + tile * tile_columns + at;
      if (at >= tile_columns || column >= last_column) continue;
      float factor = 1.f;
#if NORM
      float square = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) square += squares[w][token];
      factor = rsqrtf(square / k + eps);
#endif
      auto sum_of = [&](int row) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += all[w * PARTIAL + token * ROWS + row];
        return sum * factor + (bias != nullptr ? bias[GATED && row % 16 >= 8 ? n + column : column] : 0.f);
      };
#if GATED
      const int row = at / 8 * 16 + at % 8;
      const float gate = sum_of(row);
      const float result = gate / (1.f + __expf(-gate)) * sum_of(row + 8);
#else
      const float result = sum_of(at);
#endif
      out_t* target = out + token * out_stride + column;
      *target = from_float<out_t>(accumulate ? result + to_float(*target) : result);
    }
    if (BUFFERS == 1) __syncthreads();
  }
}
