// From logits to the next token, and the log-probabilities of given tokens. Each row is the work of one thread.
#include <algorithm>
#include <cmath>
#include <functional>

#include "cpu/logits.h"
#include "cpu/philox.h"
#include "cpu/runtime.h"

namespace pega {
namespace {

constexpr float greedy_temperature = 1e-5f;
constexpr float least_exponent = -104.0f;  // exp of less is 0 in float32

// Where one row's log-probabilities go.
struct Scores {
    float* logprob;
    int32_t* rank;
    int32_t* top_ids;
    float* top_logprobs;
};

struct Weighted {
    Ranked key;
    double weight;
};

// Memory of one thread for a row of a vocabulary.
struct Workspace {
    float* span_maxima;
    float* spans;     // another number for each span
    float* copy;      // of the logits
    float* weights;   // of the candidates
    int32_t* ids;     // of the candidates
    int32_t* counts;  // by id, of the history
    Ranked* keys;
    Weighted* weighted;

    Workspace(Context& ctx, int64_t vocab_size) {
        const size_t n = static_cast<size_t>(vocab_size + span_ids) / span_ids * span_ids;
        uint8_t* next = static_cast<uint8_t*>(ctx.scratch(n * (6 * sizeof(float) + sizeof(Ranked) + sizeof(Weighted))));
        const auto take = [&](size_t bytes) {
            uint8_t* taken = next;
            next += bytes;
            return taken;
        };
        weighted = reinterpret_cast<Weighted*>(take(n * sizeof(Weighted)));
        keys = reinterpret_cast<Ranked*>(take(n * sizeof(Ranked)));
        span_maxima = reinterpret_cast<float*>(take(n * sizeof(float)));
        spans = reinterpret_cast<float*>(take(n * sizeof(float)));
        copy = reinterpret_cast<float*>(take(n * sizeof(float)));
        weights = reinterpret_cast<float*>(take(n * sizeof(float)));
        ids = reinterpret_cast<int32_t*>(take(n * sizeof(int32_t)));
        counts = reinterpret_cast<int32_t*>(take(n * sizeof(int32_t)));
    }
};

// The log-probability and rank of `target` and the `num_top` best ids, from unmodified logits.
void score(const float* x, int64_t vocab_size, int32_t target, int64_t num_top, Scores out, const Workspace& work) {
    const float top = find_maxima(x, vocab_size, work.span_maxima);
    const double normalizer = top + std::log(sum_of_exponentials(x, vocab_size, top));
    *out.logprob = static_cast<float>(x[target] - normalizer);
    *out.rank = rank_of(x, vocab_size, target);
    if (num_top <= 0) return;
    const float bound = lower_bound_of_best(work.span_maxima, vocab_size, num_top, work.spans);
    const int64_t found = collect(x, vocab_size, bound, work.span_maxima, work.ids);
    for (int64_t i = 0; i < found; i++) work.keys[i] = ranked(x[work.ids[i]], work.ids[i]);
    num_top = std::min(num_top, found);
    std::partial_sort(work.keys, work.keys + num_top, work.keys + found, std::greater<Ranked>());
    for (int64_t i = 0; i < num_top; i++) {
        out.top_ids[i] = ranked_id(work.keys[i]);
        out.top_logprobs[i] = static_cast<float>(x[out.top_ids[i]] - normalizer);
    }
}

// Repetition over prompt and output, presence and frequency over the output.
void penalise(float* x, int64_t limit, const int32_t* tokens, int64_t length, int64_t prompt_length, float repetition,
              float presence, float frequency, int32_t* counts) {
    const auto known = [&](int64_t i) { return tokens[i] >= 0 && tokens[i] < limit; };
    for (int64_t i = 0; i < length; i++) {
        if (known(i)) counts[tokens[i]] = 0;
    }
    for (int64_t i = prompt_length; i < length; i++) {
        if (known(i)) counts[tokens[i]]++;
    }
    for (int64_t i = 0; i < length; i++) {
        if (!known(i) || counts[tokens[i]] < 0) continue;
        float& logit = x[tokens[i]];
        logit = logit > 0 ? logit / repetition : logit * repetition;
        if (counts[tokens[i]] > 0) {
            logit -= frequency * static_cast<float>(counts[tokens[i]]);
            logit -= presence;
        }
        counts[tokens[i]] = -1;  // done
    }
}

// The parameters of a draw.
struct Filters {
    float temperature;
    int64_t top_k;  // 0: off
    float top_p;
    float min_p;
};

// The last of the best ids whose weights together reach `target`.
Ranked cut(Weighted* all, int64_t count, double target) {
    const auto better = [](const Weighted& a, const Weighted& b) { return a.key > b.key; };
    int64_t low = 0, high = count;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        std::nth_element(all + low, all + middle, all + high, better);
        double upper = 0;
        for (int64_t i = low; i < middle; i++) upper += all[i].weight;
        if (upper < target) {
            target -= upper;
            low = middle;
        } else {
            high = middle;
        }
    }
    return all[low].key;
}

// Ids in ascending order, each with a weight that its probability is proportional to.
struct Candidates {
    int32_t* ids;
    float* weights;
    int64_t count;
    double total;
};

// What is at least as likely as min_p asks, and is among the top_k best or a few more. One of the two is on.
Candidates candidates_by_bound(const float* x, int64_t count, float top, Filters f, const Workspace& work) {
    const float log_min_p = static_cast<float>(std::log(static_cast<double>(f.min_p)));
    // First a bound that is cheap and a little too wide; what passes it is then looked at exactly.
    float bound = top + f.temperature * std::max(log_min_p, least_exponent);
    bound -= 1e-5f * (std::fabs(bound) + std::fabs(top));
    if (f.top_k > 0) bound = std::max(bound, lower_bound_of_best(work.span_maxima, count, f.top_k, work.spans));
    const int64_t found = collect(x, count, bound, work.span_maxima, work.ids);
    Candidates all = {work.ids, work.weights, 0, 0};
    const Vec base = Vec::set(top), divisor = Vec::set(f.temperature);
    for (int64_t i = 0; i < found; i += Vec::width) {
        const int64_t width = std::min<int64_t>(Vec::width, found - i);
        float values[Vec::width];
        for (int64_t lane = 0; lane < Vec::width; lane++) values[lane] = lane < width ? x[all.ids[i + lane]] : top;
        const Vec scaled = (Vec::load(values) - base) / divisor;
        const uint32_t passed = bits(scaled >= Vec::set(log_min_p));
        exp(scaled).store(values);
        for (int64_t lane = 0; lane < width; lane++) {
            if (!(passed >> lane & 1)) continue;
            all.ids[all.count] = all.ids[i + lane];
            all.weights[all.count++] = values[lane];
            all.total += static_cast<double>(values[lane]);
        }
    }
    return all;
}

// The weights of all ids, with their sums over spans in `work.spans`; returns the total.
double weigh_all(const float* x, int64_t count, float top, float temperature, const Workspace& work) {
    const Vec base = Vec::set(top), divisor = Vec::set(temperature);
    double total = 0;
    for (int64_t first = 0; first < count; first += span_ids) {
        const int64_t end = std::min(first + span_ids, count);
        Vec sums = Vec::zero();
        int64_t i = first;
        for (; i + Vec::width <= end; i += Vec::width) {
            const Vec weight = exp((Vec::load(x + i) - base) / divisor);
            weight.store(work.weights + i);
            sums += weight;
        }
        float sum = reduce_add(sums);
        if (i < end) {
            exp((Vec::load_partial(x + i, end - i) - base) / divisor).store_partial(work.weights + i, end - i);
            for (; i < end; i++) sum += work.weights[i];
        }
        work.spans[first / span_ids] = sum;
        total += static_cast<double>(sum);
    }
    return total;
}

// The first id whose cumulative weight exceeds `target`, given the weights of all ids and their sums.
int32_t pick_of_all(int64_t count, double target, const Workspace& work) {
    double cumulative = 0;
    int64_t first = 0, last_used = 0;
    for (; first < count; first += span_ids) {
        const double sum = static_cast<double>(work.spans[first / span_ids]);
        if (sum > 0) last_used = first;
        if (cumulative + sum > target) break;
        cumulative += sum;
    }
    if (first >= count) first = last_used;  // rounding
    int32_t id = -1;
    for (int64_t i = first; i < std::min(first + span_ids, count) && !(cumulative > target); i++) {
        cumulative += static_cast<double>(work.weights[i]);
        if (work.weights[i] > 0) id = static_cast<int32_t>(i);
    }
    return id;
}

int32_t pick(const Candidates& from, double target) {
    double cumulative = 0;
    int32_t id = -1;
    for (int64_t i = 0; i < from.count && !(cumulative > target); i++) {
        cumulative += static_cast<double>(from.weights[i]);
        if (from.weights[i] > 0) id = from.ids[i];
    }
    return id;
}

// Take the weight from what ranks behind `last`.
void keep_up_to(Candidates& all, Ranked last, const float* x) {
    all.total = 0;
    for (int64_t i = 0; i < all.count; i++) {
        if (ranked(x[all.ids[i]], all.ids[i]) < last) all.weights[i] = 0;
        all.total += static_cast<double>(all.weights[i]);
    }
}

// Draw an id from the first `count` logits, the largest of which is `top`.
int32_t draw(const float* x, int64_t count, float top, Filters f, double random, const Workspace& work) {
    Candidates all;
    if (f.top_k > 0 || f.min_p > 0) {
        all = candidates_by_bound(x, count, top, f, work);
    } else {
        const double total = weigh_all(x, count, top, f.temperature, work);
        if (!(f.top_p < 1)) return pick_of_all(count, random * total, work);
        // All ids of less than this weight have together less than what top_p leaves out.
        const double negligible = 0.999 * (1 - static_cast<double>(f.top_p)) * total / static_cast<double>(count);
        const float bound = std::max(static_cast<float>(negligible), 1e-45f);
        const int64_t found = collect(work.weights, count, bound, work.spans, work.ids);
        for (int64_t i = 0; i < found; i++) work.weights[i] = work.weights[work.ids[i]];  // ids[i] >= i
        all = {work.ids, work.weights, found, total};
    }
    if (f.top_k > 0 && f.top_k < all.count) {
        for (int64_t i = 0; i < all.count; i++) work.keys[i] = ranked(x[all.ids[i]], all.ids[i]);
        std::nth_element(work.keys, work.keys + (f.top_k - 1), work.keys + all.count, std::greater<Ranked>());
        keep_up_to(all, work.keys[f.top_k - 1], x);
    }
    if (f.top_p < 1) {
        for (int64_t i = 0; i < all.count; i++) {
            work.weighted[i] = {ranked(x[all.ids[i]], all.ids[i]), static_cast<double>(all.weights[i])};
        }
        keep_up_to(all, cut(work.weighted, all.count, static_cast<double>(f.top_p) * all.total), x);
    }
    return pick(all, random * all.total);
}

int32_t best_id(const float* x, int64_t count, float top, const float* span_maxima) {
    for (int64_t first = 0; first < count; first += span_ids) {
        if (span_maxima[first / span_ids] != top) continue;
        for (int64_t i = first; i < count; i++) {
            if (x[i] == top) return static_cast<int32_t>(i);
        }
    }
    return -1;
}

}  // namespace
}  // namespace pega

// logits, logits_stride, rows, vocab_size, decodable_vocab_size, temperature, top_k, top_p, min_p, presence,
// frequency, repetition, seeds, counters, history, history_start, prompt_lens, bias_ids, bias_values, bias_start,
// allowed, allowed_stride, num_logprobs, sampled, logprobs, ranks, top_ids, top_logprobs, max_top
PEGA_KERNEL(pega_sample) {
    using namespace pega;
    float* logits = pointer<float>(args[0]);
    const int64_t stride = args[1], vocab_size = args[3], decodable = args[4], max_top = args[28];
    const float* temperature = pointer<const float>(args[5]);
    const int32_t* top_k = pointer<const int32_t>(args[6]);
    const float* top_p = pointer<const float>(args[7]);
    const float* min_p = pointer<const float>(args[8]);
    const float* presence = pointer<const float>(args[9]);
    const float* frequency = pointer<const float>(args[10]);
    const float* repetition = pointer<const float>(args[11]);
    const uint64_t* seeds = pointer<const uint64_t>(args[12]);
    const int64_t* counters = pointer<const int64_t>(args[13]);
    const int32_t* history = pointer<const int32_t>(args[14]);
    const int32_t* history_start = pointer<const int32_t>(args[15]);
    const int32_t* prompt_lens = pointer<const int32_t>(args[16]);
    const int32_t* bias_ids = pointer<const int32_t>(args[17]);
    const float* bias_values = pointer<const float>(args[18]);
    const int32_t* bias_start = pointer<const int32_t>(args[19]);
    const uint32_t* allowed = pointer<const uint32_t>(args[20]);
    const int64_t allowed_stride = args[21];
    const int32_t* num_logprobs = pointer<const int32_t>(args[22]);
    int32_t* sampled = pointer<int32_t>(args[23]);
    float* logprobs = pointer<float>(args[24]);
    int32_t* ranks = pointer<int32_t>(args[25]);
    int32_t* top_ids = pointer<int32_t>(args[26]);
    float* top_logprobs = pointer<float>(args[27]);

    const Workspace work(ctx, vocab_size);
    ctx.parallel(args[2], 1, [&](int64_t row, int64_t) {
        const float* raw = logits + row * stride;
        sampled[row] = -1;
        if (!all_usable(raw, vocab_size)) return;
        const bool penalised = repetition[row] != 1 || presence[row] != 0 || frequency[row] != 0;
        const bool changed = penalised || allowed || bias_start[row] < bias_start[row + 1];
        float* x = logits + row * stride;
        if (changed && num_logprobs[row] >= 0) {
            x = work.copy;
            std::copy(raw, raw + decodable, x);
        }
        for (int32_t i = bias_start[row]; i < bias_start[row + 1]; i++) {
            if (bias_ids[i] >= 0 && bias_ids[i] < decodable) x[bias_ids[i]] += bias_values[i];
        }
        if (penalised) {
            penalise(x, decodable, history + history_start[row], history_start[row + 1] - history_start[row],
                     prompt_lens[row], repetition[row], presence[row], frequency[row], work.counts);
        }
        if (allowed) {
            const uint32_t* words = allowed + row * allowed_stride;
            for (int64_t first = 0; first < decodable; first += 32) {
                const uint32_t word = words[first / 32];
                if (word == 0xffffffffu) continue;
                for (int64_t i = first; i < std::min(first + 32, decodable); i++) {
                    if (!(word >> (i - first) & 1)) x[i] = -INFINITY;
                }
            }
        }
        const float top = find_maxima(x, decodable, work.span_maxima);
        if (!std::isfinite(top)) return;
        if (temperature[row] < greedy_temperature) {
            sampled[row] = best_id(x, decodable, top, work.span_maxima);
        } else {
            const double random = uniform(seeds[row], static_cast<uint64_t>(counters[row]));
            const Filters filters = {temperature[row], top_k[row], top_p[row], min_p[row]};
            sampled[row] = draw(x, decodable, top, filters, random, work);
        }
        if (num_logprobs[row] >= 0) {
            const Scores out = {logprobs + row, ranks + row, top_ids + row * max_top, top_logprobs + row * max_top};
            score(raw, vocab_size, sampled[row], std::min<int64_t>(num_logprobs[row], max_top), out, work);
        }
    });
}

// logits, logits_stride, rows, vocab_size, targets, num_logprobs, logprobs, ranks, top_ids, top_logprobs, max_top
PEGA_KERNEL(pega_token_logprobs) {
    using namespace pega;
    const float* logits = pointer<const float>(args[0]);
    const int64_t stride = args[1], vocab_size = args[3], max_top = args[10];
    const int32_t* targets = pointer<const int32_t>(args[4]);
    const Workspace work(ctx, vocab_size);
    ctx.parallel(args[2], 1, [&](int64_t row, int64_t) {
        if (targets[row] < 0 || targets[row] >= vocab_size) ctx.fail("token_logprobs: a target is outside the vocabulary");
        const Scores out = {pointer<float>(args[6]) + row, pointer<int32_t>(args[7]) + row,
                            pointer<int32_t>(args[8]) + row * max_top, pointer<float>(args[9]) + row * max_top};
        score(logits + row * stride, vocab_size, targets[row], std::min(args[5], max_top), out, work);
    });
}
