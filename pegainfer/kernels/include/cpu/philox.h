// Philox4x32-10: random bits as a pure function of a key and a counter (Salmon et al., SC'11).
#pragma once

#include "cpu/numbers.h"

namespace pega {

struct PhiloxWords {
    uint32_t word[4];
};

PEGA_INLINE PhiloxWords philox4x32(PhiloxWords counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t{0xD2511F53u} * counter.word[0], p1 = uint64_t{0xCD9E8D57u} * counter.word[2];
        counter = {{static_cast<uint32_t>(p1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(p1),
                    static_cast<uint32_t>(p0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(p0)}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// A number in [0, 1) with 53 random bits.
PEGA_INLINE double uniform(uint64_t seed, uint64_t counter) {
    const PhiloxWords start = {{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0}};
    const PhiloxWords words = philox4x32(start, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    return static_cast<double>((uint64_t{words.word[0]} << 32 | words.word[1]) >> 11) * 0x1p-53;
}

}  // namespace pega
