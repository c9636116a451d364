// Arithmetic of attention on the elements of the KV cache. A `Vector` is sixteen elements of the cache, or
// sixteen pairs of bfloat16; a `Factor` is what all of them are multiplied with, one number or two.
#pragma once

#include "cpu/lanes.h"

namespace pega {

template <typename Element>
struct CacheElements;

template <>
struct CacheElements<float> {
    using Factor = float;
    using Spread = Floats;
    using Vector = Floats;

    static PEGA_INLINE Vector load_vector(const float* p) { return load(p); }
    static PEGA_INLINE Vector load_first_of_pairs(const float* p) { return load(p); }
    static PEGA_INLINE Spread spread(Factor factor) { return broadcast(factor); }
    static PEGA_INLINE Floats multiply_add(Spread a, Vector b, Floats c) { return fma(a, b, c); }
    // Keeps sixteen numbers as factors and returns the values that they have as such.
    static PEGA_INLINE Floats store_factors(Factor* out, Floats x) {
        store(out, x);
        return x;
    }
};

template <>
struct CacheElements<Half> : CacheElements<float> {
    static PEGA_INLINE Vector load_vector(const Half* p) { return load(p); }
    static PEGA_INLINE Vector load_first_of_pairs(const Half* p) { return load(p); }
};

#if defined(PEGA_AVX512_BF16)

// Factors are rounded to bfloat16 too; products of a pair are added in float32.
template <>
struct CacheElements<BFloat16> {
    using Factor = uint32_t;
    using Spread = __m512i;
    using Vector = __m512i;

    static PEGA_INLINE Vector load_vector(const BFloat16* p) { return _mm512_loadu_si512(p); }
    static PEGA_INLINE Vector load_first_of_pairs(const BFloat16* p) {
        return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0xffff));
    }
    static PEGA_INLINE Spread spread(Factor factor) { return _mm512_set1_epi32(static_cast<int>(factor)); }
    static PEGA_INLINE Floats multiply_add(Spread a, Vector b, Floats c) {
        return {{{_mm512_dpbf16_ps(c.part[0].v, (__m512bh)a, (__m512bh)b)}}};
    }
    static PEGA_INLINE Floats store_factors(Factor* out, Floats x) {
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x.part[0].v);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), rounded);
        return {{Vec::widen(rounded)}};
    }
};

#else

template <>
struct CacheElements<BFloat16> {
    struct Factor {
        float first, second;
    };
    using Spread = FloatPairs;
    using Vector = FloatPairs;

    static PEGA_INLINE Vector load_vector(const BFloat16* p) { return load_pairs(p); }
    static PEGA_INLINE Vector load_first_of_pairs(const BFloat16* p) { return {load_pairs(p).first, broadcast(0.0f)}; }
    static PEGA_INLINE Spread spread(Factor factor) { return {broadcast(factor.first), broadcast(factor.second)}; }
    static PEGA_INLINE Floats multiply_add(Spread a, Vector b, Floats c) {
        return fma(a.second, b.second, fma(a.first, b.first, c));
    }
    static PEGA_INLINE Floats store_factors(Factor* out, Floats x) {
        store(reinterpret_cast<float*>(out), x);
        return x;
    }
};

#endif

}  // namespace pega
