// The multiplication of rows by a packed weight: layouts, preparation of activations, register tiles.
//
// A packed weight is a sequence of panels of 32 outputs; outputs beyond the last are zeros. Inside a panel the input
// dimension K runs outermost, so one row is a single stream of memory and many rows reuse a panel from the cache:
//
//   f32, f16  [K][32]
//   bf16      [K / 2][32][2], pairs of inputs side by side
//   q8_0      a group of 32 inputs: [8][32][4] bytes q + 128, then 32 scales (half)
//   q4_0      a group: [8][16][4] bytes, low half output c, high half output c + 16, then 32 scales (half)
//   q4_1      as q4_0, then 32 minima (half)
//
// Every output is summed over K by one accumulator in ascending order, whatever the number of rows; integer sums inside
// a group are exact. That is what makes a row's result independent of its company.
#pragma once

#include <type_traits>

#include "cpu/simd.h"

#define PEGA_UNROLL_ALL _Pragma("GCC unroll 32")

namespace pega {

enum class Format { f32, f16, bf16, q8_0, q4_0, q4_1 };

constexpr int panel_width = 32;
constexpr int group_size = 32;
constexpr int panel_parts = panel_width / Vec::width;

constexpr bool is_quantized(Format f) { return f == Format::q8_0 || f == Format::q4_0 || f == Format::q4_1; }

constexpr int64_t group_bytes(Format f) { return f == Format::q8_0 ? 1024 + 64 : f == Format::q4_0 ? 512 + 64 : 512 + 128; }

constexpr int64_t panel_bytes(Format f, int64_t k) {
    if (f == Format::f32) return k * panel_width * 4;
    if (f == Format::f16) return k * panel_width * 2;
    if (f == Format::bf16) return (k + 1) / 2 * panel_width * 4;
    return k / group_size * group_bytes(f);
}

// Most rows of a register tile: what the registers of the instruction set hold.
constexpr int tile_rows(Format f) {
#if defined(PEGA_AVX512)
    return is_quantized(f) ? 6 : 12;
#elif defined(PEGA_AVX2)
    return is_quantized(f) ? 1 : 3;
#else
    return is_quantized(f) ? 1 : 1 + (f == Format::f32);
#endif
}

// Activations as a format wants them. Plain float rows are used where they are; others are prepared into memory.
struct Rows {
    const char* values;   // row i starts at values + i * stride
    int64_t stride;       // bytes
    const float* scales;  // [rows][groups], quantised formats
    const int32_t* sums;  // [rows][groups]
    int64_t groups;

    PEGA_INLINE Rows from(int64_t row) const {
        return {values + row * stride, stride, scales + row * groups, sums + row * groups, groups};
    }
};

constexpr bool needs_preparation(Format f) { return f == Format::bf16 || is_quantized(f); }

constexpr int64_t prepared_stride(Format f, int64_t k) { return f == Format::bf16 ? (k + 1) / 2 * 4 : (k + 63) / 64 * 64; }

constexpr int64_t prepared_bytes(Format f, int64_t k, int64_t rows) {
    return rows * (prepared_stride(f, k) + (is_quantized(f) ? k / group_size * 8 : 0));
}

PEGA_INLINE Rows prepared_rows(Format f, char* memory, int64_t k, int64_t rows) {
    const int64_t stride = prepared_stride(f, k), groups = is_quantized(f) ? k / group_size : 0;
    float* scales = reinterpret_cast<float*>(memory + rows * stride);
    return {memory, stride, scales, reinterpret_cast<int32_t*>(scales + rows * groups), groups};
}

// One group of 32 activations as int8, with the scale that undoes it and the sum of the integers.
PEGA_INLINE void quantize_group(const float* x, int8_t* q, float* scale, int32_t* sum) {
    Vec largest = Vec::zero();
    for (int i = 0; i < group_size; i += Vec::width) largest = max(largest, abs(Vec::load(x + i)));
    const float top = reduce_max(largest);
    const Vec inverse = Vec::set(top > 0 ? 127.0f / top : 0.0f);
    *scale = top / 127.0f;
#if defined(PEGA_AVX512)
    const __m512i low = _mm512_cvtps_epi32(round(Vec::load(x) * inverse).v);
    const __m512i high = _mm512_cvtps_epi32(round(Vec::load(x + 16) * inverse).v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtepi32_epi8(high));
    *sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
#else
    alignas(64) float rounded[group_size];
    for (int i = 0; i < group_size; i += Vec::width) round(Vec::load(x + i) * inverse).store(rounded + i);
    int32_t total = 0;
    for (int i = 0; i < group_size; i++) {
        q[i] = static_cast<int8_t>(rounded[i]);
        total += q[i];
    }
    *sum = total;
#endif
}

template <Format F>
PEGA_INLINE void prepare_row(const float* x, const Rows& rows, int64_t row, int64_t k) {
    char* target = const_cast<char*>(rows.values) + row * rows.stride;
    if constexpr (F == Format::bf16) {
        BFloat16* out = reinterpret_cast<BFloat16*>(target);
        int64_t i = 0;
        for (; i + Vec::width <= k; i += Vec::width) Vec::load(x + i).store(out + i);
        for (; i < k; i++) out[i] = from_float<BFloat16>(x[i]);
        if (k % 2) out[k] = {0};
    } else if constexpr (is_quantized(F)) {
        for (int64_t g = 0; g < rows.groups; g++) {
            quantize_group(x + g * group_size, reinterpret_cast<int8_t*>(target) + g * group_size,
                           const_cast<float*>(rows.scales) + row * rows.groups + g,
                           const_cast<int32_t*>(rows.sums) + row * rows.groups + g);
        }
    }
}

// Thirty-two-bit integers, as many as a `Vec` has elements, that collect products of unsigned weights and signed
// activations, four at a time.
#if defined(PEGA_AVX512)
typedef __m512i Integers;
PEGA_INLINE Integers integers(int32_t value) { return _mm512_set1_epi32(value); }
PEGA_INLINE Vec to_vec(Integers x) { return {_mm512_cvtepi32_ps(x)}; }
PEGA_INLINE Integers load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
PEGA_INLINE Integers low_halves(Integers v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
PEGA_INLINE Integers high_halves(Integers v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
#if defined(PEGA_AVX512_BF16)
struct Four {
    __m512i x;
};
PEGA_INLINE Four four(const int8_t* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return {_mm512_set1_epi32(word)};
}
PEGA_INLINE Integers dot(Integers sum, Integers w, Four x) { return _mm512_dpbusd_epi32(sum, w, x.x); }
#else
struct Four {
    __m512i even, odd;
};
PEGA_INLINE int32_t pair(int8_t low, int8_t high) {
    return static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint16_t>(low)) | static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16);
}
PEGA_INLINE Four four(const int8_t* p) { return {_mm512_set1_epi32(pair(p[0], p[2])), _mm512_set1_epi32(pair(p[1], p[3]))}; }
PEGA_INLINE Integers dot(Integers sum, Integers w, Four x) {
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w, _mm512_set1_epi16(255)), x.even);
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), x.odd);
    return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
}
#endif
#elif defined(PEGA_AVX2)
typedef __m256i Integers;
PEGA_INLINE Integers integers(int32_t value) { return _mm256_set1_epi32(value); }
PEGA_INLINE Vec to_vec(Integers x) { return {_mm256_cvtepi32_ps(x)}; }
PEGA_INLINE Integers load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
PEGA_INLINE Integers low_halves(Integers v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
PEGA_INLINE Integers high_halves(Integers v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
struct Four {
    __m256i even, odd;
};
PEGA_INLINE int32_t pair(int8_t low, int8_t high) {
    return static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint16_t>(low)) | static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16);
}
PEGA_INLINE Four four(const int8_t* p) { return {_mm256_set1_epi32(pair(p[0], p[2])), _mm256_set1_epi32(pair(p[1], p[3]))}; }
PEGA_INLINE Integers dot(Integers sum, Integers w, Four x) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), x.even);
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), x.odd);
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
#else
typedef int32_t Integers __attribute__((vector_size(16)));
PEGA_INLINE Integers integers(int32_t value) { return Integers{value, value, value, value}; }
PEGA_INLINE Vec to_vec(Integers x) { return {__builtin_convertvector(x, Float4)}; }
PEGA_INLINE Integers load_bytes(const uint8_t* p) {
    Integers v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
PEGA_INLINE Integers low_halves(Integers v) { return v & 0x0f0f0f0f; }
PEGA_INLINE Integers high_halves(Integers v) { return (v >> 4) & 0x0f0f0f0f; }
struct Four {
    int32_t x[4];
};
PEGA_INLINE Four four(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
PEGA_INLINE Integers dot(Integers sum, Integers w, Four x) {
    return sum + (w & 255) * x.x[0] + ((w >> 8) & 255) * x.x[1] + ((w >> 16) & 255) * x.x[2] + ((w >> 24) & 255) * x.x[3];
}
#endif

// The two inputs of each of `Vec::width` pairs.
PEGA_INLINE void split_pairs(const uint8_t* p, Vec& even, Vec& odd) {
#if defined(PEGA_AVX512)
    const __m512i v = _mm512_loadu_si512(p);
    even = {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16))};
    odd = {_mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
#elif defined(PEGA_AVX2)
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(v, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
#else
    Int4 v;
    std::memcpy(&v, p, sizeof v);
    even = {(Float4)(v << 16)};
    odd = {(Float4)(v & static_cast<int32_t>(0xffff0000u))};
#endif
}

template <Format F, int M>
struct Tile {
    Vec sum[M][panel_parts];

    PEGA_INLINE void plain(const Rows& x, const uint8_t* w, int64_t k) {
        using Element = std::conditional_t<F == Format::f32, float, Half>;
        const Element* weight = reinterpret_cast<const Element*>(w);
        for (int64_t i = 0; i < k; i++) {
            Vec column[panel_parts];
            PEGA_UNROLL_ALL for (int p = 0; p < panel_parts; p++) column[p] = Vec::load(weight + i * panel_width + p * Vec::width);
            PEGA_UNROLL_ALL for (int m = 0; m < M; m++) {
                const Vec value = Vec::set(reinterpret_cast<const float*>(x.values + m * x.stride)[i]);
                PEGA_UNROLL_ALL for (int p = 0; p < panel_parts; p++) sum[m][p] = fma(column[p], value, sum[m][p]);
            }
        }
    }

    PEGA_INLINE void pairs(const Rows& x, const uint8_t* w, int64_t k) {
        for (int64_t i = 0; i < (k + 1) / 2; i++) {
            const uint8_t* row = w + i * panel_width * 4;
#if defined(PEGA_AVX512_BF16)
            const __m512bh low = (__m512bh)_mm512_loadu_si512(row), high = (__m512bh)_mm512_loadu_si512(row + 64);
            PEGA_UNROLL_ALL for (int m = 0; m < M; m++) {
                const __m512bh value = (__m512bh)_mm512_set1_epi32(reinterpret_cast<const int32_t*>(x.values + m * x.stride)[i]);
                sum[m][0].v = _mm512_dpbf16_ps(sum[m][0].v, low, value);
                sum[m][1].v = _mm512_dpbf16_ps(sum[m][1].v, high, value);
            }
#else
            PEGA_UNROLL_ALL for (int p = 0; p < panel_parts; p++) {
                Vec even, odd;
                split_pairs(row + p * Vec::width * 4, even, odd);
                PEGA_UNROLL_ALL for (int m = 0; m < M; m++) {
                    const BFloat16* value = reinterpret_cast<const BFloat16*>(x.values + m * x.stride) + 2 * i;
                    sum[m][p] = fma(even, Vec::set(to_float(value[0])), sum[m][p]);
                    sum[m][p] = fma(odd, Vec::set(to_float(value[1])), sum[m][p]);
                }
            }
#endif
        }
    }

    PEGA_INLINE void groups(const Rows& x, const uint8_t* w) {
        constexpr int halves = panel_parts / 2;
        constexpr int32_t offset = F == Format::q8_0 ? -128 : F == Format::q4_0 ? -8 : 0;
        for (int64_t g = 0; g < x.groups; g++, w += group_bytes(F)) {
            Integers total[M][panel_parts];
            PEGA_UNROLL_ALL for (int m = 0; m < M; m++) {
                const Integers start = integers(offset * x.sums[m * x.groups + g]);
                PEGA_UNROLL_ALL for (int p = 0; p < panel_parts; p++) total[m][p] = start;
            }
            const int8_t* values = reinterpret_cast<const int8_t*>(x.values) + g * group_size;
            PEGA_UNROLL_ALL for (int j = 0; j < 8; j++) {
                Integers weight[panel_parts];
                if constexpr (F == Format::q8_0) {
                    PEGA_UNROLL_ALL for (int p = 0; p < panel_parts; p++) weight[p] = load_bytes(w + j * 128 + p * Vec::width * 4);
                } else {
                    PEGA_UNROLL_ALL for (int h = 0; h < halves; h++) {
                        const Integers both = load_bytes(w + j * 64 + h * Vec::width * 4);
                        weight[h] = low_halves(both);
                        weight[halves + h] = high_halves(both);
                    }
                }
                PEGA_UNROLL_ALL for (int m = 0; m < M; m++) {
                    const Four value = four(values + m * x.stride + j * 4);
                    PEGA_UNROLL_ALL for (int p = 0; p < panel_parts; p++) total[m][p] = dot(total[m][p], weight[p], value);
                }
            }
            const Half* scales = reinterpret_cast<const Half*>(w + (F == Format::q8_0 ? 1024 : 512));
            PEGA_UNROLL_ALL for (int p = 0; p < panel_parts; p++) {
                const Vec scale = Vec::load(scales + p * Vec::width);
                PEGA_UNROLL_ALL for (int m = 0; m < M; m++) {
                    const Vec own = Vec::set(x.scales[m * x.groups + g]);
                    sum[m][p] = fma(to_vec(total[m][p]), scale * own, sum[m][p]);
                }
                if constexpr (F == Format::q4_1) {
                    const Vec least = Vec::load(scales + panel_width + p * Vec::width);
                    PEGA_UNROLL_ALL for (int m = 0; m < M; m++) {
                        const float all = x.scales[m * x.groups + g] * static_cast<float>(x.sums[m * x.groups + g]);
                        sum[m][p] = fma(least, Vec::set(all), sum[m][p]);
                    }
                }
            }
        }
    }

    PEGA_INLINE void run(const Rows& x, const uint8_t* w, int64_t k) {
        PEGA_UNROLL_ALL for (int m = 0; m < M; m++) {
            PEGA_UNROLL_ALL for (int p = 0; p < panel_parts; p++) sum[m][p] = Vec::zero();
        }
        if constexpr (is_quantized(F)) groups(x, w);
        else if constexpr (F == Format::bf16) pairs(x, w, k);
        else plain(x, w, k);
    }
};

// Where the results of a panel go: `count` of its outputs exist.
struct Target {
    float* out;
    int64_t stride;     // floats
    const float* bias;  // of this panel, or null
    bool accumulate;
    int count;
};

template <Format F, int M>
__attribute__((noinline)) void multiply_tile(const Rows& x, const uint8_t* w, int64_t k, const Target& target) {
    Tile<F, M> tile;
    tile.run(x, w, k);
    PEGA_UNROLL_ALL for (int m = 0; m < M; m++) {
        float* row = target.out + m * target.stride;
        PEGA_UNROLL_ALL for (int p = 0; p < panel_parts; p++) {
            const int first = p * Vec::width, count = target.count - first;
            Vec value = tile.sum[m][p];
            if (count >= Vec::width) {
                if (target.bias) value = value + Vec::load(target.bias + first);
                if (target.accumulate) value = value + Vec::load(row + first);
                value.store(row + first);
            } else if (count > 0) {
                if (target.bias) value = value + Vec::load_partial(target.bias + first, count);
                if (target.accumulate) value = value + Vec::load_partial(row + first, count);
                value.store_partial(row + first, count);
            }
        }
    }
}

template <Format F, int M>
PEGA_INLINE void multiply_up_to(int rows, const Rows& x, const uint8_t* w, int64_t k, const Target& target) {
    if constexpr (M > 1) {
        if (rows < M) return multiply_up_to<F, M - 1>(rows, x, w, k, target);
    }
    multiply_tile<F, M>(x, w, k, target);
}

// `rows` rows by one panel, in tiles as even as possible.
template <Format F>
PEGA_INLINE void multiply_panel(const Rows& x, int64_t rows, const uint8_t* w, int64_t k, Target target) {
    constexpr int most = tile_rows(F);
    for (int64_t row = 0; row < rows;) {
        const int64_t left = rows - row;
        const int now = static_cast<int>(left <= most ? left : left < 2 * most ? (left + 1) / 2 : most);
        multiply_up_to<F, most>(now, x.from(row), w, k, target);
        target.out += now * target.stride;
        row += now;
    }
}

}  // namespace pega
