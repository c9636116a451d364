// RMSNorm of one row; also used per head, in front of the rotary embedding.
#pragma once

#include "cpu/simd.h"

namespace pega {

// `out` may be `x`.
PEGA_INLINE void rms_norm(const float* x, const float* weight, float* out, int64_t size, float eps) {
    Vec squares[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
    int64_t i = 0;
    for (; i + 4 * Vec::width <= size; i += 4 * Vec::width) {
        for (int chain = 0; chain < 4; chain++) {
            const Vec value = Vec::load(x + i + chain * Vec::width);
            squares[chain] = fma(value, value, squares[chain]);
        }
    }
    for (; i + Vec::width <= size; i += Vec::width) squares[0] = fma(Vec::load(x + i), Vec::load(x + i), squares[0]);
    if (i < size) {
        const Vec value = Vec::load_partial(x + i, size - i);
        squares[0] = fma(value, value, squares[0]);
    }
    const float total = reduce_add((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const Vec factor = Vec::set(1.0f / std::sqrt(total / static_cast<float>(size) + eps));
    for (i = 0; i + Vec::width <= size; i += Vec::width) {
        (Vec::load(x + i) * factor * Vec::load(weight + i)).store(out + i);
    }
    if (i < size) {
        const int64_t left = size - i;
        (Vec::load_partial(x + i, left) * factor * Vec::load_partial(weight + i, left)).store_partial(out + i, left);
    }
}

}  // namespace pega
