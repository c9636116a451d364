// Passes over the logits of one row. Ids are ranked by logit, equal logits by the lower id.
#pragma once

#include <algorithm>

#include "cpu/simd.h"

namespace pega {

constexpr int64_t span_ids = 64;  // ids that share an entry of `span_maxima`

// An id with its logit in one number that sorts as ranking does: the best is the largest.
using Ranked = uint64_t;

PEGA_INLINE Ranked ranked(float logit, int32_t id) {
    const uint32_t raw = float_bits(logit + 0.0f);  // -0 becomes 0
    const uint32_t ordered = raw & 0x80000000u ? ~raw : raw | 0x80000000u;
    return Ranked{ordered} << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

PEGA_INLINE int32_t ranked_id(Ranked r) { return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(r)); }

// Whether no logit is NaN or +inf.
PEGA_INLINE bool all_usable(const float* x, int64_t count) {
    const Vec limit = Vec::set(INFINITY);
    Vec worst = Vec::set(-INFINITY);
    int64_t i = 0;
    for (; i + Vec::width <= count; i += Vec::width) {
        const Vec value = Vec::load(x + i);
        worst = max(worst, select(limit > value, value, limit));  // what is not below +inf becomes it
    }
    bool usable = reduce_max(worst) < INFINITY;
    for (; i < count; i++) usable = usable && x[i] < INFINITY;
    return usable;
}

// The largest logit of every span of ids, and of all.
PEGA_INLINE float find_maxima(const float* x, int64_t count, float* span_maxima) {
    float top = -INFINITY;
    for (int64_t first = 0; first < count; first += span_ids) {
        const float* values = x + first;
        const int64_t n = std::min(span_ids, count - first);
        float best = -INFINITY;
        if (n == span_ids) {
            Vec lanes = Vec::load(values);
            for (int64_t i = Vec::width; i < span_ids; i += Vec::width) lanes = max(lanes, Vec::load(values + i));
            best = reduce_max(lanes);
        } else {
            for (int64_t i = 0; i < n; i++) best = std::max(best, values[i]);
        }
        span_maxima[first / span_ids] = best;
        top = std::max(top, best);
    }
    return top;
}

// A bound that at least `wanted` logits reach: their spans' maxima do. `work` holds a float for every span.
inline float lower_bound_of_best(const float* span_maxima, int64_t count, int64_t wanted, float* work) {
    const int64_t spans = (count + span_ids - 1) / span_ids;
    if (wanted > spans) return -INFINITY;
    std::copy(span_maxima, span_maxima + spans, work);
    std::nth_element(work, work + (wanted - 1), work + spans, [](float a, float b) { return a > b; });
    return work[wanted - 1];
}

// The ids whose numbers are at least `bound`, in id order; returns how many there are. No number of a span is
// larger than the span's entry in `span_limits`.
inline int64_t collect(const float* x, int64_t count, float bound, const float* span_limits, int32_t* ids) {
    const Vec least = Vec::set(bound);
    int64_t found = 0;
    for (int64_t first = 0; first < count; first += span_ids) {
        if (span_limits[first / span_ids] < bound) continue;
        const int64_t end = std::min(first + span_ids, count);
        int64_t i = first;
        for (; i + Vec::width <= end; i += Vec::width) {
            for (uint32_t hits = bits(Vec::load(x + i) >= least); hits; hits &= hits - 1) {
                ids[found++] = static_cast<int32_t>(i + __builtin_ctz(hits));
            }
        }
        for (; i < end; i++) {
            if (x[i] >= bound) ids[found++] = static_cast<int32_t>(i);
        }
    }
    return found;
}

// The sum of exp(x - top), from float32 exponentials in double precision.
inline double sum_of_exponentials(const float* x, int64_t count, float top) {
    double lanes[Vec::width] = {};
    float values[Vec::width];
    const Vec base = Vec::set(top);
    int64_t i = 0;
    for (; i + Vec::width <= count; i += Vec::width) {
        exp(Vec::load(x + i) - base).store(values);
        for (int lane = 0; lane < Vec::width; lane++) lanes[lane] += static_cast<double>(values[lane]);
    }
    if (i < count) {
        exp(Vec::load_partial(x + i, count - i) - base).store(values);
        for (int64_t lane = 0; lane < count - i; lane++) lanes[lane] += static_cast<double>(values[lane]);
    }
    double total = 0;
    for (int lane = 0; lane < Vec::width; lane++) total += lanes[lane];
    return total;
}

// 1 + the number of ids that rank before `id`.
inline int32_t rank_of(const float* x, int64_t count, int32_t id) {
    const float logit = x[id];
    const Vec value = Vec::set(logit);
    int64_t before = 0, i = 0;
    for (; i + Vec::width <= count; i += Vec::width) {
        const Vec other = Vec::load(x + i);
        before += pega::count(other > value);
        if (i <= id) {
            const uint32_t equal = bits(other == value);
            before += __builtin_popcount(id - i < Vec::width ? equal & ((1u << (id - i)) - 1) : equal);
        }
    }
    for (; i < count; i++) before += x[i] > logit || (x[i] == logit && i < id);
    return static_cast<int32_t>(before + 1);
}

}  // namespace pega
