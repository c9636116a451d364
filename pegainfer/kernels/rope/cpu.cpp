// Rotary embedding of queries and keys, with the write of keys and values to the paged cache.
#include "cpu/kv_layout.h"
#include "cpu/rms.h"
#include "cpu/runtime.h"

namespace pega {
namespace {

constexpr int64_t max_head_dim = 512;

// (a, b) -> (a cos - b sin, b cos + a sin) for a in the first half of the rotated dimensions, b in the second.
PEGA_INLINE void rotate(const float* x, const float* cos, const float* sin, float* out, int64_t half) {
    int64_t i = 0;
    for (; i + Vec::width <= half; i += Vec::width) {
        const Vec a = Vec::load(x + i), b = Vec::load(x + half + i), c = Vec::load(cos + i), s = Vec::load(sin + i);
        fnma(b, s, a * c).store(out + i);
        fma(a, s, b * c).store(out + half + i);
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[half + i];
        out[i] = a * cos[i] - b * sin[i];
        out[half + i] = b * cos[i] + a * sin[i];
    }
}

template <typename Element>
void qkv_rope_write(const int64_t* args, Context& ctx) {
    const float* qkv = pointer<const float>(args[0]);
    const int64_t qkv_stride = args[1], tokens = args[12];
    const int32_t* positions = pointer<const int32_t>(args[2]);
    const int32_t* slot_mapping = pointer<const int32_t>(args[3]);
    const float* cos_sin = pointer<const float>(args[4]);
    const float* q_norm = pointer<const float>(args[5]);
    const float* k_norm = pointer<const float>(args[6]);
    uint8_t* kv = pointer<uint8_t>(args[7]);
    const int64_t block_stride = args[8], num_blocks = args[9];
    float* out = pointer<float>(args[10]);
    const int64_t out_stride = args[11];
    const int64_t num_heads = args[13], num_kv_heads = args[14], head_dim = args[15], rotary_dim = args[16];
    const int64_t block_size = args[17], max_positions = args[18];
    const float eps = static_cast<float>(real(args[19]));
    const KvLayout<Element> layout(num_kv_heads, head_dim, block_size);

    // A unit is one query head, or one key head with its value head.
    const int64_t units = num_heads + num_kv_heads;
    ctx.parallel(tokens * units, tokens == 1 ? (units + 1) / 2 : 4 * units, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t token = i / units, unit = i % units;
            const int64_t position = positions[token];
            if (position < 0 || position >= max_positions) ctx.fail("qkv_rope_write: no such position");
            const float* cos = cos_sin + position * rotary_dim;
            const float* x = qkv + token * qkv_stride + unit * head_dim;
            float rotated[max_head_dim];
            const bool is_query = unit < num_heads;
            float* y = is_query ? out + token * out_stride + unit * head_dim : rotated;
            const float* norm = is_query ? q_norm : k_norm;
            if (norm) {
                rms_norm(x, norm, y, head_dim, eps);
                rotate(y, cos, cos + rotary_dim / 2, y, rotary_dim / 2);
            } else {
                rotate(x, cos, cos + rotary_dim / 2, y, rotary_dim / 2);
                std::memcpy(y + rotary_dim, x + rotary_dim, sizeof(float) * (head_dim - rotary_dim));
            }
            const int64_t slot = slot_mapping[token];
            if (is_query || slot < 0) continue;
            const int64_t block = slot / block_size, offset = slot % block_size;
            if (block >= num_blocks) ctx.fail("qkv_rope_write: a slot is outside the cache");
            Element* keys = reinterpret_cast<Element*>(kv + block * block_stride) +
                            layout.tile(unit - num_heads, offset / tile_slots);
            Element* values = keys + layout.values_offset;
            const float* v = x + num_kv_heads * head_dim;
            const int64_t lane = offset % tile_slots;
            Element key[max_head_dim], value[max_head_dim];
            for (int64_t dim = 0; dim < head_dim; dim += Vec::width) {
                Vec::load(rotated + dim).store(key + dim);
                Vec::load(v + dim).store(value + dim);
            }
            for (int64_t dim = 0; dim < head_dim; dim++) {
                keys[layout.key(lane, dim)] = key[dim];
                values[layout.value(lane, dim)] = value[dim];
            }
        }
    });
}

}  // namespace
}  // namespace pega

// qkv, qkv_stride, positions, slot_mapping, cos_sin, q_norm, k_norm, kv, kv_block_stride, num_blocks, out,
// out_stride, tokens, num_heads, num_kv_heads, head_dim, rotary_dim, block_size, max_positions, eps
PEGA_KERNEL(pega_qkv_rope_write_f32) { pega::qkv_rope_write<float>(args, ctx); }
PEGA_KERNEL(pega_qkv_rope_write_f16) { pega::qkv_rope_write<pega::Half>(args, ctx); }
PEGA_KERNEL(pega_qkv_rope_write_bf16) { pega::qkv_rope_write<pega::BFloat16>(args, ctx); }
