// SwiGLU of a stretch of values: out = gate / (1 + exp(-gate)) * up.
#pragma once

#include "cpu/simd.h"

namespace pega {

PEGA_INLINE Vec silu(Vec x) { return x / (Vec::set(1.0f) + exp(Vec::zero() - x)); }

// `out` may be `gate`.
PEGA_INLINE void silu_and_mul(const float* gate, const float* up, float* out, int64_t count) {
    int64_t i = 0;
    for (; i + Vec::width <= count; i += Vec::width) (silu(Vec::load(gate + i)) * Vec::load(up + i)).store(out + i);
    if (i < count) {
        const int64_t left = count - i;
        (silu(Vec::load_partial(gate + i, left)) * Vec::load_partial(up + i, left)).store_partial(out + i, left);
    }
}

}  // namespace pega
