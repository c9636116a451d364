// out[M, N] (+)= x[M, K] * weight[N, K]^T for few rows M <= TOKENS, where the weight is e4m3 numbers and a float32
// scale for each block of 128 x 128 of them.
//
// The shape of skinny_gemm.cu: a block owns a contiguous range of weight rows, its warps split K in chunks of 64
// columns, each streams its chunks through a ring of its own. A lane reads 16 numbers of a row at once, widens them to
// activations (exactly) and feeds four m16n8k16 products under one permutation of K that weight and activations share.
// A chunk lies in one column of scale blocks: its sums are multiplied by the row's scale in float32. Tiles are taller
// than there, because activations are read again for every tile and are twice as wide as the weight here.
//
// NORM and GATED are those of skinny_gemm.cu. Needs K % 128 == 0, 16-byte aligned rows, with GATED N % 128 == 0.
// Defines: TOKENS (8 or 16), ROW_TILES (16 weight rows each, a tile), STAGES, NORM, GATED; OUT_F32 for float32 results.
#include "cuda/fp8.cuh"

using namespace pega;

#if defined(OUT_F32)
using out_t = float;
#else
using out_t = act_t;
#endif

constexpr int WARPS = 8;
constexpr int ROWS = 16 * ROW_TILES;      // weight rows a tile
constexpr int CHUNK = 64;                 // columns a chunk
constexpr int BLOCK = 128;                // rows and columns of a scale
constexpr int WEIGHT_BYTES = ROWS * CHUNK;
constexpr int TOKEN_BYTES = CHUNK * 2;    // a row of activations
constexpr int NORM_AT = WEIGHT_BYTES + TOKENS * TOKEN_BYTES;  // float32 norm weights of a chunk
constexpr int SCALES_AT = NORM_AT + NORM * CHUNK * 4;         // float32 scales of the rows of a chunk
constexpr int STAGE_BYTES = SCALES_AT + ROWS * 4;
constexpr int OUTPUTS = GATED ? ROWS / 2 : ROWS;  // columns of out a tile
constexpr int COLUMNS = TOKENS / 8;       // n8 tiles of tokens
constexpr int PARTIAL = ROWS * TOKENS;    // floats a warp contributes to a tile
constexpr int BUFFERS = TOKENS > 8 ? 1 : 2;  // of partial sums

// A pair times its norm weights (as bits); the squares of the pair are added to `squares`.
__device__ __forceinline__ uint32_t scale_pair(uint32_t x, uint32_t low, uint32_t high, float& squares) {
  const float2 values = unpack_pair(x);
  squares += values.x * values.x + values.y * values.y;
  return pack_pair(values.x * __uint_as_float(low), values.y * __uint_as_float(high));
}

// Byte offset of the 16-byte unit `unit` (0..7) of token `row`: lanes read every other unit of two neighbouring rows,
// and odd rows swap neighbours to keep the banks apart. Rows of weights need no such thing: two of them fill all banks.
__device__ __forceinline__ uint32_t token_offset(int row, int unit) { return row * TOKEN_BYTES + (unit ^ (row & 1)) * 16; }

// The same for the norm weights (unit 0..15), of which four lanes read every fourth unit.
__device__ __forceinline__ uint32_t norm_offset(int unit) { return (unit ^ (unit >> 3)) * 16; }

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    skinny_fp8(const act_t* __restrict__ x, int64_t x_stride, const uint8_t* __restrict__ weight,
               const float* __restrict__ scales, const float* __restrict__ bias, const float* __restrict__ norm_weight,
               out_t* __restrict__ out, int64_t out_stride, int num_tokens, int n, int k, int accumulate, float eps) {
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

  int load_tile = 0, load_chunk = 0, token_chunk = 0;
  auto chunk_start = [&](int chunk) { return (chunk * WARPS + warp) * CHUNK; };
  auto issue_weight = [&](int iteration) {
    const uint32_t stage = ring + (iteration % STAGES) * STAGE_BYTES;
    const int first = first_column + load_tile * tile_columns, last = min(first + tile_columns, last_column);
    const int start = chunk_start(load_chunk);
    auto column_of = [&](int tile_row) { return first + (GATED ? tile_row / 16 * 8 + tile_row % 8 : tile_row); };
    auto row_of = [&](int tile_row) { return (GATED && tile_row % 16 >= 8 ? n : 0) + column_of(tile_row); };
#pragma unroll
    for (int i = 0; i < ROWS; i += 8) {  // lane copies unit lane % 4 of rows lane / 4 + 0, 8, 16, ...
      const int tile_row = lane / 4 + i, unit = lane % 4;
      if (column_of(tile_row) < last) {
        copy_async_streaming(stage + tile_row * CHUNK + unit * 16,
                             weight + (int64_t)row_of(tile_row) * k + start + unit * 16, policy);
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i += 32) {
      const int tile_row = lane + i;
      if (tile_row < ROWS && column_of(tile_row) < last) {
        copy_async_word(stage + SCALES_AT + tile_row * 4,
                        scales + (int64_t)(row_of(tile_row) / BLOCK) * (k / BLOCK) + start / BLOCK);
      }
    }
    if (++load_chunk == num_chunks) load_chunk = 0, ++load_tile;
  };
  auto issue_tokens = [&](int iteration) {  // rows of absent tokens keep whatever they hold: nobody reads their results
    const uint32_t stage = ring + (iteration % STAGES) * STAGE_BYTES;
    const int row = lane / 8, unit = lane % 8;
    const act_t* source = x + row * x_stride + chunk_start(token_chunk) + unit * 8;
#pragma unroll
    for (int i = 0; i < TOKENS; i += 4) {
      if (row + i < num_tokens) {
        copy_async(stage + WEIGHT_BYTES + token_offset(row + i, unit), source + i * x_stride);
      }
    }
#if NORM
    if (lane < CHUNK / 4) {
      copy_async(stage + NORM_AT + norm_offset(lane), norm_weight + chunk_start(token_chunk) + lane * 4);
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
      uint32_t tokens[COLUMNS][8];  // pairs of columns 16 t .. 16 t + 15 of token g
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 unit = load_shared(stage + WEIGHT_BYTES + token_offset(c * 8 + g, 2 * t + half));
          tokens[c][4 * half] = unit.x, tokens[c][4 * half + 1] = unit.y;
          tokens[c][4 * half + 2] = unit.z, tokens[c][4 * half + 3] = unit.w;
        }
      }
#if NORM
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 factors = load_shared(stage + NORM_AT + norm_offset(4 * t + i));
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          tokens[c][2 * i] = scale_pair(tokens[c][2 * i], factors.x, factors.y, my_squares[c]);
          tokens[c][2 * i + 1] = scale_pair(tokens[c][2 * i + 1], factors.z, factors.w, my_squares[c]);
        }
      }
#endif
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {  // the order in which weights are widened
          const uint32_t first = tokens[c][i], second = tokens[c][i + 1];
          tokens[c][i] = __byte_perm(first, second, 0x5410);
          tokens[c][i + 1] = __byte_perm(first, second, 0x7632);
        }
      }
#pragma unroll
      for (int rows = 0; rows < ROW_TILES; ++rows) {
        if (rows * (OUTPUTS / ROW_TILES) >= tile_columns) break;  // rows that no tile has
        const int row = rows * 16 + g;
        const uint4 low = load_shared(stage + row * CHUNK + t * 16);
        const uint4 high = load_shared(stage + (row + 8) * CHUNK + t * 16);
        const uint32_t low_words[4] = {low.x, low.y, low.z, low.w}, high_words[4] = {high.x, high.y, high.z, high.w};
        const float low_scale = load_shared_float(stage + SCALES_AT + row * 4);
        const float high_scale = load_shared_float(stage + SCALES_AT + (row + 8) * 4);
        float products[COLUMNS][4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t a0, a1, a2, a3;
          widen(low_words[i], a0, a2);
          widen(high_words[i], a1, a3);
#pragma unroll
          for (int c = 0; c < COLUMNS; ++c) {
            mma_m16n8k16(products[c], a0, a1, a2, a3, tokens[c][2 * i], tokens[c][2 * i + 1]);
          }
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          sums[rows][c][0] += products[c][0] * low_scale, sums[rows][c][1] += products[c][1] * low_scale;
          sums[rows][c][2] += products[c][2] * high_scale, sums[rows][c][3] += products[c][3] * high_scale;
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
