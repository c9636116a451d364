// (token, slot) pairs in the order of their experts, and the tiles of a grouped product over them. One block.
//
// `order[p]` is the pair at position p, where pair = token * TOP_K + slot. A tile is up to `tile_rows` positions of one
// expert: {expert, first position, positions}; expert is -1 where the grid has more blocks than there are tiles.
// Pairs of an expert stand in any order: no result depends on it. Defines: NUM_EXPERTS, TOP_K, THREADS.
#include "cuda/common.cuh"

using namespace pega;

constexpr unsigned ALL = 0xffffffffu;

__device__ __forceinline__ int sum_up_to(int v, int lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int other = __shfl_up_sync(ALL, v, offset);
    if (lane >= offset) v += other;
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sort_slots(const int* __restrict__ ids, int64_t ids_stride, int* __restrict__ order, int4* __restrict__ tiles,
               int num_pairs, int tile_rows, int max_tiles) {
  release_successor();
  __shared__ int counts[NUM_EXPERTS], starts[NUM_EXPERTS], first_tiles[NUM_EXPERTS], num_tiles;
  for (int e = threadIdx.x; e < NUM_EXPERTS; e += THREADS) counts[e] = 0;
  __syncthreads();
  wait_for_predecessor();
  auto expert_of = [&](int pair) { return ids[pair / TOP_K * ids_stride + pair % TOP_K]; };
  for (int pair = threadIdx.x; pair < num_pairs; pair += THREADS) atomicAdd(&counts[expert_of(pair)], 1);
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int pairs_before = 0, tiles_before = 0;
    for (int base = 0; base < NUM_EXPERTS; base += 32) {
      const int e = base + lane, count = e < NUM_EXPERTS ? counts[e] : 0;
      const int needed = (count + tile_rows - 1) / tile_rows;
      const int pairs = sum_up_to(count, lane), tiles_here = sum_up_to(needed, lane);
      if (e < NUM_EXPERTS) {
        starts[e] = pairs_before + pairs - count;
        first_tiles[e] = tiles_before + tiles_here - needed;
      }
      pairs_before += __shfl_sync(ALL, pairs, 31);
      tiles_before += __shfl_sync(ALL, tiles_here, 31);
    }
    if (lane == 0) num_tiles = tiles_before;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < NUM_EXPERTS; e += THREADS) {
    for (int done = 0, tile = first_tiles[e]; done < counts[e]; done += tile_rows, ++tile) {
      tiles[tile] = make_int4(e, starts[e] + done, min(counts[e] - done, tile_rows), 0);
    }
  }
  for (int tile = num_tiles + threadIdx.x; tile < max_tiles; tile += THREADS) tiles[tile] = make_int4(-1, 0, 0, 0);
  __syncthreads();
  for (int pair = threadIdx.x; pair < num_pairs; pair += THREADS) {
    order[atomicAdd(&starts[expert_of(pair)], 1)] = pair;
  }
}
