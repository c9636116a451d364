// One warp's share of attention with tensor cores: 16 query rows against tiles of 16 keys, online softmax in base 2.
// Keys and values of a tile lie in shared memory as [16][HEAD_DIM] with 16-byte units swizzled by row.
#pragma once
#include "cuda/mma.cuh"

namespace pega {

constexpr int KEYS = 16;                    // keys a tile
constexpr int ROW_UNITS = HEAD_DIM / 8;     // 16-byte units of a key
constexpr int TILE_BYTES = KEYS * HEAD_DIM * 2;
constexpr float MASKED = -1e30f;            // finite, so that exp2 of a difference never meets inf - inf

__device__ __forceinline__ uint32_t tile_offset(int row, int unit) {
  return (row * ROW_UNITS + (unit ^ (row & 7))) * 16;
}

// Running state of 16 query rows; a lane holds rows g and g + 8.
struct RowState {
  float output[HEAD_DIM / 8][4];
  float maximum[2], sum[2];  // the sum is this lane's part until `finish`

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i) output[i][0] = output[i][1] = output[i][2] = output[i][3] = 0.f;
    maximum[0] = maximum[1] = MASKED;
    sum[0] = sum[1] = 0.f;
  }

  // Attend to TILES tiles that follow one another. `keys` and `values` are the shared addresses of the first ones;
  // `limit_low` (row g) and `limit_high` (row g + 8) are the first keys, counted from the first tile's, not to be seen.
  template <int TILES>
  __device__ __forceinline__ void attend(const uint32_t (&query)[HEAD_DIM / 16][4], uint32_t keys, uint32_t values,
                                         float scale_log2, int limit_low, int limit_high, int lane) {
    const int t = lane % 4, matrix = lane / 8, row = lane % 8;
    float scores[2 * TILES][4] = {};
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        uint32_t b[4];
        load_matrices(b, keys + tile * TILE_BYTES + tile_offset((matrix / 2) * 8 + row, k * 2 + matrix % 2));
        mma_m16n8k16(scores[2 * tile], query[k][0], query[k][1], query[k][2], query[k][3], b[0], b[1]);
        mma_m16n8k16(scores[2 * tile + 1], query[k][0], query[k][1], query[k][2], query[k][3], b[2], b[3]);
      }
    }
    if (min(limit_low, limit_high) < TILES * KEYS) {
#pragma unroll
      for (int n = 0; n < 2 * TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (n * 8 + t * 2 + i % 2 >= (i < 2 ? limit_low : limit_high)) scores[n][i] = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = scores[0][2 * r];
#pragma unroll
      for (int n = 0; n < 2 * TILES; ++n) top = fmaxf(top, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      top = fmaxf(top * scale_log2, maximum[r]);  // never -inf: `maximum` starts finite
      const float rescale = power_of_two(maximum[r] - top);
      maximum[r] = top;
      float part = 0.f;
#pragma unroll
      for (int n = 0; n < 2 * TILES; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) part += scores[n][i] = power_of_two(scores[n][i] * scale_log2 - top);
      }
      sum[r] = sum[r] * rescale + part;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) output[n][2 * r] *= rescale, output[n][2 * r + 1] *= rescale;
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const float(&low)[4] = scores[2 * tile], (&high)[4] = scores[2 * tile + 1];
      const uint32_t a0 = pack_pair(low[0], low[1]), a1 = pack_pair(low[2], low[3]);
      const uint32_t a2 = pack_pair(high[0], high[1]), a3 = pack_pair(high[2], high[3]);
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 16; ++n) {
        uint32_t b[4];
        load_matrices_transposed(
            b, values + tile * TILE_BYTES + tile_offset((matrix % 2) * 8 + row, n * 2 + matrix / 2));
        mma_m16n8k16(output[2 * n], a0, a1, a2, a3, b[0], b[1]);
        mma_m16n8k16(output[2 * n + 1], a0, a1, a2, a3, b[2], b[3]);
      }
    }
  }

  // Make `sum` the sum over the whole row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
    }
  }
};

// A fragments of 16 query rows; `low` and `high` are rows g and g + 8, or null for rows that do not exist.
__device__ __forceinline__ void load_query(uint32_t (&query)[HEAD_DIM / 16][4], const act_t* low, const act_t* high,
                                           int lane) {
  const int t = lane % 4;
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; ++k) {
    const int column = k * 16 + t * 2;
    query[k][0] = low != nullptr ? *reinterpret_cast<const uint32_t*>(low + column) : 0;
    query[k][1] = high != nullptr ? *reinterpret_cast<const uint32_t*>(high + column) : 0;
    query[k][2] = low != nullptr ? *reinterpret_cast<const uint32_t*>(low + column + 8) : 0;
    query[k][3] = high != nullptr ? *reinterpret_cast<const uint32_t*>(high + column + 8) : 0;
  }
}

}  // namespace pega
