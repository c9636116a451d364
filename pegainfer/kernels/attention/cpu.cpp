// Causal attention of new tokens over the paged KV cache.
//
// Invariance: keys are taken in chunks of 128 positions counted from position 0. What a row gets from one chunk
// (maximum, sum, weighted values) is computed from nothing, key after key, and the chunks are merged in order.
// Neither the other rows of a tile nor the thread that computes a chunk enters into that, so prefill, chunked
// prefill and decode give the same bits.
#include <algorithm>
#include <cmath>

#include "cpu/cache_elements.h"
#include "cpu/kv_layout.h"
#include "cpu/runtime.h"

namespace pega {
namespace {

constexpr int64_t chunk_keys = 128;
constexpr int64_t chunk_tiles = chunk_keys / tile_slots;
constexpr int64_t tile_rows = 48;                    // query rows that share a pass over the keys
constexpr int64_t split_bytes = 64 << 20;            // most memory for chunks computed apart
constexpr int max_rows = 4;  // of a register tile: rows x vectors, for as many registers as there are
constexpr int max_vectors = lane_parts == 1 ? 4 : 1;
constexpr float no_score = -INFINITY;

struct Arguments {
    const float* q;
    int64_t q_stride;
    const uint8_t* kv;
    int64_t block_stride, num_blocks;
    const int32_t* block_tables;
    int64_t table_stride;
    const int32_t* query_start_loc;
    const int32_t* seq_lens;
    int64_t num_requests;
    float* out;
    int64_t out_stride, num_heads, num_kv_heads, head_dim, block_size;
    float scale;

    explicit Arguments(const int64_t* args)
        : q(pointer<const float>(args[0])),
          q_stride(args[1]),
          kv(pointer<const uint8_t>(args[2])),
          block_stride(args[3]),
          num_blocks(args[4]),
          block_tables(pointer<const int32_t>(args[5])),
          table_stride(args[6]),
          query_start_loc(pointer<const int32_t>(args[7])),
          seq_lens(pointer<const int32_t>(args[8])),
          num_requests(args[9]),
          out(pointer<float>(args[10])),
          out_stride(args[11]),
          num_heads(args[12]),
          num_kv_heads(args[13]),
          head_dim(args[14]),
          block_size(args[15]),
          scale(static_cast<float>(real(args[16]))) {}
};

// Consecutive tokens of one request; with the query heads of one kv head they are the rows of a task.
struct Tile {
    int32_t request;
    int32_t first;      // row of q
    int32_t count;      // tokens
    int32_t positions;  // that its last token sees
};

// Of some rows over one chunk: the largest score, the sum of the weights, the weighted values.
struct Partial {
    float* maxima;
    float* sums;
    float* values;  // [rows][head_dim]
};

template <typename Element>
class Attention {
    using Cache = CacheElements<Element>;
    using Factor = typename Cache::Factor;
    static constexpr int pair = KvLayout<Element>::pair;

  public:
    Attention(const int64_t* args, Context& ctx)
        : a_(args),
          ctx_(ctx),
          layout_(a_.num_kv_heads, a_.head_dim, a_.block_size),
          group_(a_.num_heads / a_.num_kv_heads),
          tile_tokens_(std::max<int64_t>(1, tile_rows / group_)),
          rows_(tile_tokens_ * group_) {}

    void run() {
        plan();
        const int64_t tasks = num_tiles_ * a_.num_kv_heads;
        const int64_t chunks = (longest_ + chunk_keys - 1) / chunk_keys;
        const int64_t partial = (a_.head_dim + 2) * rows_;
        const size_t bytes = sizeof(float) * static_cast<size_t>(tasks * chunks * partial);
        if (chunks == 1 || tasks >= 3 * ctx_.num_threads || ctx_.num_threads == 1 || bytes > split_bytes) {
            for (int64_t task = ctx_.next_chunk(); task < tasks; task = ctx_.next_chunk()) {
                const Tile& tile = tiles_[order_[task / a_.num_kv_heads]];
                attend(tile, task % a_.num_kv_heads);
            }
            return;
        }
        float* shared = static_cast<float*>(ctx_.shared_scratch(bytes));
        const auto part = [&](int64_t task, int64_t chunk) {
            float* memory = shared + (task * chunks + chunk) * partial;
            return Partial{memory, memory + rows_, memory + 2 * rows_};
        };
        const int64_t pieces = tasks * chunks;
        for (int64_t i = ctx_.next_chunk(); i < pieces; i = ctx_.next_chunk()) {
            const int64_t task = i / chunks, chunk = i % chunks;
            const Tile& tile = tiles_[task / a_.num_kv_heads];
            if (chunk * chunk_keys >= tile.positions) continue;
            prepare_queries(tile, task % a_.num_kv_heads);
            attend_chunk(tile, task % a_.num_kv_heads, chunk, part(task, chunk));
        }
        ctx_.barrier();
        for (int64_t task = ctx_.next_chunk(); task < tasks; task = ctx_.next_chunk()) {
            const Tile& tile = tiles_[task / a_.num_kv_heads];
            begin_rows(tile);
            for (int64_t chunk = 0; chunk * chunk_keys < tile.positions; chunk++) {
                merge(0, tile.count * group_, part(task, chunk));
            }
            write_rows(tile, task % a_.num_kv_heads);
        }
    }

  private:
    // Cut the requests into tiles, the most work first, and lay out this thread's memory.
    void plan() {
        num_tiles_ = 0;
        for (int64_t r = 0; r < a_.num_requests; r++) {
            num_tiles_ += (a_.query_start_loc[r + 1] - a_.query_start_loc[r] + tile_tokens_ - 1) / tile_tokens_;
        }
        const int64_t hd = a_.head_dim;
        const int64_t floats = rows_ * hd * 2 + max_rows * (2 * chunk_keys + hd + 2) + 2 * rows_;
        const size_t plan_bytes = (static_cast<size_t>(num_tiles_) * (sizeof(Tile) + sizeof(int32_t)) + 63) / 64 * 64;
        uint8_t* memory = static_cast<uint8_t*>(ctx_.scratch(plan_bytes + sizeof(float) * floats));
        float* next = reinterpret_cast<float*>(memory + plan_bytes);
        const auto take = [&](int64_t count) {
            float* taken = next;
            next += count;
            return taken;
        };
        accumulators_ = take(rows_ * hd);
        queries_ = reinterpret_cast<Factor*>(take(rows_ * hd));
        scores_ = take(max_rows * chunk_keys);
        weights_ = reinterpret_cast<Factor*>(take(max_rows * chunk_keys));
        values_ = take(max_rows * hd);
        group_maxima_ = take(max_rows);
        group_sums_ = take(max_rows);
        maxima_ = take(rows_);
        sums_ = take(rows_);

        tiles_ = reinterpret_cast<Tile*>(memory);
        order_ = reinterpret_cast<int32_t*>(tiles_ + num_tiles_);
        longest_ = 0;
        int32_t n = 0;
        for (int64_t r = 0; r < a_.num_requests; r++) {
            const int32_t stop = a_.query_start_loc[r + 1];
            for (int32_t first = a_.query_start_loc[r]; first < stop; first += static_cast<int32_t>(tile_tokens_)) {
                const int32_t count = std::min<int32_t>(stop - first, static_cast<int32_t>(tile_tokens_));
                const int32_t positions = a_.seq_lens[r] - (stop - first) + count;
                longest_ = std::max<int64_t>(longest_, positions);
                tiles_[n] = {static_cast<int32_t>(r), first, count, positions};
                order_[n] = n;
                n++;
            }
        }
        std::sort(order_, order_ + n, [this](int32_t x, int32_t y) {
            const int64_t cost_x = int64_t{tiles_[x].positions} * tiles_[x].count;
            const int64_t cost_y = int64_t{tiles_[y].positions} * tiles_[y].count;
            return cost_x != cost_y ? cost_x > cost_y : x < y;
        });
    }

    void attend(const Tile& tile, int64_t kv_head) {
        prepare_queries(tile, kv_head);
        begin_rows(tile);
        for (int64_t chunk = 0; chunk * chunk_keys < tile.positions; chunk++) {
            attend_chunk(tile, kv_head, chunk, Partial{});
        }
        write_rows(tile, kv_head);
    }

    void prepare_queries(const Tile& tile, int64_t kv_head) {
        const int64_t hd = a_.head_dim;
        for (int64_t row = 0; row < tile.count * group_; row++) {
            const float* q = a_.q + (tile.first + row / group_) * a_.q_stride + (kv_head * group_ + row % group_) * hd;
            Factor* factors = queries_ + row * (hd / pair);
            for (int64_t i = 0; i < hd; i += lane_count) Cache::store_factors(factors + i / pair, load(q + i));
        }
    }

    void begin_rows(const Tile& tile) {
        const int64_t rows = tile.count * group_;
        std::fill(maxima_, maxima_ + rows, no_score);
        std::fill(sums_, sums_ + rows, 0.0f);
        std::fill(accumulators_, accumulators_ + rows * a_.head_dim, 0.0f);
    }

    void write_rows(const Tile& tile, int64_t kv_head) {
        const int64_t hd = a_.head_dim;
        for (int64_t row = 0; row < tile.count * group_; row++) {
            float* out = a_.out + (tile.first + row / group_) * a_.out_stride + (kv_head * group_ + row % group_) * hd;
            const Floats sum = broadcast(sums_[row]);
            for (int64_t i = 0; i < hd; i += lane_count) store(out + i, load(accumulators_ + row * hd + i) / sum);
        }
    }

    // All rows of a task over one chunk: into `apart` if it has memory, else merged into the rows at once.
    void attend_chunk(const Tile& tile, int64_t kv_head, int64_t chunk, Partial apart) {
        const int64_t start = chunk * chunk_keys;
        const int64_t tiles = std::min((tile.positions - start + tile_slots - 1) / tile_slots, chunk_tiles);
        const int32_t* table = a_.block_tables + tile.request * a_.table_stride;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t index = chunk * chunk_tiles + t;
            const int64_t column = index / layout_.tiles_per_block;
            if (column >= a_.table_stride) ctx_.fail("paged_attention: a block table is too short");
            const int64_t block = table[column];
            if (block < 0 || block >= a_.num_blocks) ctx_.fail("paged_attention: a block is outside the cache");
            const Element* part = reinterpret_cast<const Element*>(a_.kv + block * a_.block_stride);
            key_tiles_[t] = part + layout_.tile(kv_head, index % layout_.tiles_per_block);
        }
        const int64_t rows = tile.count * group_;
        for (int64_t row = 0; row < rows; row += max_rows) {
            const int64_t count = std::min<int64_t>(rows - row, max_rows);
            for (int64_t i = 0; i < count; i++) {
                const int64_t position = tile.positions - tile.count + (row + i) / group_;
                visible_[i] = std::min(position + 1 - start, chunk_keys);
            }
            Partial part{group_maxima_, group_sums_, values_};
            if (apart.maxima) part = {apart.maxima + row, apart.sums + row, apart.values + row * a_.head_dim};
            if (visible_[count - 1] <= 0) {  // the last row sees most
                std::fill(part.maxima, part.maxima + count, no_score);
                continue;
            }
            switch (count) {
                case 1: attend_rows<1>(row, part); break;
                case 2: attend_rows<2>(row, part); break;
                case 3: attend_rows<3>(row, part); break;
                default: attend_rows<4>(row, part); break;
            }
            if (!apart.maxima) merge(row, count, part);
        }
    }

    template <int rows>
    void attend_rows(int64_t row, Partial out) {
        const int64_t keys = visible_[rows - 1], hd = a_.head_dim;
        const int64_t tiles = (keys + tile_slots - 1) / tile_slots;
        const Factor* queries = queries_ + row * (hd / pair);
        int64_t t = 0;
        for (; t + max_vectors <= tiles; t += max_vectors) score<rows, max_vectors>(queries, t);
        if (max_vectors == 4 && t + 2 <= tiles) score<rows, 2>(queries, t), t += 2;
        if (t < tiles) score<rows, 1>(queries, t);
        for (int i = 0; i < rows; i++) out.maxima[i] = weigh(i, tiles, out.sums + i);
        int64_t dim = 0;
        constexpr int64_t width = max_vectors * lane_count;
        for (; dim + width <= hd; dim += width) sum_values<rows, max_vectors>(dim, keys, out.values);
        for (; dim < hd; dim += lane_count) sum_values<rows, 1>(dim, keys, out.values);
    }

    // Scores of `rows` queries with the keys of `tiles` tiles.
    template <int rows, int tiles>
    void score(const Factor* queries, int64_t first_tile) {
        const int64_t steps = a_.head_dim / pair;
        const Element* keys[tiles];
        Floats scores[rows][tiles];
        PEGA_UNROLL for (int t = 0; t < tiles; t++) {
            keys[t] = key_tiles_[first_tile + t];
            PEGA_UNROLL for (int i = 0; i < rows; i++) scores[i][t] = broadcast(0.0f);
        }
        for (int64_t step = 0; step < steps; step++) {
            typename Cache::Vector key[tiles];
            PEGA_UNROLL for (int t = 0; t < tiles; t++) key[t] = Cache::load_vector(keys[t] + step * lane_count * pair);
            PEGA_UNROLL for (int i = 0; i < rows; i++) {
                const typename Cache::Spread query = Cache::spread(queries[i * steps + step]);
                PEGA_UNROLL for (int t = 0; t < tiles; t++) {
                    scores[i][t] = Cache::multiply_add(query, key[t], scores[i][t]);
                }
            }
        }
        PEGA_UNROLL for (int i = 0; i < rows; i++) {
            PEGA_UNROLL for (int t = 0; t < tiles; t++) {
                store(scores_ + i * chunk_keys + (first_tile + t) * lane_count, scores[i][t]);
            }
        }
    }

    // The weights of row `i` from its scores, relative to the largest one, which is returned; and their sum.
    float weigh(int i, int64_t tiles, float* total) {
        float* scores = scores_ + i * chunk_keys;
        Factor* weights = weights_ + i * (chunk_keys / pair);
        const Floats hidden = broadcast(no_score);
        Floats top = hidden;
        for (int64_t t = 0; t < tiles; t++) {
            Floats score = load(scores + t * lane_count);
            if (visible_[i] < (t + 1) * tile_slots) {
                score = first_lanes(score, visible_[i] - t * tile_slots, hidden);
                store(scores + t * lane_count, score);
            }
            top = max(top, score);
        }
        const float result = largest(top);
        const Floats base = broadcast(result == no_score ? 0.0f : result), scale = broadcast(a_.scale);
        Floats sums = broadcast(0.0f);
        for (int64_t t = 0; t < tiles; t++) {
            const Floats weight = exp_or_zero((load(scores + t * lane_count) - base) * scale);
            sums = sums + Cache::store_factors(weights + t * (lane_count / pair), weight);
        }
        *total = sum(sums);
        return result;
    }

    // Weighted sums of the values of `keys` keys, `vectors` vectors of dimensions from `dim` on.
    template <int rows, int vectors>
    void sum_values(int64_t dim, int64_t keys, float* out) {
        const int64_t hd = a_.head_dim;
        Floats sums[rows][vectors];
        PEGA_UNROLL for (int i = 0; i < rows; i++) {
            PEGA_UNROLL for (int v = 0; v < vectors; v++) sums[i][v] = broadcast(0.0f);
        }
        const auto add = [&](int64_t key, const Element* at, auto load_one) __attribute__((always_inline)) {
            typename Cache::Vector value[vectors];
            PEGA_UNROLL for (int v = 0; v < vectors; v++) value[v] = load_one(at + v * lane_count * pair);
            PEGA_UNROLL for (int i = 0; i < rows; i++) {
                const typename Cache::Spread weight = Cache::spread(weights_[(i * chunk_keys + key) / pair]);
                PEGA_UNROLL for (int v = 0; v < vectors; v++) {
                    sums[i][v] = Cache::multiply_add(weight, value[v], sums[i][v]);
                }
            }
        };
        for (int64_t first = 0; first < keys; first += tile_slots) {
            const Element* values = key_tiles_[first / tile_slots] + layout_.values_offset + dim * pair;
            const int64_t slots = std::min(keys - first, tile_slots);
            int64_t slot = 0;
            for (; slot + pair <= slots; slot += pair) add(first + slot, values + slot * hd, Cache::load_vector);
            // What lies behind the last key was never written: it may be NaN, which no weight of 0 silences.
            if (slot < slots) add(first + slot, values + slot * hd, Cache::load_first_of_pairs);
        }
        PEGA_UNROLL for (int i = 0; i < rows; i++) {
            PEGA_UNROLL for (int v = 0; v < vectors; v++) store(out + i * hd + dim + v * lane_count, sums[i][v]);
        }
    }

    // What a weight is multiplied with when the largest score of its row grows by `-difference`.
    float factor(float difference) const {
        float lanes[Vec::width];
        exp_or_zero(Vec::set(difference * a_.scale)).store(lanes);
        return lanes[0];
    }

    // Add what the rows `row ..` of a task got from their next chunk to what they have.
    void merge(int64_t row, int64_t count, Partial part) {
        const int64_t hd = a_.head_dim;
        for (int64_t i = 0; i < count; i++) {
            if (part.maxima[i] == no_score) continue;  // the row sees nothing of the chunk
            float& maximum = maxima_[row + i];
            const float larger = std::max(maximum, part.maxima[i]);
            const float old_factor = factor(maximum - larger), new_factor = factor(part.maxima[i] - larger);
            maximum = larger;
            sums_[row + i] = std::fma(sums_[row + i], old_factor, part.sums[i] * new_factor);
            float* into = accumulators_ + (row + i) * hd;
            const Floats old_factors = broadcast(old_factor), new_factors = broadcast(new_factor);
            for (int64_t d = 0; d < hd; d += lane_count) {
                const Floats added = load(part.values + i * hd + d) * new_factors;
                store(into + d, fma(load(into + d), old_factors, added));
            }
        }
    }

    const Arguments a_;
    Context& ctx_;
    const KvLayout<Element> layout_;
    const int64_t group_;        // query heads of a kv head
    const int64_t tile_tokens_;  // most tokens of a tile
    const int64_t rows_;         // most rows of a task
    int64_t num_tiles_ = 0, longest_ = 0;
    Tile* tiles_ = nullptr;
    int32_t* order_ = nullptr;
    float* accumulators_ = nullptr;   // [rows_][head_dim]
    float* maxima_ = nullptr;         // [rows_]
    float* sums_ = nullptr;           // [rows_]
    Factor* queries_ = nullptr;       // [rows_][head_dim / pair]
    float* scores_ = nullptr;         // [max_rows][chunk_keys]
    Factor* weights_ = nullptr;       // [max_rows][chunk_keys / pair]
    float* values_ = nullptr;         // [max_rows][head_dim]
    float* group_maxima_ = nullptr;   // [max_rows]
    float* group_sums_ = nullptr;     // [max_rows]
    int64_t visible_[max_rows] = {};  // keys of the chunk that each row sees
    const Element* key_tiles_[chunk_tiles] = {};
};

}  // namespace
}  // namespace pega

// q, q_stride, kv, kv_block_stride, num_blocks, block_tables, table_stride, query_start_loc, seq_lens,
// num_requests, out, out_stride, num_heads, num_kv_heads, head_dim, block_size, scale
PEGA_KERNEL(pega_paged_attention_f32) { pega::Attention<float>(args, ctx).run(); }
PEGA_KERNEL(pega_paged_attention_f16) { pega::Attention<pega::Half>(args, ctx).run(); }
PEGA_KERNEL(pega_paged_attention_bf16) { pega::Attention<pega::BFloat16>(args, ctx).run(); }
