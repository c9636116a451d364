// From logits to tokens on the device; the meaning of every step is that of the reference in ops/sampling.py.
//
// `scan_logits` reads every row once with many blocks: largest logit, sum of exponentials, anything that is not a
// number. Greedy rows without edits need nothing more. `sample_rows` gives one block to a row for the rest: edits of
// single logits through a hash table (so that they can be undone before scoring), then selection by thresholds.
//
// Weights are probabilities in fixed point, so sums are exact and do not depend on the order in which threads add.
// Items are ordered by (logit, then lower id); a 64-bit key holds both, so every item has a key of its own.
#include "cuda/common.cuh"

using namespace pega;

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr int BINS = 2048;
constexpr float BINS_A_NAT = 64.f;
constexpr float GREEDY = 1e-5f;
constexpr float FIXED_POINT = 17592186044416.f;  // 2^44: the sum over any vocabulary fits 64 bits
constexpr int MAX_TOP = 256;
constexpr int CANDIDATES = THREADS;
constexpr int FEW = 1024;  // items that one warp looks through

struct RowScan {      // one share of a row
  uint64_t best;      // key of the largest decodable logit
  double sum;         // of exp(logit - maximum)
  float maximum;
  int broken;         // NaN or +inf was seen
};

struct Edit {         // slot of the hash table (20 bytes): a logit that the request changes
  int id;             // -1: free
  int outputs;        // times it was generated
  int seen;           // whether it occurs at all
  float bias;
  float raw;
};

__device__ __forceinline__ uint64_t item_key(float value, int id) {
  uint32_t bits = __float_as_uint(value == 0.f ? 0.f : value);  // -0 and +0 are equal
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (uint64_t)bits << 32 | (0xffffffffu - (uint32_t)id);
}
__device__ __forceinline__ int key_id(uint64_t key) { return (int)(0xffffffffu - (uint32_t)key); }

__device__ __forceinline__ uint64_t shuffle_xor(uint64_t v, int offset) {
  return __shfl_xor_sync(0xffffffffu, (unsigned long long)v, offset);
}

template <typename T, typename F>
__device__ __forceinline__ T block_reduce(T v, T* scratch, F combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    T other;
    if constexpr (sizeof(T) == 8) {
      const uint64_t bits = shuffle_xor(*reinterpret_cast<uint64_t*>(&v), offset);
      other = *reinterpret_cast<const T*>(&bits);
    } else {
      other = __shfl_xor_sync(0xffffffffu, v, offset);
    }
    v = combine(v, other);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  v = scratch[0];
  for (int i = 1; i < blockDim.x / 32; ++i) v = combine(v, scratch[i]);
  return v;
}

struct Maximum {
  template <typename T>
  __device__ T operator()(T a, T b) const { return a > b ? a : b; }
};
struct Minimum {
  template <typename T>
  __device__ T operator()(T a, T b) const { return a < b ? a : b; }
};
struct Sum {
  template <typename T>
  __device__ T operator()(T a, T b) const { return a + b; }
};

extern "C" __global__ void __launch_bounds__(256)
    scan_logits(const float* __restrict__ logits, int64_t stride, int vocab, int decodable, RowScan* __restrict__ scans) {
  release_successor();
  __shared__ uint64_t keys[8];
  __shared__ double sums[8];
  __shared__ float floats[8];
  wait_for_predecessor();
  const float* row = logits + blockIdx.x * stride;
  const int first = (int64_t)blockIdx.y * vocab / gridDim.y, last = (int64_t)(blockIdx.y + 1) * vocab / gridDim.y;
  float maximum = -INFINITY, broken = 0.f;
  uint64_t best = 0;
  for (int i = first + threadIdx.x; i < last; i += 256) {
    const float v = row[i];
    if (!(v < INFINITY)) broken = 1.f;
    maximum = fmaxf(maximum, v);
    if (i < decodable) best = max(best, item_key(v, i));
  }
  maximum = block_reduce(maximum, floats, Maximum());
  broken = block_reduce(broken, floats, Maximum());
  best = block_reduce(best, keys, Maximum());
  double sum = 0.;
  if (maximum > -INFINITY && broken == 0.f) {
    for (int i = first + threadIdx.x; i < last; i += 256) sum += (double)expf(row[i] - maximum);
  }
  sum = block_reduce(sum, sums, Sum());
  if (threadIdx.x == 0) scans[blockIdx.x * gridDim.y + blockIdx.y] = {best, sum, maximum, broken != 0.f};
}

struct Shared {
  unsigned long long bins[BINS];
  uint64_t words[WARPS];
  uint64_t top[MAX_TOP];
  uint64_t keys[CANDIDATES], weights[CANDIDATES];
  uint64_t before, selected;
  int count, finished;
};

// `f(i, row[i])` for `first` (a multiple of 4) up to `last`, by `threads` threads.
template <typename F>
__device__ __forceinline__ void each_item(const float* row, int first, int last, int thread, int threads, F f) {
  const int whole = ((uint64_t)row & 15) == 0 ? max(last & ~3, first) : first;
#pragma unroll 2
  for (int i = first + 4 * thread; i < whole; i += 4 * threads) {
    const float4 v = *reinterpret_cast<const float4*>(row + i);
    f(i, v.x);
    f(i + 1, v.y);
    f(i + 2, v.z);
    f(i + 3, v.w);
  }
#pragma unroll 1
  for (int i = whole + thread; i < last; i += threads) f(i, row[i]);
}

// The key of the item at which the cumulative weight of items, best first, reaches `target_of(total)`; 0 if that is 0.
// `weight(i, v)` is an item's weight, 0 if it is not in the set; `largest` bounds the values of the set.
template <typename Weight, typename Target>
__device__ uint64_t select(Shared& s, const float* row, int n, float largest, float sharpness, Weight weight,
                           Target target_of) {
  // First by coarse bins of the value, whose population is even.
  auto bin_of = [&](float v) { return (int)fminf((largest - v) * sharpness * BINS_A_NAT, (float)(BINS - 1)); };
  auto clear = [&] {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
    __syncthreads();
  };
  clear();
  each_item(row, 0, n, threadIdx.x, THREADS, [&](int i, float v) {
    const uint64_t w = weight(i, v);
    if (w) atomicAdd(&s.bins[bin_of(v)], (unsigned long long)w);
  });
  __syncthreads();
  uint64_t total = 0;
  for (int i = threadIdx.x; i < BINS; i += THREADS) total += s.bins[i];
  const uint64_t target = target_of(block_reduce(total, s.words, Sum()));
  if (target == 0) return 0;
  auto crossing = [&](int bins, uint64_t before, bool descending) {  // -> bin; s.before: weight before it
    __syncthreads();
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x, span = bins / 32;
      uint64_t mine = 0;
      for (int i = 0; i < span; ++i) mine += s.bins[descending ? bins - 1 - (lane * span + i) : lane * span + i];
      uint64_t up_to = mine;
      for (int offset = 1; offset < 32; offset <<= 1) {
        const uint64_t other = __shfl_up_sync(0xffffffffu, (unsigned long long)up_to, offset);
        if (lane >= offset) up_to += other;
      }
      up_to += before;
      const unsigned reached = __ballot_sync(0xffffffffu, up_to >= target);
      const int owner = reached ? __ffs(reached) - 1 : 31;
      if (lane == owner) {
        uint64_t sum = up_to - mine;
        int i = 0, bin = 0;
        for (; i < span; ++i) {
          bin = descending ? bins - 1 - (lane * span + i) : lane * span + i;
          if (sum + s.bins[bin] >= target) break;
          sum += s.bins[bin];
        }
        s.before = sum;
        s.count = bin;
        s.finished = sum + s.bins[bin] == target;
      }
    }
    __syncthreads();
    return s.count;
  };
  const int coarse = crossing(BINS, 0, false);
  uint64_t before = s.before;

  // The items of that bin, which are rarely more than fit: each finds what is before it.
  __syncthreads();
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
  each_item(row, 0, n, threadIdx.x, THREADS, [&](int i, float v) {
    if (bin_of(v) != coarse) return;
    const uint64_t w = weight(i, v);
    if (w == 0) return;
    const int at = atomicAdd(&s.count, 1);
    if (at < CANDIDATES) {
      s.keys[at] = item_key(v, i);
      s.weights[at] = w;
    }
  });
  __syncthreads();
  const int count = s.count;
  if (count <= CANDIDATES) {
    if (threadIdx.x < count) {
      const uint64_t mine = s.keys[threadIdx.x];
      uint64_t sum = before;  // of better items
      for (int i = 0; i < count; ++i) sum += s.keys[i] > mine ? s.weights[i] : 0;
      if (sum < target && sum + s.weights[threadIdx.x] >= target) s.selected = mine;
    }
    __syncthreads();
    return s.selected;
  }

  // Too many: by the key's own digits inside the bin.
  uint64_t prefix = 0, mask = 0;
  for (int shift = 53; shift > -11; shift -= 11) {
    const int low = max(shift, 0);
    clear();
    each_item(row, 0, n, threadIdx.x, THREADS, [&](int i, float v) {
      if (bin_of(v) != coarse) return;
      const uint64_t key = item_key(v, i);
      if ((key & mask) == prefix) atomicAdd(&s.bins[(key >> low) & (BINS - 1)], (unsigned long long)weight(i, v));
    });
    const uint64_t digit = crossing(BINS, before, true);
    before = s.before;
    prefix = (prefix & ~((uint64_t)(BINS - 1) << low)) | digit << low;
    mask |= (uint64_t)(BINS - 1) << low;
    if (s.finished) break;  // every item of the digit is wanted
  }
  // The worst of them, not merely their prefix: other bins hold worse items that share it.
  uint64_t least = ~(uint64_t)0;
  each_item(row, 0, n, threadIdx.x, THREADS, [&](int i, float v) {
    const uint64_t key = item_key(v, i);
    if ((key & mask) == prefix && bin_of(v) == coarse && weight(i, v) != 0) least = min(least, key);
  });
  return block_reduce(least, s.words, Minimum());
}

__device__ __forceinline__ void philox(uint32_t (&c)[4], uint32_t k0, uint32_t k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = (uint64_t)0xD2511F53u * c[0], p1 = (uint64_t)0xCD9E8D57u * c[2];
    const uint32_t next[4] = {(uint32_t)(p1 >> 32) ^ c[1] ^ k0, (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c[3] ^ k1,
                              (uint32_t)p0};
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = next[i];
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
}

__device__ double uniform(uint64_t seed, uint64_t counter) {
  uint32_t c[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), 0, 0};
  philox(c, (uint32_t)seed, (uint32_t)(seed >> 32));
  return (double)(((uint64_t)c[0] << 32 | c[1]) >> 11) * 0x1p-53;
}

struct RowTotals {
  float maximum;
  double sum;
  uint64_t best;
  bool broken;
};

__device__ RowTotals merge_scans(const RowScan* scans, int shares) {
  RowTotals total{-INFINITY, 0., 0, false};
  for (int i = 0; i < shares; ++i) {
    total.maximum = fmaxf(total.maximum, scans[i].maximum);
    total.best = max(total.best, scans[i].best);
    total.broken |= scans[i].broken != 0;
  }
  for (int i = 0; i < shares; ++i) {
    if (scans[i].maximum > -INFINITY) total.sum += scans[i].sum * exp((double)scans[i].maximum - total.maximum);
  }
  return total;
}

// Log-probability and rank of `target` and the `num_top` most likely ids, from untouched logits.
__device__ void score(Shared& s, const float* row, int vocab, const RowTotals& total, int target, int num_top,
                      float* logprob, int* rank, int* top_ids, float* top_logprobs) {
  const double normalizer = (double)total.maximum + log(total.sum);
  const uint64_t mine = item_key(row[target], target);
  uint64_t better = 0;
  each_item(row, 0, vocab, threadIdx.x, THREADS, [&](int i, float v) { better += item_key(v, i) > mine; });
  better = block_reduce(better, s.words, Sum());
  if (threadIdx.x == 0) {
    *logprob = (float)(row[target] - normalizer);
    *rank = (int)better + 1;
  }
  num_top = min(num_top, min(vocab, MAX_TOP));
  if (num_top == 0) return;
  const uint64_t least = select(
      s, row, vocab, total.maximum, 1.f, [](int, float) -> uint64_t { return 1; },
      [&](uint64_t) -> uint64_t { return num_top; });
  __syncthreads();
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
  each_item(row, 0, vocab, threadIdx.x, THREADS, [&](int i, float v) {
    const uint64_t key = item_key(v, i);
    if (key >= least) s.top[atomicAdd(&s.count, 1)] = key;
  });
  __syncthreads();
  for (int i = threadIdx.x; i < num_top; i += THREADS) {
    int place = 0;
    for (int j = 0; j < num_top; ++j) place += s.top[j] > s.top[i];
    const int id = key_id(s.top[i]);
    top_ids[place] = id;
    top_logprobs[place] = (float)(row[id] - normalizer);
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_rows(float* logits, int64_t stride, const RowScan* scans, const float* temperatures, const int* top_ks,
                const float* top_ps, const float* min_ps, const float* presences, const float* frequencies,
                const float* repetitions, const uint64_t* seeds, const int64_t* counters, const int* history,
                const int* history_start, const int* prompt_lens, const int* bias_ids, const float* bias_values,
                const int* bias_start, const uint32_t* allowed_bits, const int* num_logprobs, int* sampled,
                float* logprobs, int* ranks, int* top_ids, float* top_logprobs, Edit* edits, int vocab, int decodable,
                int shares, int max_top) {
  release_successor();
  __shared__ Shared s;
  wait_for_predecessor();
  const int r = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* row = logits + r * stride;
  const RowTotals total = merge_scans(scans + r * shares, shares);
  if (total.broken || !(total.maximum > -INFINITY)) {
    if (threadIdx.x == 0) sampled[r] = -1;
    return;
  }
  const float temperature = temperatures[r];
  const int history_first = history_start[r], history_last = history_start[r + 1];
  const int bias_first = bias_start[r], bias_last = bias_start[r + 1];
  const float presence = presences[r], frequency = frequencies[r], repetition = repetitions[r];
  const bool penalised = history_last > history_first && (presence != 0.f || frequency != 0.f || repetition != 1.f);
  const int entries = (penalised ? history_last - history_first : 0) + bias_last - bias_first;
  const uint32_t* allowed = allowed_bits != nullptr ? allowed_bits + (int64_t)r * ((vocab + 31) / 32) : nullptr;
  Edit* table = edits + 4 * (int64_t)(history_first + bias_first);
  uint32_t capacity = 1;
  while (capacity < 2 * (uint32_t)entries) capacity <<= 1;

  if (entries > 0) {
    for (uint32_t i = threadIdx.x; i < capacity; i += THREADS) table[i] = {-1, 0, 0, 0.f, 0.f};
    __syncthreads();
    auto slot_of = [&](int id) -> Edit& {
      uint32_t at = (uint32_t)id * 2654435761u & (capacity - 1);
      while (true) {
        const int held = atomicCAS(&table[at].id, -1, id);
        if (held == -1 || held == id) return table[at];
        at = (at + 1) & (capacity - 1);
      }
    };
    if (penalised) {
      const int output_first = history_first + prompt_lens[r];
      for (int i = history_first + threadIdx.x; i < history_last; i += THREADS) {
        if (history[i] >= decodable) continue;
        Edit& edit = slot_of(history[i]);
        edit.seen = 1;
        if (i >= output_first) atomicAdd(&edit.outputs, 1);
      }
    }
    for (int i = bias_first + threadIdx.x; i < bias_last; i += THREADS) {
      if (bias_ids[i] < decodable) atomicAdd(&slot_of(bias_ids[i]).bias, bias_values[i]);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < capacity; i += THREADS) {
      Edit& edit = table[i];
      if (edit.id < 0) continue;
      edit.raw = row[edit.id];
      float v = edit.raw + edit.bias;
      if (edit.seen) v = v > 0.f ? v / repetition : v * repetition;
      if (edit.outputs > 0) v = v - frequency * (float)edit.outputs - presence;
      row[edit.id] = v;
    }
    __syncthreads();
  }

  auto may = [&](int i) { return allowed == nullptr || (allowed[i / 32] >> (i % 32) & 1); };
  uint64_t best = total.best;
  if (entries > 0 || allowed != nullptr) {
    best = 0;
    each_item(row, 0, decodable, threadIdx.x, THREADS, [&](int i, float v) {
      if (may(i)) best = max(best, item_key(v, i));
    });
    best = block_reduce(best, s.words, Maximum());
  }
  int token = best != 0 ? key_id(best) : -1;
  const float largest = token >= 0 ? row[token] : -INFINITY;
  if (!(fabsf(largest) < INFINITY)) token = -1;

  if (token >= 0 && !(temperature < GREEDY)) {
    const float least_scaled = logf(min_ps[r]), top_p = top_ps[r];  // log(0) is -inf: keeps everything
    const int top_k = top_ks[r];
    uint64_t least = 0;
    auto scaled = [&](float v) { return (v - largest) / temperature; };
    auto kept = [&](int i, float v) { return may(i) && scaled(v) >= least_scaled && item_key(v, i) >= least; };
    auto weight = [&](int i, float v) -> uint64_t {
      return kept(i, v) ? (uint64_t)(expf(scaled(v)) * FIXED_POINT) : 0;
    };
    const float sharpness = 1.f / temperature;
    if (top_k > 0 && top_k < decodable) {
      least = select(
          s, row, decodable, largest, sharpness, [&](int i, float v) -> uint64_t { return kept(i, v); },
          [&](uint64_t count) -> uint64_t { return count > (uint64_t)top_k ? top_k : 0; });
    }
    if (top_p < 1.f) {
      least = max(least, select(s, row, decodable, largest, sharpness, weight, [&](uint64_t sum) {
                    return (uint64_t)fmax(ceil((double)top_p * (double)sum), 1.);
                  }));
    }
    // Each warp sums a contiguous share of the ids; the one that holds the draw is shared again, until few are left.
    int first = 0, last = decodable;
    uint64_t before = 0, draw = 0;
    for (bool is_whole = true; is_whole || last - first > FEW; is_whole = false) {
      const int share = ((last - first + WARPS - 1) / WARPS + 3) & ~3;
      uint64_t mine = 0;
      each_item(row, first + warp * share, min(first + (warp + 1) * share, last), lane, 32,
                [&](int i, float v) { mine += weight(i, v); });
      for (int offset = 16; offset > 0; offset >>= 1) mine += shuffle_xor(mine, offset);
      __syncthreads();
      if (lane == 0) s.words[warp] = mine;
      __syncthreads();
      if (is_whole) {
        uint64_t all = 0;
        for (int w = 0; w < WARPS; ++w) all += s.words[w];
        draw = min((uint64_t)(uniform(seeds[r], (uint64_t)counters[r]) * (double)all), all - 1);
      }
      int owner = 0;
      while (owner < WARPS - 1 && draw >= before + s.words[owner]) before += s.words[owner++];
      first += owner * share;
      last = min(first + share, last);
    }
    if (warp == 0) {
      for (int base = first; base < last; base += 32) {
        const int i = base + lane;
        uint64_t up_to = i < last ? weight(i, row[i]) : 0;
        for (int offset = 1; offset < 32; offset <<= 1) {
          const uint64_t other = __shfl_up_sync(0xffffffffu, (unsigned long long)up_to, offset);
          if (lane >= offset) up_to += other;
        }
        const unsigned reached = __ballot_sync(0xffffffffu, before + up_to > draw);
        if (reached) {
          if (lane == 0) s.finished = base + __ffs(reached) - 1;
          break;
        }
        before += __shfl_sync(0xffffffffu, (unsigned long long)up_to, 31);
      }
    }
    __syncthreads();
    token = s.finished;
  }
  if (threadIdx.x == 0) sampled[r] = token;

  if (token >= 0 && num_logprobs[r] >= 0) {
    __syncthreads();
    if (entries > 0) {
      for (uint32_t i = threadIdx.x; i < capacity; i += THREADS) {
        if (table[i].id >= 0) row[table[i].id] = table[i].raw;
      }
      __syncthreads();
    }
    score(s, row, vocab, total, token, num_logprobs[r], logprobs + r, ranks + r, top_ids + r * max_top,
          top_logprobs + r * max_top);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    score_rows(const float* __restrict__ logits, int64_t stride, const RowScan* __restrict__ scans,
               const int* __restrict__ targets, int num_logprobs, float* __restrict__ logprobs, int* __restrict__ ranks,
               int* __restrict__ top_ids, float* __restrict__ top_logprobs, int vocab, int shares, int max_top) {
  release_successor();
  __shared__ Shared s;
  wait_for_predecessor();
  const int r = blockIdx.x;
  const RowTotals total = merge_scans(scans + r * shares, shares);
  score(s, logits + r * stride, vocab, total, targets[r], num_logprobs, logprobs + r, ranks + r, top_ids + r * max_top,
        top_logprobs + r * max_top);
}
