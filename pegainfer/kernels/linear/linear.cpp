// out (+)= x weight^T (+ bias), and the packing of weights. Layouts: cpu/linear.h.
#include "cpu/linear.h"

namespace pega {
namespace {

constexpr int64_t own_copy_values = 16384;     // activations that every thread rather prepares for itself
constexpr int64_t piece_bytes = 64 * 1024;     // of weights: what a thread takes at a time

// x, x stride, rows, weight, outputs, inputs, bias or 0, out, out stride, accumulate
template <Format F>
PEGA_INLINE void linear(const int64_t* args, Context& ctx) {
    const float* x = pointer<const float>(args[0]);
    const int64_t x_stride = args[1], rows = args[2], n = args[4], k = args[5];
    const uint8_t* weight = pointer<const uint8_t>(args[3]);
    const float* bias = pointer<const float>(args[6]);
    float* out = pointer<float>(args[7]);
    const int64_t out_stride = args[8];
    Rows prepared{reinterpret_cast<const char*>(x), x_stride * static_cast<int64_t>(sizeof(float)), nullptr, nullptr, 0};
    if constexpr (needs_preparation(F)) {
        const size_t bytes = static_cast<size_t>(prepared_bytes(F, k, rows));
        if (ctx.num_threads == 1 || rows * k <= own_copy_values) {
            prepared = prepared_rows(F, static_cast<char*>(ctx.scratch(bytes)), k, rows);
            for (int64_t row = 0; row < rows; row++) prepare_row<F>(x + row * x_stride, prepared, row, k);
        } else {
            prepared = prepared_rows(F, static_cast<char*>(ctx.shared_scratch(bytes)), k, rows);
            ctx.parallel(rows, 8, [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; row++) prepare_row<F>(x + row * x_stride, prepared, row, k);
            });
            ctx.barrier();
        }
    }
    const int64_t panels = (n + panel_width - 1) / panel_width, bytes = panel_bytes(F, k);
    const int64_t grain = bytes >= piece_bytes || rows > 8 ? 1 : piece_bytes / bytes;
    ctx.parallel(panels, grain, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; panel++) {
            const int64_t first = panel * panel_width;
            const int count = static_cast<int>(n - first < panel_width ? n - first : panel_width);
            multiply_panel<F>(prepared, rows, weight + panel * bytes, k,
                              {out + first, out_stride, bias ? bias + first : nullptr, args[9] != 0, count});
        }
    });
}

// The 16 bytes of nibbles of a block, to output `c` of a group: value i is in the low half of byte i, value i + 16 in
// the high half.
PEGA_INLINE void place_nibbles(const uint8_t* nibbles, uint8_t* group, int c) {
    const int shift = c < 16 ? 0 : 4;
    uint8_t* at = group + c % 16 * 4;
    for (int i = 0; i < 16; i++) {
        at[i / 4 * 64 + i % 4] = static_cast<uint8_t>(at[i / 4 * 64 + i % 4] | (nibbles[i] & 15) << shift);
        at[(4 + i / 4) * 64 + i % 4] = static_cast<uint8_t>(at[(4 + i / 4) * 64 + i % 4] | (nibbles[i] >> 4) << shift);
    }
}

// Row-major weight, outputs, inputs, packed
template <Format F>
PEGA_INLINE void pack(const int64_t* args, Context& ctx) {
    const uint8_t* raw = pointer<const uint8_t>(args[0]);
    const int64_t n = args[1], k = args[2], bytes = panel_bytes(F, k);
    uint8_t* packed = pointer<uint8_t>(args[3]);
    ctx.parallel((n + panel_width - 1) / panel_width, 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; panel++) {
            uint8_t* target = packed + panel * bytes;
            const int64_t first = panel * panel_width;
            const int count = static_cast<int>(n - first < panel_width ? n - first : panel_width);
            if (count < panel_width || F == Format::q4_0 || F == Format::q4_1 || k % 2) std::memset(target, 0, static_cast<size_t>(bytes));
            for (int c = 0; c < count; c++) {
                if constexpr (F == Format::f32) {
                    const float* row = reinterpret_cast<const float*>(raw) + (first + c) * k;
                    for (int64_t i = 0; i < k; i++) reinterpret_cast<float*>(target)[i * panel_width + c] = row[i];
                } else if constexpr (F == Format::f16) {
                    const uint16_t* row = reinterpret_cast<const uint16_t*>(raw) + (first + c) * k;
                    for (int64_t i = 0; i < k; i++) reinterpret_cast<uint16_t*>(target)[i * panel_width + c] = row[i];
                } else if constexpr (F == Format::bf16) {
                    const uint8_t* row = raw + (first + c) * k * 2;
                    uint32_t* to = reinterpret_cast<uint32_t*>(target) + c;
                    for (int64_t i = 0; i < k / 2; i++) std::memcpy(to + i * panel_width, row + i * 4, 4);
                    if (k % 2) std::memcpy(to + k / 2 * panel_width, row + (k - 1) * 2, 2);
                } else {
                    constexpr int header = F == Format::q4_1 ? 4 : 2, block = F == Format::q8_0 ? 34 : header + 16;
                    const uint8_t* row = raw + (first + c) * (k / group_size) * block;
                    for (int64_t g = 0; g < k / group_size; g++, row += block) {
                        uint8_t* group = target + g * group_bytes(F);
                        uint8_t* scales = group + (F == Format::q8_0 ? 1024 : 512);
                        std::memcpy(scales + c * 2, row, 2);
                        if constexpr (F == Format::q4_1) std::memcpy(scales + panel_width * 2 + c * 2, row + 2, 2);
                        if constexpr (F == Format::q8_0) {
                            for (int i = 0; i < group_size; i++) group[i / 4 * 128 + c * 4 + i % 4] = static_cast<uint8_t>(row[2 + i] ^ 0x80);
                        } else {
                            place_nibbles(row + header, group, c);
                        }
                    }
                }
            }
        }
    });
}

// Output `n` of a packed weight as floats.
template <Format F>
PEGA_INLINE void unpack_row(const uint8_t* packed, int64_t n, int64_t k, float* out) {
    const uint8_t* panel = packed + n / panel_width * panel_bytes(F, k);
    const int c = static_cast<int>(n % panel_width);
    if constexpr (F == Format::f32) {
        for (int64_t i = 0; i < k; i++) out[i] = reinterpret_cast<const float*>(panel)[i * panel_width + c];
    } else if constexpr (F == Format::f16) {
        for (int64_t i = 0; i < k; i++) out[i] = to_float(reinterpret_cast<const Half*>(panel)[i * panel_width + c]);
    } else if constexpr (F == Format::bf16) {
        const BFloat16* pairs = reinterpret_cast<const BFloat16*>(panel);
        for (int64_t i = 0; i < k; i++) out[i] = to_float(pairs[(i / 2 * panel_width + c) * 2 + i % 2]);
    } else {
        for (int64_t g = 0; g < k / group_size; g++) {
            const uint8_t* group = panel + g * group_bytes(F);
            const Half* scales = reinterpret_cast<const Half*>(group + (F == Format::q8_0 ? 1024 : 512));
            const float scale = to_float(scales[c]);
            const float least = F == Format::q4_1 ? to_float(scales[panel_width + c]) : 0.0f;
            for (int i = 0; i < group_size; i++) {
                float value;
                if constexpr (F == Format::q8_0) {
                    value = scale * static_cast<float>(static_cast<int>(group[i / 4 * 128 + c * 4 + i % 4]) - 128);
                } else {
                    const int q = group[i / 4 * 64 + c % 16 * 4 + i % 4] >> (c < 16 ? 0 : 4) & 15;
                    value = F == Format::q4_0 ? scale * static_cast<float>(q - 8) : scale * static_cast<float>(q) + least;
                }
                out[g * group_size + i] = value;
            }
        }
    }
}

// Row `n` of a weight as the checkpoint stores it, as floats.
template <Format F>
PEGA_INLINE void read_row(const uint8_t* raw, int64_t n, int64_t k, float* out) {
    if constexpr (F == Format::f32) {
        std::memcpy(out, raw + n * k * 4, static_cast<size_t>(k) * 4);
    } else if constexpr (F == Format::f16) {
        for (int64_t i = 0; i < k; i++) out[i] = to_float(reinterpret_cast<const Half*>(raw)[n * k + i]);
    } else if constexpr (F == Format::bf16) {
        for (int64_t i = 0; i < k; i++) out[i] = to_float(reinterpret_cast<const BFloat16*>(raw)[n * k + i]);
    } else {
        constexpr int header = F == Format::q4_1 ? 4 : 2, block = F == Format::q8_0 ? 34 : header + 16;
        const uint8_t* row = raw + n * (k / group_size) * block;
        for (int64_t g = 0; g < k / group_size; g++, row += block, out += group_size) {
            Half head[2];
            std::memcpy(head, row, static_cast<size_t>(header));
            const float scale = to_float(head[0]);
            for (int i = 0; i < group_size; i++) {
                if constexpr (F == Format::q8_0) {
                    out[i] = scale * static_cast<float>(static_cast<int8_t>(row[2 + i]));
                } else {
                    const int q = row[header + i % 16] >> (i < 16 ? 0 : 4) & 15;
                    out[i] = F == Format::q4_0 ? scale * static_cast<float>(q - 8) : scale * static_cast<float>(q) + to_float(head[1]);
                }
            }
        }
    }
}

// Token ids, tokens, table, inputs (width), packed, rows of the table, out, out stride
template <Format F>
PEGA_INLINE void embed(const int64_t* args, Context& ctx) {
    const int32_t* ids = pointer<const int32_t>(args[0]);
    const uint8_t* table = pointer<const uint8_t>(args[2]);
    const int64_t k = args[3];
    float* out = pointer<float>(args[6]);
    ctx.parallel(args[1], 1, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++) {
            const int64_t id = ids[token];
            if (id < 0 || id >= args[5]) ctx.fail("a token id is outside of the embedding table");
            float* row = out + token * args[7];
            if (args[4]) unpack_row<F>(table, id, k, row);
            else read_row<F>(table, id, k, row);
        }
    });
}

}  // namespace
}  // namespace pega

#define PEGA_FORMAT(name)                                                                          \
    PEGA_KERNEL(pega_linear_##name) { pega::linear<pega::Format::name>(args, ctx); }               \
    PEGA_KERNEL(pega_linear_pack_##name) { pega::pack<pega::Format::name>(args, ctx); }            \
    PEGA_KERNEL(pega_embedding_##name) { pega::embed<pega::Format::name>(args, ctx); }

PEGA_FORMAT(f32)
PEGA_FORMAT(f16)
PEGA_FORMAT(bf16)
PEGA_FORMAT(q8_0)
PEGA_FORMAT(q4_0)
PEGA_FORMAT(q4_1)
