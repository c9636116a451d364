// SwiGLU of a stretch of values: out = gate / (1 + exp(-gate)) * up.
#pragma once

#include "cpu/lanes.h"

namespace pega {

PEGA_INLINE Floats silu(Floats x) {
    const Floats one = broadcast(1.0f), zero = broadcast(0.0f);
    const Floats power = exp_nonpositive(zero - absolute(x));
    return x * where_less(x, zero, power, one) / (one + power);
}

// `out` may be `gate`.
PEGA_INLINE void silu_and_mul(const float* gate, const float* up, float* out, int64_t count) {
    int64_t i = 0;
    for (; i + lane_count <= count; i += lane_count) store(out + i, silu(load(gate + i)) * load(up + i));
    if (i < count) {
        store_first(out + i, silu(load_first(gate + i, count - i)) * load_first(up + i, count - i), count - i);
    }
}

}  // namespace pega
