// How keys and values lie in one layer's part of a KV block: what the rotary kernel writes, attention reads.
//
// Per kv head, a block is cut into tiles of 16 slots. A tile of keys is transposed, `[head_dim][16]`, so that
// the scores of 16 keys are one vector; a tile of values is `[16][head_dim]`. Elements of bfloat16 stand in
// pairs along the dimension that is summed over, `[head_dim / 2][16][2]` and `[8][head_dim][2]`, which is what
// the dot product of pairs wants and what widens to float32 with a shift and a mask.
#pragma once

#include <type_traits>

#include "cpu/numbers.h"

namespace pega {

constexpr int64_t tile_slots = 16;

template <typename Element>
struct KvLayout {
    static constexpr int pair = std::is_same_v<Element, BFloat16> ? 2 : 1;
    int64_t head_dim;
    int64_t tiles_per_block;
    int64_t values_offset;  // elements from the keys of a block to its values

    KvLayout(int64_t num_kv_heads, int64_t dim, int64_t block_size)
        : head_dim(dim),
          tiles_per_block(block_size / tile_slots),
          values_offset(num_kv_heads * block_size * dim) {}

    // Offset of a tile of keys in the block; its values are `values_offset` further on.
    PEGA_INLINE int64_t tile(int64_t kv_head, int64_t tile_in_block) const {
        return (kv_head * tiles_per_block + tile_in_block) * tile_slots * head_dim;
    }

    PEGA_INLINE int64_t key(int64_t slot, int64_t dim) const {
        return dim / pair * (tile_slots * pair) + slot * pair + dim % pair;
    }

    PEGA_INLINE int64_t value(int64_t slot, int64_t dim) const {
        return slot / pair * (head_dim * pair) + dim * pair + slot % pair;
    }
};

}  // namespace pega
