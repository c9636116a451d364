// Paged attention of one query token a request, split over the keys (flash decoding).
//
// A block takes one KV head of one request and one share of its KV blocks: the GROUP query heads are the rows of the
// tensor-core product. Each of its warps streams KV blocks of its own through a ring in shared memory; the warps merge
// in shared memory, the blocks of a request through `partial`, where the last one to arrive adds the shares up in order.
// How many shares a request has is fixed at launch (gridDim.z); a request shorter than that uses fewer.
//
// Lengths, tables and all keys but the newest were there before this step began, so they are read before the wait for
// the predecessor; only the tile with the newest key has to wait for it.
//
// ROPE 1: `q` holds merged projections as they come from the product. The block normalises and rotates its queries; the
// one with the newest key does so with that and writes key and value to the cache, which nobody then reads in this step.
//
// A KV block of a layer holds keys [kv_head][16][HEAD_DIM], then values alike.
// Defines: HEAD_DIM (64, 128, 256), NUM_HEADS, NUM_KV_HEADS (GROUP <= 16), BLOCK_SIZE (multiple of 16), WARPS, STAGES,
// ROPE, QK_NORM.
#include "cuda/attention.cuh"
#if ROPE
#include "cuda/rope.cuh"
#endif

using namespace pega;

constexpr int GROUP = NUM_HEADS / NUM_KV_HEADS;
constexpr int STAGE_BYTES = 2 * TILE_BYTES;
constexpr int PARTIAL = GROUP * (HEAD_DIM + 2);  // floats of one share: outputs, then maximum and sum of each row
constexpr int MAX_SHARES = 64;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    paged_attention_decode(const act_t* __restrict__ q, int64_t q_stride,
#if ROPE
                           const int* __restrict__ slot_mapping, const float* __restrict__ cos_sin,
                           const float* __restrict__ q_norm, const float* __restrict__ k_norm, float eps, uint8_t* kv,
#else
                           const uint8_t* __restrict__ kv,
#endif
                           int64_t kv_block_stride, const int* __restrict__ block_tables, int64_t table_stride,
                           const int* __restrict__ seq_lens, act_t* __restrict__ out, int64_t out_stride,
                           float* __restrict__ partial, int* __restrict__ arrivals, float scale_log2) {
  release_successor();
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float merged[WARPS][GROUP][2], weights[GROUP][MAX_SHARES];
  __shared__ int is_last;
#if ROPE
  __shared__ __align__(16) act_t rotated[GROUP + 2][HEAD_DIM];  // queries, then the newest key and value
#endif
  const int request = blockIdx.x, kv_head = blockIdx.y, share = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int seq_len = seq_lens[request];
  const int num_tiles = (seq_len + KEYS - 1) / KEYS;
  const int tiles_a_share = max((num_tiles + (int)gridDim.z - 1) / (int)gridDim.z, WARPS);
  const int num_shares = max((num_tiles + tiles_a_share - 1) / tiles_a_share, 1);
  if (share >= num_shares) return;
  const int first = share * tiles_a_share, last = min(first + tiles_a_share, num_tiles);
  const int mine = last - first > warp ? (last - first - warp - 1) / WARPS + 1 : 0;  // tiles of this warp
  const int* table = block_tables + request * table_stride;
  const uint32_t ring = shared_address(shared) + warp * STAGES * STAGE_BYTES;

  auto issue = [&](int i) {
    const int key = (first + i * WARPS + warp) * KEYS;
    const uint8_t* block = kv + (int64_t)table[key / BLOCK_SIZE] * kv_block_stride;
    const act_t* keys = reinterpret_cast<const act_t*>(block) + (kv_head * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM;
    const act_t* values = keys + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM;
    const uint32_t stage = ring + (i % STAGES) * STAGE_BYTES;
#pragma unroll 4
    for (int j = lane; j < KEYS * ROW_UNITS; j += 32) {
      const uint32_t offset = tile_offset(j / ROW_UNITS, j % ROW_UNITS);
      // Zeros beyond the end: a stale NaN times zero is NaN. The newest key is not in the cache yet with ROPE.
      const bool valid = key + j / ROW_UNITS < seq_len - ROPE;
      copy_async(stage + offset, keys + j * 8, valid);
      copy_async(stage + TILE_BYTES + offset, values + j * 8, valid);
    }
    commit_copies();
  };
  // One loop, so that every piece of code exists once: a kernel this short spends its time fetching instructions.
  const bool has_newest = mine > 0 && first + (mine - 1) * WARPS + warp == num_tiles - 1;
  int issued = 0, available = has_newest && !ROPE ? mine - 1 : mine;
  bool waited = false;
  uint32_t query[HEAD_DIM / 16][4];
  RowState state;
  state.reset();
#pragma unroll 1
  for (int i = 0; i < mine || !waited;) {
#pragma unroll 1
    for (; issued < min(available, i + STAGES - 1); ++issued) issue(issued);
    if (!waited) {
      wait_for_predecessor();
      waited = true;
      available = mine;
#if ROPE
      const int heads = GROUP + (share == num_shares - 1 ? 2 : 0);
#pragma unroll 1
      for (int head = threadIdx.x / LANES; head < heads; head += WARPS * 32 / LANES) {
        const int of_group = threadIdx.x % LANES;
        const int column = head < GROUP ? kv_head * GROUP + head : NUM_HEADS + (head - GROUP) * NUM_KV_HEADS + kv_head;
        HeadPairs pairs;
        pairs.take(q + request * q_stride + column * HEAD_DIM, of_group);
        if (head <= GROUP) {
          if (QK_NORM) pairs.normalise(head < GROUP ? q_norm : k_norm, eps, of_group);
          pairs.rotate(cos_sin + (int64_t)max(seq_len - 1, 0) * HEAD_DIM, of_group);
        }
        pairs.put(rotated[head], of_group);
        const int slot = slot_mapping[request];
        if (head < GROUP || slot < 0) continue;
        act_t* block = reinterpret_cast<act_t*>(kv + (int64_t)(slot / BLOCK_SIZE) * kv_block_stride);
        pairs.put(block + ((head - GROUP) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE * HEAD_DIM + slot % BLOCK_SIZE * HEAD_DIM,
                  of_group);
      }
      __syncthreads();
      const act_t* rows = rotated[0];
#else
      const act_t* rows = q + request * q_stride + kv_head * GROUP * HEAD_DIM;
#endif
      load_query(query, g < GROUP ? rows + g * HEAD_DIM : nullptr, g + 8 < GROUP ? rows + (g + 8) * HEAD_DIM : nullptr,
                 lane);
      continue;
    }
    if (issued - i > STAGES - 2) {
      wait_for_copies<STAGES - 2>();
    } else {
      wait_for_copies<0>();
    }
    __syncwarp();
    const uint32_t stage = ring + (i % STAGES) * STAGE_BYTES;
#if ROPE
    if (has_newest && i == mine - 1) {
      for (int j = lane; j < 2 * ROW_UNITS; j += 32) {
        const uint4 piece = *reinterpret_cast<const uint4*>(&rotated[GROUP + j / ROW_UNITS][j % ROW_UNITS * 8]);
        store_shared(stage + j / ROW_UNITS * TILE_BYTES + tile_offset((seq_len - 1) % KEYS, j % ROW_UNITS), piece);
      }
      __syncwarp();
    }
#endif
    const int limit = seq_len - (first + i * WARPS + warp) * KEYS;
    state.attend<1>(query, stage, stage + TILE_BYTES, scale_log2, limit, limit, lane);
    __syncwarp();
    ++i;
  }
  state.finish();
  __syncthreads();

  // Merge the warps: outputs through the (now idle) ring memory.
  float* outputs = reinterpret_cast<float*>(shared);  // [WARPS][GROUP][HEAD_DIM]
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = g + 8 * r;
    if (row < GROUP) {
      if (t == 0) merged[warp][row][0] = state.maximum[r], merged[warp][row][1] = state.sum[r];
      float* target = outputs + (warp * GROUP + row) * HEAD_DIM;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        target[n * 8 + 2 * t] = state.output[n][2 * r];
        target[n * 8 + 2 * t + 1] = state.output[n][2 * r + 1];
      }
    }
  }
  __syncthreads();
  float* my_partial = partial + ((int64_t)(request * NUM_KV_HEADS + kv_head) * gridDim.z + share) * PARTIAL;
  for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += WARPS * 32) {
    const int row = i / HEAD_DIM;
    float top = MASKED, value = 0.f, sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, merged[w][row][0]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float weight = power_of_two(merged[w][row][0] - top);
      value += weight * outputs[w * GROUP * HEAD_DIM + i];
      sum += weight * merged[w][row][1];
    }
    if (num_shares == 1) {
      out[request * out_stride + kv_head * GROUP * HEAD_DIM + i] = from_float<act_t>(sum > 0.f ? value / sum : 0.f);
    } else {
      my_partial[i] = value;
      if (i % HEAD_DIM == 0) {
        my_partial[GROUP * HEAD_DIM + row * 2] = top;
        my_partial[GROUP * HEAD_DIM + row * 2 + 1] = sum;
      }
    }
  }
  if (num_shares == 1) return;
  __threadfence();
  __syncthreads();
  int* counter = arrivals + request * NUM_KV_HEADS + kv_head;
  if (threadIdx.x == 0) is_last = atomicAdd(counter, 1) == num_shares - 1;
  __syncthreads();
  if (!is_last) return;
  if (threadIdx.x == 0) *counter = 0;  // ready for the next launch
  __threadfence();
  const float* shares = partial + (int64_t)(request * NUM_KV_HEADS + kv_head) * gridDim.z * PARTIAL;
  for (int row = warp; row < GROUP; row += WARPS) {  // the weight of each share
    float maxima[MAX_SHARES / 32], sums[MAX_SHARES / 32], top = MASKED, sum = 0.f;
#pragma unroll
    for (int i = 0; i < MAX_SHARES / 32; ++i) {
      const int s = i * 32 + lane;
      const float* tail = shares + s * PARTIAL + GROUP * HEAD_DIM + row * 2;
      maxima[i] = s < num_shares ? __ldcg(tail) : MASKED;
      sums[i] = s < num_shares ? __ldcg(tail + 1) : 0.f;
      top = fmaxf(top, maxima[i]);
    }
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < MAX_SHARES / 32; ++i) {
      maxima[i] = power_of_two(maxima[i] - top);
      sum += maxima[i] * sums[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < MAX_SHARES / 32; ++i) weights[row][i * 32 + lane] = sum > 0.f ? maxima[i] / sum : 0.f;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += WARPS * 32) {
    float value = 0.f;
#pragma unroll 8
    for (int s = 0; s < num_shares; ++s) value += weights[i / HEAD_DIM][s] * __ldcg(shares + s * PARTIAL + i);
    out[request * out_stride + kv_head * GROUP * HEAD_DIM + i] = from_float<act_t>(value);
  }
}
