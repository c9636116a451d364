// Sixteen floats as one value: the keys of a tile of the KV cache. As many `Vec` as that takes.
#pragma once

#include "cpu/simd.h"

#define PEGA_UNROLL _Pragma("GCC unroll 16")

namespace pega {

constexpr int lane_count = 16;
constexpr int lane_parts = lane_count / Vec::width;

struct Floats {
    Vec part[lane_parts];
};

#define PEGA_EACH PEGA_UNROLL for (int i = 0; i < lane_parts; i++)

PEGA_INLINE Floats load(const float* p) {
    Floats x;
    PEGA_EACH x.part[i] = Vec::load(p + i * Vec::width);
    return x;
}

PEGA_INLINE Floats load(const Half* p) {
    Floats x;
    PEGA_EACH x.part[i] = Vec::load(p + i * Vec::width);
    return x;
}

PEGA_INLINE void store(float* p, Floats x) {
    PEGA_EACH x.part[i].store(p + i * Vec::width);
}

PEGA_INLINE Floats broadcast(float value) {
    Floats x;
    PEGA_EACH x.part[i] = Vec::set(value);
    return x;
}

PEGA_INLINE Floats operator+(Floats a, Floats b) {
    PEGA_EACH a.part[i] = a.part[i] + b.part[i];
    return a;
}

PEGA_INLINE Floats operator-(Floats a, Floats b) {
    PEGA_EACH a.part[i] = a.part[i] - b.part[i];
    return a;
}

PEGA_INLINE Floats operator*(Floats a, Floats b) {
    PEGA_EACH a.part[i] = a.part[i] * b.part[i];
    return a;
}

PEGA_INLINE Floats operator/(Floats a, Floats b) {
    PEGA_EACH a.part[i] = a.part[i] / b.part[i];
    return a;
}

PEGA_INLINE Floats fma(Floats a, Floats b, Floats c) {
    PEGA_EACH c.part[i] = fma(a.part[i], b.part[i], c.part[i]);
    return c;
}

PEGA_INLINE Floats max(Floats a, Floats b) {
    PEGA_EACH a.part[i] = max(a.part[i], b.part[i]);
    return a;
}

// The first `count` lanes of `x`, the others of `rest`.
PEGA_INLINE Floats first_lanes(Floats x, int64_t count, Floats rest) {
    static constexpr float numbers[lane_count] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Vec end = Vec::set(static_cast<float>(count));
    PEGA_EACH x.part[i] = select(end > Vec::load(numbers + i * Vec::width), x.part[i], rest.part[i]);
    return x;
}

// e^x, but 0 below -87, where the result would lose precision (and on some machines a hundred cycles).
PEGA_INLINE Vec exp_or_zero(Vec x) { return select(Vec::set(-87.0f) > x, Vec::zero(), exp(x)); }

PEGA_INLINE Floats exp_or_zero(Floats x) {
    PEGA_EACH x.part[i] = exp_or_zero(x.part[i]);
    return x;
}

PEGA_INLINE float sum(Floats x) {
    Vec total = x.part[0];
    PEGA_UNROLL for (int i = 1; i < lane_parts; i++) total = total + x.part[i];
    return reduce_add(total);
}

PEGA_INLINE float largest(Floats x) {
    Vec top = x.part[0];
    PEGA_UNROLL for (int i = 1; i < lane_parts; i++) top = max(top, x.part[i]);
    return reduce_max(top);
}

// The first and the second of sixteen pairs of bfloat16.
struct FloatPairs {
    Floats first, second;
};

PEGA_INLINE FloatPairs load_pairs(const BFloat16* p) {
    typedef int32_t Bits __attribute__((vector_size(sizeof(Vec))));
    FloatPairs x;
    PEGA_UNROLL for (int i = 0; i < lane_parts; i++) {
        Bits pairs;
        std::memcpy(&pairs, p + 2 * i * Vec::width, sizeof pairs);
        x.first.part[i].v = (decltype(Vec::v))(pairs << 16);
        x.second.part[i].v = (decltype(Vec::v))(pairs & static_cast<int32_t>(0xffff0000u));
    }
    return x;
}

#undef PEGA_EACH

}  // namespace pega
