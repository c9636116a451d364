// Which experts each row goes to.
#include <algorithm>
#include <functional>

#include "cpu/logits.h"
#include "cpu/runtime.h"

namespace pega {
namespace {

// `weights`: room for one number for every expert; `keys` likewise.
void route(const float* logits, int64_t num_experts, int64_t top_k, bool renormalize, int32_t* topk_ids,
           float* topk_weights, float* weights, Ranked* keys) {
    float top = logits[0];
    for (int64_t i = 0; i < num_experts; i++) {
        keys[i] = ranked(logits[i], static_cast<int32_t>(i));
        top = std::max(top, logits[i]);
    }
    std::partial_sort(keys, keys + top_k, keys + num_experts, std::greater<Ranked>());
    const Vec base = Vec::set(top);
    Vec sums = Vec::zero();
    int64_t i = 0;
    for (; i + Vec::width <= num_experts; i += Vec::width) {
        const Vec weight = exp(Vec::load(logits + i) - base);
        weight.store(weights + i);
        sums += weight;
    }
    float total = reduce_add(sums);
    if (i < num_experts) {
        exp(Vec::load_partial(logits + i, num_experts - i) - base).store_partial(weights + i, num_experts - i);
        for (; i < num_experts; i++) total += weights[i];
    }
    if (renormalize) {
        total = 0;
        for (int64_t slot = 0; slot < top_k; slot++) total += weights[ranked_id(keys[slot])];
    }
    for (int64_t slot = 0; slot < top_k; slot++) {
        topk_ids[slot] = ranked_id(keys[slot]);
        topk_weights[slot] = weights[topk_ids[slot]] / total;
    }
}

}  // namespace
}  // namespace pega

// logits, logits_stride, rows, num_experts, top_k, renormalize, topk_ids, ids_stride, topk_weights, weights_stride
PEGA_KERNEL(pega_moe_router) {
    const float* logits = pega::pointer<const float>(args[0]);
    const int64_t stride = args[1], num_experts = args[3], top_k = args[4], ids_stride = args[7];
    const int64_t weights_stride = args[9];
    int32_t* ids = pega::pointer<int32_t>(args[6]);
    float* weights = pega::pointer<float>(args[8]);
    void* memory = ctx.scratch(static_cast<size_t>(num_experts) * (sizeof(pega::Ranked) + sizeof(float)));
    pega::Ranked* keys = static_cast<pega::Ranked*>(memory);
    float* room = reinterpret_cast<float*>(keys + num_experts);
    ctx.parallel(args[2], 4, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            pega::route(logits + row * stride, num_experts, top_k, args[5] != 0, ids + row * ids_stride,
                        weights + row * weights_stride, room, keys);
        }
    });
}
