// Paged causal attention of any number of query tokens a request (varlen), with m16n8k16 tensor cores.
//
// A block takes one KV head and 128 rows of one request, a row being a (token, query head of the group) pair: keys and
// values are read once for the whole group. KV blocks pass through a ring of two stages of 64 keys in shared memory.
// Requests have different numbers of row tiles; every block finds its own from `query_start_loc`. The grid is an upper
// bound, surplus blocks leave. Late tiles see the most keys, so they come first.
//
// A KV block of a layer holds keys [kv_head][BLOCK_SIZE][HEAD_DIM], then values alike.
// Defines: HEAD_DIM (64, 128, 256), NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE (multiple of 16).
#include "cuda/attention.cuh"
#include "cuda/row_tiles.cuh"

using namespace pega;

constexpr int WARPS = 8;
constexpr int GROUP = NUM_HEADS / NUM_KV_HEADS;
constexpr int ROWS = WARPS * 16;
constexpr int TILES = HEAD_DIM > 128 ? 2 : 4;  // key tiles a stage
constexpr int STAGE_BYTES = 2 * TILES * TILE_BYTES;

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    paged_attention_prefill(const act_t* __restrict__ q, int64_t q_stride, const uint8_t* __restrict__ kv,
                            int64_t kv_block_stride, const int* __restrict__ block_tables, int64_t table_stride,
                            const int* __restrict__ query_start_loc, const int* __restrict__ seq_lens,
                            act_t* __restrict__ out, int64_t out_stride, int num_requests, float scale_log2) {
  release_successor();
  extern __shared__ __align__(128) uint8_t shared[];
  const int kv_head = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  wait_for_predecessor();

  const RowTile mine = find_row_tile<ROWS, GROUP>(blockIdx.x, query_start_loc, seq_lens, num_requests, lane);
  if (mine.request < 0) return;
  const int num_rows = mine.num_rows, start = mine.start, first_token = mine.first_token;
  const int low = mine.tile * ROWS + warp * 16 + g, high = low + 8;
  const int last_row = min((mine.tile + 1) * ROWS, num_rows) - 1;
  const int num_keys = start + last_row / GROUP + 1;
  const int num_stages = (num_keys + TILES * KEYS - 1) / (TILES * KEYS);
  const int* table = block_tables + mine.request * table_stride;
  const uint32_t ring = shared_address(shared);

  auto issue = [&](int stage) {
    if (stage < num_stages) {
      const uint32_t target = ring + (stage & 1) * STAGE_BYTES;
#pragma unroll
      for (int j = threadIdx.x; j < TILES * KEYS * ROW_UNITS; j += WARPS * 32) {
        const int row = j / ROW_UNITS, unit = j % ROW_UNITS, key = stage * TILES * KEYS + row;
        const bool valid = key < num_keys;  // zeros beyond: a stale NaN times zero is NaN
        const uint8_t* block = kv + (int64_t)table[valid ? key / BLOCK_SIZE : 0] * kv_block_stride;
        const act_t* source =
            reinterpret_cast<const act_t*>(block) + (kv_head * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM + unit * 8;
        const uint32_t offset = (row / KEYS) * TILE_BYTES + tile_offset(row % KEYS, unit);
        copy_async(target + offset, source, valid);
        copy_async(target + TILES * TILE_BYTES + offset, source + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, valid);
      }
    }
    commit_copies();
  };
  issue(0);

  auto query_row = [&](int row) {
    return row < num_rows ? q + (first_token + row / GROUP) * q_stride + (kv_head * GROUP + row % GROUP) * HEAD_DIM
                          : nullptr;
  };
  uint32_t query[HEAD_DIM / 16][4];
  load_query(query, query_row(low), query_row(high), lane);
  const int limit_low = start + low / GROUP + 1, limit_high = start + high / GROUP + 1;
  const int warp_limit = start + (mine.tile * ROWS + warp * 16 + 15) / GROUP + 1;
  RowState state;
  state.reset();
  for (int stage = 0; stage < num_stages; ++stage) {
    wait_for_copies<0>();
    __syncthreads();
    issue(stage + 1);
    const int base = stage * TILES * KEYS;
    if (base < warp_limit) {  // else no row of this warp sees these keys
      const uint32_t source = ring + (stage & 1) * STAGE_BYTES;
      state.attend<TILES>(query, source, source + TILES * TILE_BYTES, scale_log2, limit_low - base, limit_high - base,
                          lane);
    }
  }
  state.finish();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = low + 8 * r;
    if (row >= num_rows) continue;
    const float inverse = state.sum[r] > 0.f ? 1.f / state.sum[r] : 0.f;
    act_t* target = out + (first_token + row / GROUP) * out_stride + (kv_head * GROUP + row % GROUP) * HEAD_DIM;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      *reinterpret_cast<uint32_t*>(target + n * 8 + 2 * t) =
          pack_pair(state.output[n][2 * r] * inverse, state.output[n][2 * r + 1] * inverse);
    }
  }
}
