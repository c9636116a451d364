// Paged causal attention of any number of query tokens a request (varlen), for Hopper: warpgroup products.
//
// A block takes one KV head and 128 rows of one request, a row being a (token, query head of the group) pair. One
// warpgroup copies: tiles of 128 keys and values pass through three stages each in shared memory, box by box (a box is
// half of the columns of a block), but for the last tile of a request, which is filled up with zeros. Two warpgroups of 64
// rows compute, and keep the tensor cores busy during their softmax: the scores of the next tile are issued before the
// values of this one, so that the exponentials of the next overlap the product of this.
//
// SPLIT 1: few rows over many keys would leave most multiprocessors idle, so gridDim.z blocks share the keys of a tile of
// rows, and the last of them to arrive adds up what all have left in `partial`, in order. There are at most 32. (Code that
// is never reached would cost 4%.)
//
// A KV block of a layer holds keys [kv_head][BLOCK_SIZE][128], then values alike.
// Defines: NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE (16, 32, 64 or a multiple of 128), SPLIT; HEAD_DIM is 128.
#include "cuda/row_tiles.cuh"
#include "cuda/wgmma.cuh"

using namespace pega;

constexpr int GROUP = NUM_HEADS / NUM_KV_HEADS;
constexpr int DIM = 128;
constexpr int ROWS = 128;
constexpr int KEYS = 128;                      // a tile
constexpr int HALF_BYTES = KEYS * 128;         // 64 columns of a tile
constexpr int TILE_BYTES = 2 * HALF_BYTES;
constexpr int STAGES = 3;
constexpr int COPIERS = 128, COMPUTERS = 256;  // threads
constexpr float NEVER = -1e30f;
#if SPLIT
constexpr int LEAST_TILES = 2;                 // of a share
constexpr int PARTIAL = ROWS * (DIM + 2);      // floats of a share: outputs, then maximum and sum of each row
#endif

// Shared memory: keys [STAGES], values [STAGES], queries [2 warpgroups], barriers.
constexpr int KEYS_AT = 0, VALUES_AT = STAGES * TILE_BYTES, QUERY_AT = 2 * STAGES * TILE_BYTES;
constexpr int BARRIERS_AT = QUERY_AT + ROWS * DIM * 2;
enum Barrier { KEYS_FULL = 0, KEYS_FREE = STAGES, VALUES_FULL = 2 * STAGES, VALUES_FREE = 3 * STAGES };

// Named barriers of the computing threads; 0 is __syncthreads.
enum Meeting { QUERY_READY = 1, PARTIAL_READY = 3 };  // the first once for each warpgroup

__device__ __forceinline__ void meet(int meeting, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(meeting), "r"(threads) : "memory");
}

// Keys `first_key` to `seq_len`, as many tiles of them as are asked for.
__device__ __forceinline__ void copy_tiles(const TensorMap& boxes, const uint8_t* kv, int64_t kv_block_stride,
                                           const int* table, int kv_head, int first_key, int seq_len, int num_tiles,
                                           uint32_t shared, uint32_t barriers) {
  constexpr int BLOCKS_A_TILE = BLOCK_SIZE < KEYS ? KEYS / BLOCK_SIZE : 1;
  constexpr int BOX_ROWS = KEYS / BLOCKS_A_TILE;
  const int lane = threadIdx.x % 32, unit = threadIdx.x % 16, first_row = threadIdx.x / 16;
  auto is_whole = [&](int tile) { return first_key + (tile + 1) * KEYS <= seq_len; };
  // A lane holds the table entry of one block of a tile, read a tile ahead: nothing waits for it.
  auto entry_of = [&](int tile) {
    const int key = first_key + tile * KEYS + lane % BLOCKS_A_TILE * BLOCK_SIZE;
    return key < seq_len ? table[key / BLOCK_SIZE] : 0;
  };
  auto load_tile = [&](int tile, int entry, bool is_value) {
    const int stage = tile % STAGES, round = tile / STAGES;
    const int head = (is_value ? NUM_KV_HEADS : 0) + kv_head;
    const uint32_t full = barriers + ((is_value ? VALUES_FULL : KEYS_FULL) + stage) * 8;
    const uint32_t target = shared + (is_value ? VALUES_AT : KEYS_AT) + stage * TILE_BYTES;
    if (round > 0) barrier_wait(barriers + ((is_value ? VALUES_FREE : KEYS_FREE) + stage) * 8, (round - 1) & 1);
    if (is_whole(tile)) {
      if (threadIdx.x == 0) {
        barrier_arrive_expecting(full, TILE_BYTES);
      } else {
        barrier_arrive(full);
      }
      if (threadIdx.x < 2 * BLOCKS_A_TILE) {  // entries repeat along the lanes
        const int block = lane % BLOCKS_A_TILE, half = lane / BLOCKS_A_TILE;
        const int row = BLOCK_SIZE > KEYS ? (first_key + tile * KEYS) % BLOCK_SIZE : 0;
        copy_box(target + half * HALF_BYTES + block * BOX_ROWS * 128, boxes, half * 64, row, head, entry, full);
      }
      return;
    }
    const act_t* source = reinterpret_cast<const act_t*>(kv) + (int64_t)head * BLOCK_SIZE * DIM + unit * 8;
#pragma unroll 4
    for (int i = 0; i < KEYS; i += COPIERS / 16) {
      const int row = i + first_row, key = first_key + tile * KEYS + row;
      const int64_t block = __shfl_sync(0xffffffffu, entry, row / BLOCK_SIZE);
      copy_async(target + (unit / 8) * HALF_BYTES + swizzled_offset(row, unit % 8),
                 source + block * (kv_block_stride / (int64_t)sizeof(act_t)) + key % BLOCK_SIZE * DIM,
                 key < seq_len);  // zeros beyond: NaN times 0 is NaN
    }
    commit_copies();
  };
  int current = entry_of(0), next = num_tiles > 1 ? entry_of(1) : 0;
  load_tile(0, current, false);
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int after = tile + 2 < num_tiles ? entry_of(tile + 2) : 0;
    if (tile + 1 < num_tiles) load_tile(tile + 1, next, false);
    load_tile(tile, current, true);
    current = next;
    next = after;
  }
  if (is_whole(num_tiles - 1)) return;
  const int stage = (num_tiles - 1) % STAGES;
  wait_for_copies<1>();
  fence_for_tensor_cores();
  barrier_arrive(barriers + (KEYS_FULL + stage) * 8);
  wait_for_copies<0>();
  fence_for_tensor_cores();
  barrier_arrive(barriers + (VALUES_FULL + stage) * 8);
}

// Scores of 64 rows against one tile of keys; issued, not waited for.
__device__ __forceinline__ void issue_scores(float (&scores)[64], uint32_t query, uint32_t keys) {
  fence_registers(scores);
  warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < DIM / 16; ++k) {
    const uint32_t column = (k % 4) * 32;
    product_shared(scores, operand_descriptor(query + (k / 4) * (64 * 128) + column, 16),
                   operand_descriptor(keys + (k / 4) * HALF_BYTES + column, 16), k > 0);
  }
  warpgroup_commit();
}

__device__ __forceinline__ void issue_values(float (&output)[64], const uint32_t (&weights)[32], uint32_t values) {
  fence_registers(output);
  warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < KEYS / 16; ++k) {
    product_registers(output, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2], weights[4 * k + 3],
                      operand_descriptor(values + k * 16 * 128, HALF_BYTES), 1);
  }
  warpgroup_commit();
}

extern "C" __global__ void __launch_bounds__(COPIERS + COMPUTERS, 1)
    paged_attention_prefill_sm90(const __grid_constant__ TensorMap boxes, const act_t* __restrict__ q, int64_t q_stride,
                                 const uint8_t* __restrict__ kv,
                                 int64_t kv_block_stride, const int* __restrict__ block_tables, int64_t table_stride,
                                 const int* __restrict__ query_start_loc, const int* __restrict__ seq_lens,
                                 act_t* __restrict__ out, int64_t out_stride, float* __restrict__ partial,
                                 int* __restrict__ arrivals, int num_requests, float scale_log2) {
  release_successor();
  extern __shared__ __align__(1024) uint8_t memory[];
#if SPLIT
  __shared__ int is_last;
#endif
  const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t barriers = shared + BARRIERS_AT;
  const int kv_head = blockIdx.y, lane = threadIdx.x % 32;
  wait_for_predecessor();
  const RowTile mine = find_row_tile<ROWS, GROUP>(blockIdx.x, query_start_loc, seq_lens, num_requests, lane);
  if (mine.request < 0) return;
  const int last_row = min((mine.tile + 1) * ROWS, mine.num_rows) - 1;
  const int num_keys = mine.start + last_row / GROUP + 1;
  const int all_tiles = (num_keys + KEYS - 1) / KEYS;
#if SPLIT
  const int tiles_a_share = max((all_tiles + (int)gridDim.z - 1) / (int)gridDim.z, LEAST_TILES);
  const int num_shares = (all_tiles + tiles_a_share - 1) / tiles_a_share;
  const int share = blockIdx.z, first_tile = share * tiles_a_share;
  if (share >= num_shares) return;
#else
  const int tiles_a_share = all_tiles;
  constexpr int first_tile = 0;
#endif
  const int num_tiles = min(tiles_a_share, all_tiles - first_tile), first_key = first_tile * KEYS;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(barriers + (KEYS_FULL + i) * 8, COPIERS);
      barrier_init(barriers + (VALUES_FULL + i) * 8, COPIERS);
      barrier_init(barriers + (KEYS_FREE + i) * 8, COMPUTERS);
      barrier_init(barriers + (VALUES_FREE + i) * 8, COMPUTERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (threadIdx.x < COPIERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    copy_tiles(boxes, kv, kv_block_stride, block_tables + mine.request * table_stride, kv_head, first_key,
               seq_lens[mine.request], num_tiles, shared, barriers);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int first_row = mine.tile * ROWS + group * 64;
    const uint32_t query = shared + QUERY_AT + group * (64 * DIM * 2);
    for (int i = thread; i < 64 * 16; i += 128) {
      const int row = first_row + i / 16, unit = i % 16;
      const act_t* source = q + (mine.first_token + row / GROUP) * q_stride + (kv_head * GROUP + row % GROUP) * DIM;
      const bool valid = row < mine.num_rows;
      copy_async(query + (unit / 8) * (64 * 128) + swizzled_offset(i / 16, unit % 8), valid ? source + unit * 8 : q,
                 valid);
    }
    commit_copies();
    wait_for_copies<0>();
    fence_for_tensor_cores();
    meet(QUERY_READY + group, 128);

    const int low = first_row + warp * 16 + g;
    const int limit[2] = {mine.start + low / GROUP + 1, mine.start + (low + 8) / GROUP + 1};
    float output[64] = {}, scores[64], maximum[2] = {NEVER, NEVER}, sum[2] = {0.f, 0.f}, rescale[2];
    uint32_t weights[32];

    // Scores of a tile become weights: mask, running maximum, exponentials, partial sums.
    auto soften = [&](int tile) {
      const int base = first_key + tile * KEYS;
      if (base + KEYS > limit[0]) {  // limit[0] is the smaller one
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          if (base + (i / 4) * 8 + t * 2 + i % 2 >= limit[(i / 2) % 2]) scores[i] = -INFINITY;
        }
      }
      // Four chains side by side: with two warps a scheduler, latency is what this costs.
      float top[2][2] = {{scores[0], scores[1]}, {scores[2], scores[3]}}, part[2][2] = {};
#pragma unroll
      for (int i = 4; i < 64; ++i) top[(i / 2) % 2][i % 2] = fmaxf(top[(i / 2) % 2][i % 2], scores[i]);
      float peak[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        peak[r] = fmaxf(top[r][0], top[r][1]);
        peak[r] = fmaxf(peak[r], __shfl_xor_sync(0xffffffffu, peak[r], 1));
        peak[r] = fmaxf(peak[r], __shfl_xor_sync(0xffffffffu, peak[r], 2));
        peak[r] = fmaxf(peak[r] * scale_log2, maximum[r]);
        rescale[r] = power_of_two(maximum[r] - peak[r]);
        maximum[r] = peak[r];
      }
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        scores[i] = power_of_two(scores[i] * scale_log2 - peak[(i / 2) % 2]);
        part[(i / 2) % 2][i % 2] += scores[i];
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] = sum[r] * rescale[r] + (part[r][0] + part[r][1]);
    };
    auto rescale_output = [&] {
#pragma unroll
      for (int i = 0; i < 64; ++i) output[i] *= rescale[(i / 2) % 2];
    };
    auto take_weights = [&] {
#pragma unroll
      for (int i = 0; i < 32; ++i) weights[i] = pack_pair(scores[2 * i], scores[2 * i + 1]);
    };

    barrier_wait(barriers + KEYS_FULL * 8, 0);
    issue_scores(scores, query, shared + KEYS_AT);
    warpgroup_wait<0>();
    fence_registers(scores);
    barrier_arrive(barriers + KEYS_FREE * 8);
    soften(0);
    take_weights();
    const int last = num_tiles - 1;
    for (int tile = 0; tile < last; ++tile) {
      const int stage = tile % STAGES, next = (tile + 1) % STAGES;
      barrier_wait(barriers + (KEYS_FULL + next) * 8, ((tile + 1) / STAGES) & 1);
      issue_scores(scores, query, shared + KEYS_AT + next * TILE_BYTES);
      rescale_output();  // while the tensor cores are busy
      barrier_wait(barriers + (VALUES_FULL + stage) * 8, (tile / STAGES) & 1);
      issue_values(output, weights, shared + VALUES_AT + stage * TILE_BYTES);
      warpgroup_wait<1>();
      fence_registers(scores);
      barrier_arrive(barriers + (KEYS_FREE + next) * 8);
      soften(tile + 1);
      warpgroup_wait<0>();
      fence_registers(output);
      barrier_arrive(barriers + (VALUES_FREE + stage) * 8);
      take_weights();
    }
    rescale_output();
    barrier_wait(barriers + (VALUES_FULL + last % STAGES) * 8, (last / STAGES) & 1);
    issue_values(output, weights, shared + VALUES_AT + (last % STAGES) * TILE_BYTES);
    warpgroup_wait<0>();
    fence_registers(output);
#if SPLIT
    const int64_t place = (int64_t)blockIdx.x * gridDim.y + kv_head;
    float* shares = partial + place * gridDim.z * PARTIAL;
#endif
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
      const int row = low + 8 * r;
#if SPLIT
      if (num_shares > 1) {
        const int at = group * 64 + warp * 16 + g + 8 * r;
        float* target = shares + (int64_t)share * PARTIAL + at * DIM;
#pragma unroll
        for (int n = 0; n < 16; ++n) {
          *reinterpret_cast<float2*>(target + n * 8 + 2 * t) =
              make_float2(output[4 * n + 2 * r], output[4 * n + 2 * r + 1]);
        }
        if (t == 0) {
          float* tail = shares + (int64_t)share * PARTIAL + ROWS * DIM + at * 2;
          *reinterpret_cast<float2*>(tail) = make_float2(maximum[r], sum[r]);
        }
        continue;
      }
#endif
      if (row >= mine.num_rows) continue;
      const float inverse = sum[r] > 0.f ? 1.f / sum[r] : 0.f;
      act_t* target = out + (mine.first_token + row / GROUP) * out_stride + (kv_head * GROUP + row % GROUP) * DIM;
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        *reinterpret_cast<uint32_t*>(target + n * 8 + 2 * t) =
            pack_pair(output[4 * n + 2 * r] * inverse, output[4 * n + 2 * r + 1] * inverse);
      }
    }
#if SPLIT
    if (num_shares == 1) return;
    __threadfence();
    meet(PARTIAL_READY, COMPUTERS);
    if (threadIdx.x == COPIERS) is_last = atomicAdd(arrivals + place, 1) == num_shares - 1;
    meet(PARTIAL_READY, COMPUTERS);
    if (!is_last) return;
    if (threadIdx.x == COPIERS) arrivals[place] = 0;  // ready for the next launch
    __threadfence();
    for (int at = (threadIdx.x - COPIERS) / 32; at < ROWS; at += COMPUTERS / 32) {
      const int row = mine.tile * ROWS + at;
      if (row >= mine.num_rows) break;
      float2 tail = make_float2(NEVER, 0.f);  // of share `lane`
      if (lane < num_shares) {
        tail = __ldcg(reinterpret_cast<const float2*>(shares + (int64_t)lane * PARTIAL + ROWS * DIM + at * 2));
      }
      const float weight = power_of_two(tail.x - warp_max(tail.x));
      const float total = warp_sum(weight * tail.y);
      float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
      for (int s = 0; s < num_shares; ++s) {
        const float factor = __shfl_sync(0xffffffffu, weight, s);
        const float4 piece =
            __ldcg(reinterpret_cast<const float4*>(shares + (int64_t)s * PARTIAL + at * DIM + lane * 4));
        value.x += factor * piece.x, value.y += factor * piece.y, value.z += factor * piece.z, value.w += factor * piece.w;
      }
      const float inverse = total > 0.f ? 1.f / total : 0.f;
      act_t* target = out + (mine.first_token + row / GROUP) * out_stride + (kv_head * GROUP + row % GROUP) * DIM;
      *reinterpret_cast<uint2*>(target + lane * 4) =
          make_uint2(pack_pair(value.x * inverse, value.y * inverse), pack_pair(value.z * inverse, value.w * inverse));
    }
#endif
  }
}
