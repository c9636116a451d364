// Sixteen float32 lanes as one value, whatever the instruction set: one AVX-512 register, two of AVX2, four of
// 16 bytes elsewhere. Every operation works lane by lane and in the same order on all of them.
#pragma once

#include "cpu/numbers.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define PEGA_BF16_DOT 1
#else
#define PEGA_BF16_DOT 0
#endif

#define PEGA_UNROLL _Pragma("GCC unroll 16")

namespace pega {

constexpr int lane_count = 16;

#if defined(__AVX512F__)
constexpr int lane_registers = 1;
using FloatRegister = __m512;
#elif defined(__AVX2__)
constexpr int lane_registers = 2;
using FloatRegister = __m256;
#else
constexpr int lane_registers = 4;
typedef float FloatRegister __attribute__((vector_size(16)));
#endif
constexpr int register_lanes = lane_count / lane_registers;
typedef int32_t IntRegister __attribute__((vector_size(sizeof(FloatRegister))));

struct Floats {
    FloatRegister r[lane_registers];
};

struct Ints {
    IntRegister r[lane_registers];
};

#define PEGA_EACH PEGA_UNROLL for (int i = 0; i < lane_registers; i++)

PEGA_INLINE Floats load(const float* p) {
    Floats x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

PEGA_INLINE void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }

#if defined(__AVX512F__)
PEGA_INLINE __mmask16 first_lanes(int64_t count) {
    return static_cast<__mmask16>(count < lane_count ? (1u << count) - 1 : 0xffffu);
}
#endif

// The first `count` lanes (all of them if there are more), zero in the others.
PEGA_INLINE Floats load_first(const float* p, int64_t count) {
#if defined(__AVX512F__)
    return {{_mm512_maskz_loadu_ps(first_lanes(count), p)}};
#else
    float values[lane_count] = {};
    std::memcpy(values, p, sizeof(float) * static_cast<size_t>(count < lane_count ? count : lane_count));
    return load(values);
#endif
}

PEGA_INLINE void store_first(float* p, Floats x, int64_t count) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, first_lanes(count), x.r[0]);
#else
    float values[lane_count];
    store(values, x);
    std::memcpy(p, values, sizeof(float) * static_cast<size_t>(count < lane_count ? count : lane_count));
#endif
}

PEGA_INLINE Floats broadcast(float value) {
    Floats x;
    PEGA_EACH x.r[i] = value - FloatRegister{};
    return x;
}

PEGA_INLINE Floats operator+(Floats a, Floats b) {
    PEGA_EACH a.r[i] = a.r[i] + b.r[i];
    return a;
}

PEGA_INLINE Floats operator-(Floats a, Floats b) {
    PEGA_EACH a.r[i] = a.r[i] - b.r[i];
    return a;
}

PEGA_INLINE Floats operator*(Floats a, Floats b) {
    PEGA_EACH a.r[i] = a.r[i] * b.r[i];
    return a;
}

PEGA_INLINE Floats operator/(Floats a, Floats b) {
    PEGA_EACH a.r[i] = a.r[i] / b.r[i];
    return a;
}

// a * b + c, with one rounding where the machine has it.
PEGA_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    PEGA_EACH c.r[i] = _mm512_fmadd_ps(a.r[i], b.r[i], c.r[i]);
#elif defined(__AVX2__)
    PEGA_EACH c.r[i] = _mm256_fmadd_ps(a.r[i], b.r[i], c.r[i]);
#else
    PEGA_EACH c.r[i] = a.r[i] * b.r[i] + c.r[i];
#endif
    return c;
}

// The larger of each pair; `b` where one of them is NaN.
PEGA_INLINE Floats maximum(Floats a, Floats b) {
#if defined(__AVX512F__)
    PEGA_EACH a.r[i] = _mm512_max_ps(a.r[i], b.r[i]);
#elif defined(__AVX2__)
    PEGA_EACH a.r[i] = _mm256_max_ps(a.r[i], b.r[i]);
#else
    PEGA_EACH a.r[i] = a.r[i] > b.r[i] ? a.r[i] : b.r[i];
#endif
    return a;
}

PEGA_INLINE Floats minimum(Floats a, Floats b) {
#if defined(__AVX512F__)
    PEGA_EACH a.r[i] = _mm512_min_ps(a.r[i], b.r[i]);
#elif defined(__AVX2__)
    PEGA_EACH a.r[i] = _mm256_min_ps(a.r[i], b.r[i]);
#else
    PEGA_EACH a.r[i] = a.r[i] < b.r[i] ? a.r[i] : b.r[i];
#endif
    return a;
}

PEGA_INLINE Floats absolute(Floats x) {
    PEGA_EACH x.r[i] = (FloatRegister)((IntRegister)x.r[i] & 0x7fffffff);
    return x;
}

// `then` in lanes where a < b, else `otherwise`.
PEGA_INLINE Floats where_less(Floats a, Floats b, Floats then, Floats otherwise) {
    PEGA_EACH then.r[i] = a.r[i] < b.r[i] ? then.r[i] : otherwise.r[i];
    return then;
}

// One bit a lane.
PEGA_INLINE uint32_t greater_mask(Floats a, Floats b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(a.r[0], b.r[0], _CMP_GT_OQ);
#elif defined(__AVX2__)
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.r[0], b.r[0], _CMP_GT_OQ));
    const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.r[1], b.r[1], _CMP_GT_OQ));
    return static_cast<uint32_t>(low | high << 8);
#else
    uint32_t mask = 0;
    for (int lane = 0; lane < lane_count; lane++) {
        mask |= static_cast<uint32_t>(a.r[lane / register_lanes][lane % register_lanes] >
                                  b.r[lane / register_lanes][lane % register_lanes])
                        << lane;
    }
    return mask;
#endif
}

// 0, 1, .. 15
PEGA_INLINE Floats lane_numbers() {
    static constexpr float numbers[lane_count] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(numbers);
}

template <typename Combine>
PEGA_INLINE float fold(Floats x, Combine combine) {
    float lanes[lane_count];
    store(lanes, x);
    PEGA_UNROLL for (int width = lane_count / 2; width > 0; width /= 2) {
        PEGA_UNROLL for (int lane = 0; lane < width; lane++) lanes[lane] = combine(lanes[lane], lanes[lane + width]);
    }
    return lanes[0];
}

#if defined(__AVX512F__)
template <int which>
PEGA_INLINE __m256 half(Floats x) {
    return _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(0xff, _mm512_castps_pd(x.r[0]), which));
}
#elif defined(__AVX2__)
template <int which>
PEGA_INLINE __m256 half(Floats x) {
    return x.r[which];
}
#endif

// Sum of the lanes: halves are added to each other until one is left.
PEGA_INLINE float sum(Floats x) {
#if defined(__AVX2__)
    const __m256 eight = _mm256_add_ps(half<0>(x), half<1>(x));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    return fold(x, [](float a, float b) { return a + b; });
#endif
}

PEGA_INLINE float largest(Floats x) {
#if defined(__AVX2__)
    const __m256 eight = _mm256_max_ps(half<0>(x), half<1>(x));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    return fold(x, [](float a, float b) { return a > b ? a : b; });
#endif
}

// exp(x) for x <= 0 within 2 ulp; 0 below -87, where float32 is about to lose precision. NaN stays NaN.
PEGA_INLINE Floats exp_nonpositive(Floats x) {
    constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const Floats shifted = multiply_add(x, broadcast(1.44269504f), broadcast(rounder));
    const Floats n = shifted - broadcast(rounder);
    Floats rest = multiply_add(n, broadcast(-0.693359375f), x);  // ln 2 in two parts, the first exact
    rest = multiply_add(n, broadcast(2.12194440e-4f), rest);
    Floats series = broadcast(0.0013926213f);  // (exp(r) - 1 - r) / r^2, fitted to 1e-8 on |r| <= ln(2) / 2
    series = multiply_add(series, rest, broadcast(0.008363203f));
    series = multiply_add(series, rest, broadcast(0.041666556f));
    series = multiply_add(series, rest, broadcast(0.16666576f));
    series = multiply_add(series, rest, broadcast(0.5f));
    series = multiply_add(series, rest * rest, rest) + broadcast(1.0f);
    PEGA_EACH series.r[i] = (FloatRegister)((IntRegister)series.r[i] + ((IntRegister)shifted.r[i] << 23));
    return where_less(x, broadcast(-87.0f), broadcast(0.0f), series);
}

PEGA_INLINE float exp_nonpositive(float x) {
    float lanes[lane_count];
    store(lanes, exp_nonpositive(broadcast(x)));
    return lanes[0];
}

// Sixteen pairs of bfloat16, 32 bits each: the low and the high half of every pair.
PEGA_INLINE Ints load_pairs(const BFloat16* p) {
    Ints x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

PEGA_INLINE Floats low_bf16(Ints pairs) {
    Floats x;
    PEGA_EACH x.r[i] = (FloatRegister)(pairs.r[i] << 16);
    return x;
}

PEGA_INLINE Floats high_bf16(Ints pairs) {
    Floats x;
    PEGA_EACH x.r[i] = (FloatRegister)(pairs.r[i] & static_cast<int32_t>(0xffff0000u));
    return x;
}

PEGA_INLINE Ints keep_low_bf16(Ints pairs) {
    PEGA_EACH pairs.r[i] = pairs.r[i] & 0xffff;
    return pairs;
}

PEGA_INLINE Floats load_half(const Half* p) {
#if defined(__AVX512F__)
    return {{_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}};
#elif defined(__AVX2__)
    return {{_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
           _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))}};
#else
    float lanes[lane_count];
    for (int lane = 0; lane < lane_count; lane++) lanes[lane] = to_float(p[lane]);
    return load(lanes);
#endif
}

#undef PEGA_EACH

}  // namespace pega
