// Experts: every row goes through the gated feed-forward of its top_k experts; the results are summed in slot order.
//
// The (row, slot) pairs are sorted by expert, so that an expert's weights are read once for all of its rows. A pair's
// results are computed alone and summed afterwards, so they depend on nobody else.
#include "cpu/linear.h"
#include "cpu/silu.h"

namespace pega {
namespace {

constexpr int64_t rows_at_once = 512;  // bounds the memory for what the experts of the rows say

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

struct Arguments {
    const float* x;
    int64_t x_stride, rows;
    const uint8_t *gate_up, *down;
    const int32_t* ids;
    int64_t ids_stride;
    const float* weights;
    int64_t weights_stride;
    float* out;
    int64_t out_stride, num_experts, top_k, hidden, intermediate;
};

// What all threads share for `pairs` pairs: inputs, gates and ups, activated, outputs.
struct Room {
    Rows in, mid;
    float *both, *said;
};

template <Format F>
PEGA_INLINE void run_rows(const Arguments& a, const Room& room, Context& ctx) {
    const int64_t pairs = a.rows * a.top_k, hidden = a.hidden, intermediate = a.intermediate;
    const Order order = sort_pairs(a.ids, a.ids_stride, a.rows, a.top_k, a.num_experts, ctx);

    ctx.parallel(pairs, 4, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at++) put_row<F>(a.x + order.pair[at] / a.top_k * a.x_stride, room.in, at, hidden);
    });
    ctx.barrier();
    multiply_experts<F>(room.in, a.gate_up, 2 * intermediate, hidden, room.both, order, a.num_experts, ctx);
    ctx.barrier();
    ctx.parallel(pairs, 4, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at++) {
            float* gate = room.both + at * 2 * intermediate;
            silu_and_mul(gate, gate + intermediate, gate, intermediate);
            put_row<F>(gate, room.mid, at, intermediate);
        }
    });
    ctx.barrier();
    multiply_experts<F>(room.mid, a.down, hidden, intermediate, room.said, order, a.num_experts, ctx);
    ctx.barrier();
    ctx.parallel(a.rows, 4, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            float* target = a.out + row * a.out_stride;
            for (int64_t slot = 0; slot < a.top_k; slot++) {
                const float* source = room.said + order.place[row * a.top_k + slot] * hidden;
                const float weight = a.weights[row * a.weights_stride + slot];
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

// x, x stride, rows, gate_up, down, ids, ids stride, weights, weights stride, out, out stride, experts, top_k, hidden,
// intermediate
template <Format F>
PEGA_INLINE void experts(const int64_t* args, Context& ctx) {
    Arguments a = {pointer<const float>(args[0]), args[1], args[2],
                   pointer<const uint8_t>(args[3]), pointer<const uint8_t>(args[4]),
                   pointer<const int32_t>(args[5]), args[6], pointer<const float>(args[7]), args[8],
                   pointer<float>(args[9]), args[10], args[11], args[12], args[13], args[14]};
    const int64_t rows = a.rows, most = (rows < rows_at_once ? rows : rows_at_once) * a.top_k;
    const int64_t in_bytes = pair_bytes<F>(a.hidden, most), mid_bytes = pair_bytes<F>(a.intermediate, most);
    const int64_t both_bytes = aligned(most * 2 * a.intermediate * 4), said_bytes = aligned(most * a.hidden * 4);
    char* memory = static_cast<char*>(ctx.shared_scratch(static_cast<size_t>(in_bytes + mid_bytes + both_bytes + said_bytes)));
    const Room room = {pair_rows<F>(memory, a.hidden, most), pair_rows<F>(memory + in_bytes, a.intermediate, most),
                       reinterpret_cast<float*>(memory + in_bytes + mid_bytes),
                       reinterpret_cast<float*>(memory + in_bytes + mid_bytes + both_bytes)};
    for (int64_t first = 0; first < rows; first += rows_at_once) {
        if (first > 0) ctx.barrier();
        a.rows = rows - first < rows_at_once ? rows - first : rows_at_once;
        run_rows<F>(a, room, ctx);
        a.x += a.rows * a.x_stride;
        a.ids += a.rows * a.ids_stride;
        a.weights += a.rows * a.weights_stride;
        a.out += a.rows * a.out_stride;
    }
}

}  // namespace
}  // namespace pega

PEGA_KERNEL(pega_moe_experts_f32) { pega::experts<pega::Format::f32>(args, ctx); }
PEGA_KERNEL(pega_moe_experts_f16) { pega::experts<pega::Format::f16>(args, ctx); }
PEGA_KERNEL(pega_moe_experts_bf16) { pega::experts<pega::Format::bf16>(args, ctx); }
PEGA_KERNEL(pega_moe_experts_q8_0) { pega::experts<pega::Format::q8_0>(args, ctx); }
PEGA_KERNEL(pega_moe_experts_q4_0) { pega::experts<pega::Format::q4_0>(args, ctx); }
PEGA_KERNEL(pega_moe_experts_q4_1) { pega::experts<pega::Format::q4_1>(args, ctx); }
