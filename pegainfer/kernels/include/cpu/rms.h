// RMSNorm of one row; also used per head, in front of the rotary embedding.
#pragma once

#include <cmath>

#include "cpu/lanes.h"

namespace pega {

// `out` may be `x`.
PEGA_INLINE void rms_norm(const float* x, const float* weight, float* out, int64_t size, float eps) {
    Floats squares[4] = {};
    int64_t i = 0;
    for (; i + 4 * lane_count <= size; i += 4 * lane_count) {
        PEGA_UNROLL for (int chain = 0; chain < 4; chain++) {
            const Floats value = load(x + i + chain * lane_count);
            squares[chain] = multiply_add(value, value, squares[chain]);
        }
    }
    for (; i < size; i += lane_count) {
        const Floats value = load_first(x + i, size - i);
        squares[0] = multiply_add(value, value, squares[0]);
    }
    const float mean_square =
        sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(size);
    const Floats factor = broadcast(1.0f / std::sqrt(mean_square + eps));
    for (i = 0; i + lane_count <= size; i += lane_count) {
        store(out + i, load(x + i) * factor * load(weight + i));
    }
    if (i < size) {
        store_first(out + i, load_first(x + i, size - i) * factor * load_first(weight + i, size - i), size - i);
    }
}

}  // namespace pega
