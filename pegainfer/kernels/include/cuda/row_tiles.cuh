// Which request, and which tile of its packed query rows, a block serves in a varlen batch.
// A row is a (token, query head of the KV head's group) pair.
#pragma once
#include "cuda/common.cuh"

namespace pega {

struct RowTile {
  int request;      // -1: this block is surplus
  int tile;         // late tiles first: they see the most keys
  int first_token;  // of the request
  int num_rows;     // of the request
  int start;        // position of the request's first query token
};

// Called by whole warps; all of them find the same.
template <int ROWS, int GROUP_SIZE>
__device__ __forceinline__ RowTile find_row_tile(int block, const int* query_start_loc, const int* seq_lens,
                                                 int num_requests, int lane) {
  RowTile found{-1, 0, 0, 0, 0};
  int before = 0;
  for (int base = 0; base < num_requests && found.request < 0; base += 32) {
    const int r = base + lane;
    const int tokens = r < num_requests ? query_start_loc[r + 1] - query_start_loc[r] : 0;
    int up_to = (tokens * GROUP_SIZE + ROWS - 1) / ROWS;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const int other = __shfl_up_sync(0xffffffffu, up_to, offset);
      if (lane >= offset) up_to += other;
    }
    const unsigned owners = __ballot_sync(0xffffffffu, block < before + up_to);
    if (owners != 0) {
      const int owner = __ffs(owners) - 1;
      found.request = base + owner;
      found.tile = before + __shfl_sync(0xffffffffu, up_to, owner) - 1 - block;
    }
    before += __shfl_sync(0xffffffffu, up_to, 31);
  }
  if (found.request >= 0) {
    found.first_token = query_start_loc[found.request];
    const int tokens = query_start_loc[found.request + 1] - found.first_token;
    found.num_rows = tokens * GROUP_SIZE;
    found.start = seq_lens[found.request] - tokens;
  }
  return found;
}

}  // namespace pega
