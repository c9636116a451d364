// `Vec`: as many floats as one register of the instruction set holds, so that kernels are written once.
//
// `max(a, b)`, `min(a, b)` return `b` when either is a NaN. Nothing is reassociated: an expression over `Vec`
// is evaluated as written, and `fma` rounds once wherever the machine has it.
#pragma once

#include <cmath>

#include "cpu/numbers.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PEGA_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PEGA_AVX2 1
#elif defined(__aarch64__)
#define PEGA_NEON 1
#include <arm_neon.h>
#endif
#if defined(PEGA_AVX512) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define PEGA_AVX512_BF16 1
#endif

namespace pega {

#if defined(PEGA_AVX512)

struct Mask {
    __mmask16 m;
};

struct Vec {
    static constexpr int width = 16;
    __m512 v;

    static PEGA_INLINE __mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << count) - 1u); }

    static PEGA_INLINE Vec zero() { return {_mm512_setzero_ps()}; }
    static PEGA_INLINE Vec set(float x) { return {_mm512_set1_ps(x)}; }
    static PEGA_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static PEGA_INLINE Vec load(const BFloat16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static PEGA_INLINE Vec load(const Half* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
    static PEGA_INLINE Vec load(const int32_t* p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }
    // The first `count` < width elements, zeros behind them; nothing behind them is read.
    static PEGA_INLINE Vec load_partial(const float* p, int64_t count) { return {_mm512_maskz_loadu_ps(first(count), p)}; }
    static PEGA_INLINE Vec load_partial(const BFloat16* p, int64_t count) { return widen(_mm256_maskz_loadu_epi16(first(count), p)); }
    static PEGA_INLINE Vec load_partial(const Half* p, int64_t count) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), p))}; }

    PEGA_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
    PEGA_INLINE void store(BFloat16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow()); }
    PEGA_INLINE void store(Half* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half()); }
    PEGA_INLINE void store_partial(float* p, int64_t count) const { _mm512_mask_storeu_ps(p, first(count), v); }
    PEGA_INLINE void store_partial(BFloat16* p, int64_t count) const { _mm256_mask_storeu_epi16(p, first(count), narrow()); }
    PEGA_INLINE void store_partial(Half* p, int64_t count) const { _mm256_mask_storeu_epi16(p, first(count), half()); }

    static PEGA_INLINE Vec widen(__m256i x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))}; }
    PEGA_INLINE __m256i half() const { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    PEGA_INLINE __m256i narrow() const {
        const __m512i bits = _mm512_castps_si512(v);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
    }
};

PEGA_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
PEGA_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
PEGA_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
PEGA_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
PEGA_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }   // a * b + c
PEGA_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a * b
PEGA_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
PEGA_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
PEGA_INLINE Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
PEGA_INLINE Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.v)}; }
PEGA_INLINE Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
PEGA_INLINE Mask operator>(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
PEGA_INLINE Mask operator>=(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
PEGA_INLINE Mask operator==(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
PEGA_INLINE Mask is_nan(Vec a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
PEGA_INLINE Vec select(Mask m, Vec yes, Vec no) { return {_mm512_mask_blend_ps(m.m, no.v, yes.v)}; }
PEGA_INLINE uint32_t bits(Mask m) { return m.m; }  // bit i: element i
// a * 2^n for whole numbers n between -252 and 254.
PEGA_INLINE Vec scale_by_power(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }

#elif defined(PEGA_AVX2)

struct Mask {
    __m256 m;
};

struct Vec {
    static constexpr int width = 8;
    __m256 v;

    static PEGA_INLINE __m256i first(int64_t count) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }

    static PEGA_INLINE Vec zero() { return {_mm256_setzero_ps()}; }
    static PEGA_INLINE Vec set(float x) { return {_mm256_set1_ps(x)}; }
    static PEGA_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static PEGA_INLINE Vec load(const BFloat16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    static PEGA_INLINE Vec load(const Half* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
    static PEGA_INLINE Vec load(const int32_t* p) { return {_mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
    static PEGA_INLINE Vec load_partial(const float* p, int64_t count) { return {_mm256_maskload_ps(p, first(count))}; }
    template <typename T>
    static PEGA_INLINE Vec load_partial(const T* p, int64_t count) {
        alignas(16) T padded[width] = {};
        std::memcpy(padded, p, static_cast<size_t>(count) * sizeof(T));
        return load(padded);
    }

    PEGA_INLINE void store(float* p) const { _mm256_storeu_ps(p, v); }
    PEGA_INLINE void store(BFloat16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow()); }
    PEGA_INLINE void store(Half* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
    PEGA_INLINE void store_partial(float* p, int64_t count) const { _mm256_maskstore_ps(p, first(count), v); }
    template <typename T>
    PEGA_INLINE void store_partial(T* p, int64_t count) const {
        alignas(16) T padded[width];
        store(padded);
        std::memcpy(p, padded, static_cast<size_t>(count) * sizeof(T));
    }

    static PEGA_INLINE Vec widen(__m128i x) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16))}; }
    PEGA_INLINE __m128i narrow() const {
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
        const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
        return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    }
};

PEGA_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
PEGA_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
PEGA_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
PEGA_INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
PEGA_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
PEGA_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }
PEGA_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
PEGA_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
PEGA_INLINE Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
PEGA_INLINE Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.v)}; }
PEGA_INLINE Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
PEGA_INLINE Mask operator>(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)}; }
PEGA_INLINE Mask operator>=(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)}; }
PEGA_INLINE Mask operator==(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)}; }
PEGA_INLINE Mask is_nan(Vec a) { return {_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)}; }
PEGA_INLINE Vec select(Mask m, Vec yes, Vec no) { return {_mm256_blendv_ps(no.v, yes.v, m.m)}; }
PEGA_INLINE uint32_t bits(Mask m) { return static_cast<uint32_t>(_mm256_movemask_ps(m.m)); }
PEGA_INLINE Vec scale_by_power(Vec a, Vec n) {
    // In two steps, since 2^n itself may lie outside of the normal numbers.
    const __m256i whole = _mm256_cvtps_epi32(n.v), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
    const __m256i p = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i q = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
    return {_mm256_mul_ps(_mm256_mul_ps(a.v, _mm256_castsi256_ps(p)), _mm256_castsi256_ps(q))};
}

#else

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));

struct Mask {
    Int4 m;
};

struct Vec {
    static constexpr int width = 4;
    Float4 v;

    static PEGA_INLINE Vec zero() { return {Float4{0, 0, 0, 0}}; }
    static PEGA_INLINE Vec set(float x) { return {Float4{x, x, x, x}}; }
    static PEGA_INLINE Vec load(const float* p) {
        Vec x;
        std::memcpy(&x.v, p, sizeof x.v);
        return x;
    }
    static PEGA_INLINE Vec load(const BFloat16* p) { return {Float4{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}}; }
    static PEGA_INLINE Vec load(const Half* p) { return {Float4{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}}; }
    static PEGA_INLINE Vec load(const int32_t* p) {
        return {Float4{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]), static_cast<float>(p[3])}};
    }
    template <typename T>
    static PEGA_INLINE Vec load_partial(const T* p, int64_t count) {
        T padded[width] = {};
        std::memcpy(padded, p, static_cast<size_t>(count) * sizeof(T));
        return load(padded);
    }

    PEGA_INLINE void store(float* p) const { std::memcpy(p, &v, sizeof v); }
    template <typename T>
    PEGA_INLINE void store(T* p) const {
        for (int i = 0; i < width; i++) p[i] = from_float<T>(v[i]);
    }
    template <typename T>
    PEGA_INLINE void store_partial(T* p, int64_t count) const {
        for (int64_t i = 0; i < count; i++) p[i] = from_float<T>(v[i]);
    }
};

PEGA_INLINE Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
PEGA_INLINE Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
PEGA_INLINE Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
PEGA_INLINE Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
#if defined(PEGA_NEON)
PEGA_INLINE Vec fma(Vec a, Vec b, Vec c) { return {(Float4)vfmaq_f32((float32x4_t)c.v, (float32x4_t)a.v, (float32x4_t)b.v)}; }
PEGA_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {(Float4)vfmsq_f32((float32x4_t)c.v, (float32x4_t)a.v, (float32x4_t)b.v)}; }
#else
PEGA_INLINE Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
PEGA_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {c.v - a.v * b.v}; }
#endif
PEGA_INLINE Vec select(Mask m, Vec yes, Vec no) { return {(Float4)(((Int4)yes.v & m.m) | ((Int4)no.v & ~m.m))}; }
PEGA_INLINE Mask operator>(Vec a, Vec b) { return {a.v > b.v}; }
PEGA_INLINE Mask operator>=(Vec a, Vec b) { return {a.v >= b.v}; }
PEGA_INLINE Mask operator==(Vec a, Vec b) { return {a.v == b.v}; }
PEGA_INLINE Mask is_nan(Vec a) { return {a.v != a.v}; }
PEGA_INLINE Vec max(Vec a, Vec b) { return select(a > b, a, b); }
PEGA_INLINE Vec min(Vec a, Vec b) { return select(b > a, a, b); }
PEGA_INLINE Vec abs(Vec a) { return {(Float4)((Int4)a.v & Int4{0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff})}; }
PEGA_INLINE Vec sqrt(Vec a) { return {Float4{std::sqrt(a.v[0]), std::sqrt(a.v[1]), std::sqrt(a.v[2]), std::sqrt(a.v[3])}}; }
PEGA_INLINE Vec round(Vec a) {  // |a| < 2^22
    const Vec magic = Vec::set(12582912.0f);
    return (a + magic) - magic;
}
PEGA_INLINE uint32_t bits(Mask m) {
    return (m.m[0] & 1u) | (m.m[1] & 2u) | (m.m[2] & 4u) | (m.m[3] & 8u);
}
PEGA_INLINE Vec scale_by_power(Vec a, Vec n) {
    const Int4 whole = {static_cast<int32_t>(n.v[0]), static_cast<int32_t>(n.v[1]), static_cast<int32_t>(n.v[2]), static_cast<int32_t>(n.v[3])};
    const Int4 half = whole >> 1;
    return {a.v * (Float4)((half + 127) << 23) * (Float4)((whole - half + 127) << 23)};
}

#endif

PEGA_INLINE Vec& operator+=(Vec& a, Vec b) { return a = a + b; }
PEGA_INLINE Vec& operator*=(Vec& a, Vec b) { return a = a * b; }

PEGA_INLINE bool any(Mask m) { return bits(m) != 0; }
PEGA_INLINE int count(Mask m) { return __builtin_popcount(bits(m)); }

// Sum and largest of the elements, in one fixed order: halves are folded onto each other.
PEGA_INLINE float reduce_add(Vec a) {
    alignas(64) float x[Vec::width];
    a.store(x);
    for (int half = Vec::width / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    }
    return x[0];
}

PEGA_INLINE float reduce_max(Vec a) {
    alignas(64) float x[Vec::width];
    a.store(x);
    for (int half = Vec::width / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    }
    return x[0];
}

// e^x to about one unit in the last place; 0 below -104, infinity above 88.73, NaN for NaN.
PEGA_INLINE Vec exp(Vec x) {
    x = max(Vec::set(-150.0f), min(Vec::set(129.0f), x));
    const Vec n = round(x * Vec::set(1.44269504f));
    // ln 2 in two parts, the first of which has so few bits that n times it is exact.
    Vec r = fnma(n, Vec::set(0.693145752f), x);
    r = fnma(n, Vec::set(1.42860677e-6f), r);
    Vec p = Vec::set(1.0f / 5040.0f);
    p = fma(p, r, Vec::set(1.0f / 720.0f));
    p = fma(p, r, Vec::set(1.0f / 120.0f));
    p = fma(p, r, Vec::set(1.0f / 24.0f));
    p = fma(p, r, Vec::set(1.0f / 6.0f));
    p = fma(p, r, Vec::set(0.5f));
    p = fma(p, r, Vec::set(1.0f));
    p = fma(p, r, Vec::set(1.0f));
    return scale_by_power(p, n);
}

PEGA_INLINE Vec sigmoid(Vec x) { return Vec::set(1.0f) / (Vec::set(1.0f) + exp(Vec::zero() - x)); }

}  // namespace pega
