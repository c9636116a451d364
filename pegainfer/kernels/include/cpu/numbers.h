// Element types of memory and their conversion to and from float, one at a time.
#pragma once

#include "cpu/runtime.h"

namespace pega {

struct BFloat16 {
    uint16_t bits;
};

struct Half {
    uint16_t bits;
};

PEGA_INLINE uint32_t float_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

PEGA_INLINE float bits_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

PEGA_INLINE float to_float(float value) { return value; }

PEGA_INLINE float to_float(BFloat16 value) { return bits_float(static_cast<uint32_t>(value.bits) << 16); }

PEGA_INLINE float to_float(Half value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    const uint32_t magnitude = value.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // The exponent's bias is moved by a multiplication, which makes subnormal numbers right as well.
    return bits_float(sign | float_bits(bits_float(magnitude << 13) * bits_float(0x77800000u)));  // 2^112
}

// Round to nearest, ties to even; a NaN stays one.
template <typename T>
T from_float(float value);

template <>
PEGA_INLINE float from_float<float>(float value) {
    return value;
}

template <>
PEGA_INLINE BFloat16 from_float<BFloat16>(float value) {
    const uint32_t bits = float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <>
PEGA_INLINE Half from_float<Half>(float value) {
    const uint32_t bits = float_bits(value);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to 65536 or more
    if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the subnormal half in the low bits
        const float shifted = bits_float(magnitude) + 0.5f;
        return {static_cast<uint16_t>(sign | (float_bits(shifted) - float_bits(0.5f)))};
    }
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

}  // namespace pega
