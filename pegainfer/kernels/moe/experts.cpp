// Experts: every row goes through the gated feed-forward of its top_k experts; the results are summed in slot order.
//
// The (row, slot) pairs are sorted by expert, so that an expert's weights are read once for all of its rows. A pair's
// results are computed alone and summed afterwards, so they depend on nobody else.
#include "cpu/linear.h"
#include "cpu/silu.h"

namespace pega {
namespace {

constexpr int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Pairs by expert: those of expert e stand at [start[e], start[e + 1]); `place[pair]` is where a pair stands.
struct Order {
    int32_t* start;
    int32_t* place;
    int32_t* pair;
};

PEGA_INLINE Order sort_pairs(const int32_t* ids, int64_t ids_stride, int64_t rows, int64_t top_k, int64_t num_experts, Context& ctx) {
    const int64_t pairs = rows * top_k;
    int32_t* memory = static_cast<int32_t*>(ctx.scratch(static_cast<size_t>((num_experts + 2 + 2 * pairs) * 4)));
    Order order{memory, memory + num_experts + 2, memory + num_experts + 2 + pairs};
    std::memset(memory, 0, static_cast<size_t>(num_experts + 2) * 4);
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t slot = 0; slot < top_k; slot++) {
            const int32_t expert = ids[row * ids_stride + slot];
            if (expert < 0 || expert >= num_experts) ctx.fail("an expert id is out of range");
            order.start[expert + 2]++;
        }
    }
    for (int64_t e = 2; e < num_experts + 2; e++) order.start[e] += order.start[e - 1];
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t slot = 0; slot < top_k; slot++) {
            const int32_t at = order.start[ids[row * ids_stride + slot] + 1]++;
            order.place[row * top_k + slot] = at;
            order.pair[at] = static_cast<int32_t>(row * top_k + slot);
        }
    }
    return order;
}

// Pairs as rows that a format can be multiplied with, whether it needs preparation or not.
template <Format F>
PEGA_INLINE Rows pair_rows(char* memory, int64_t k, int64_t pairs) {
    if constexpr (needs_preparation(F)) return prepared_rows(F, memory, k, pairs);
    return {memory, k * static_cast<int64_t>(sizeof(float)), nullptr, nullptr, 0};
}

template <Format F>
constexpr int64_t pair_bytes(int64_t k, int64_t pairs) {
    return aligned(needs_preparation(F) ? prepared_bytes(F, k, pairs) : pairs * k * static_cast<int64_t>(sizeof(float)));
}

template <Format F>
PEGA_INLINE void put_row(const float* x, const Rows& rows, int64_t row, int64_t k) {
    if constexpr (needs_preparation(F)) prepare_row<F>(x, rows, row, k);
    else std::memcpy(const_cast<char*>(rows.values) + row * rows.stride, x, static_cast<size_t>(rows.stride));
}

// out[pair] = rows[pair] weight[expert of pair]^T for all pairs.
template <Format F>
PEGA_INLINE void multiply_experts(const Rows& rows, const uint8_t* weight, int64_t n, int64_t k, float* out, const Order& order,
                                  int64_t num_experts, Context& ctx) {
    const int64_t panels = (n + panel_width - 1) / panel_width, bytes = panel_bytes(F, k);
    ctx.parallel(num_experts * panels, 1, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; task++) {
            const int64_t expert = task / panels, panel = task % panels;
            const int64_t first = order.start[expert], count = order.start[expert + 1] - first;
            if (count == 0) continue;
            const int64_t column = panel * panel_width;
            const int width = static_cast<int>(n - column < panel_width ? n - column : panel_width);
            multiply_panel<F>(rows.from(first), count, weight + (expert * panels + panel) * bytes, k,
                              {out + first * n + column, n, nullptr, false, width});
        }
    });
}

// x, x stride, rows, gate_up, down, ids, ids stride, weights, weights stride, out, out stride, experts, top_k, hidden,
// intermediate
template <Format F>
PEGA_INLINE void experts(const int64_t* args, Context& ctx) {
    const float* x = pointer<const float>(args[0]);
    const int64_t x_stride = args[1], rows = args[2], num_experts = args[11], top_k = args[12];
    const int64_t hidden = args[13], intermediate = args[14], pairs = rows * top_k;
    const uint8_t *gate_up = pointer<const uint8_t>(args[3]), *down = pointer<const uint8_t>(args[4]);
    const float* weights = pointer<const float>(args[7]);
    float* out = pointer<float>(args[9]);
    const Order order = sort_pairs(pointer<const int32_t>(args[5]), args[6], rows, top_k, num_experts, ctx);

    const int64_t in_bytes = pair_bytes<F>(hidden, pairs), mid_bytes = pair_bytes<F>(intermediate, pairs);
    const int64_t both_bytes = aligned(pairs * 2 * intermediate * 4), said_bytes = aligned(pairs * hidden * 4);
    char* memory = static_cast<char*>(ctx.shared_scratch(static_cast<size_t>(in_bytes + mid_bytes + both_bytes + said_bytes)));
    const Rows in = pair_rows<F>(memory, hidden, pairs), mid = pair_rows<F>(memory + in_bytes, intermediate, pairs);
    float* both = reinterpret_cast<float*>(memory + in_bytes + mid_bytes);
    float* said = reinterpret_cast<float*>(memory + in_bytes + mid_bytes + both_bytes);

    ctx.parallel(pairs, 4, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at++) put_row<F>(x + order.pair[at] / top_k * x_stride, in, at, hidden);
    });
    ctx.barrier();
    multiply_experts<F>(in, gate_up, 2 * intermediate, hidden, both, order, num_experts, ctx);
    ctx.barrier();
    ctx.parallel(pairs, 4, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at++) {
            float* gate = both + at * 2 * intermediate;
            silu_and_mul(gate, gate + intermediate, gate, intermediate);
            put_row<F>(gate, mid, at, intermediate);
        }
    });
    ctx.barrier();
    multiply_experts<F>(mid, down, hidden, intermediate, said, order, num_experts, ctx);
    ctx.barrier();
    ctx.parallel(rows, 4, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            float* target = out + row * args[10];
            for (int64_t slot = 0; slot < top_k; slot++) {
                const float* source = said + order.place[row * top_k + slot] * hidden;
                const float weight = weights[row * args[8] + slot];
                int64_t i = 0;
                for (; i + Vec::width <= hidden; i += Vec::width) {
                    fma(Vec::load(source + i), Vec::set(weight), Vec::load(target + i)).store(target + i);
                }
                if (i < hidden) {
                    const int64_t left = hidden - i;
                    fma(Vec::load_partial(source + i, left), Vec::set(weight), Vec::load_partial(target + i, left))
                        .store_partial(target + i, left);
                }
            }
        }
    });
}

}  // namespace
}  // namespace pega

PEGA_KERNEL(pega_moe_experts_f32) { pega::experts<pega::Format::f32>(args, ctx); }
PEGA_KERNEL(pega_moe_experts_f16) { pega::experts<pega::Format::f16>(args, ctx); }
PEGA_KERNEL(pega_moe_experts_bf16) { pega::experts<pega::Format::bf16>(args, ctx); }
PEGA_KERNEL(pega_moe_experts_q8_0) { pega::experts<pega::Format::q8_0>(args, ctx); }
PEGA_KERNEL(pega_moe_experts_q4_0) { pega::experts<pega::Format::q4_0>(args, ctx); }
PEGA_KERNEL(pega_moe_experts_q4_1) { pega::experts<pega::Format::q4_1>(args, ctx); }
