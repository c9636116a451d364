// What a CPU kernel is and what it is given.
//
// A kernel is run by every thread of the pool at once, with the same arguments. It shares out its work with
// `parallel` (or `next_chunk`) and separates the phases of its work with `barrier`. When the last thread has
// left a kernel, the next one of the program starts; nothing else orders memory between threads.
//
//     PEGA_KERNEL(pega_add) {
//         const float* x = pega::pointer<const float>(args[0]);
//         float* out = pega::pointer<float>(args[1]);
//         ctx.parallel(args[2], 4096, [&](int64_t begin, int64_t end) {
//             for (int64_t i = begin; i < end; i++) out[i] += x[i];
//         });
//     }
//
// The result of a row must never depend on how many rows or threads share a call: an output element is
// accumulated by one thread in one fixed order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PEGA_EXPORT extern "C" __attribute__((visibility("default")))
#define PEGA_INLINE inline __attribute__((always_inline))
#define PEGA_RESTRICT __restrict__
#define PEGA_KERNEL(name) PEGA_EXPORT void name(const int64_t* args, pega::Context& ctx)

namespace pega {

constexpr int64_t cache_line = 64;

// Arguments are 64-bit words: addresses and integers as they are, reals as the bits of a double.
template <typename T>
PEGA_INLINE T* pointer(int64_t word) {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(word));
}

PEGA_INLINE double real(int64_t word) {
    double value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

PEGA_INLINE void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

class Pool;

// A count within one phase: the phase is kept beside it, so that nobody has to reset it.
struct alignas(cache_line) PhaseCounter {
    std::atomic<uint64_t> value{0};

    PEGA_INLINE uint32_t take(uint32_t phase) {
        uint64_t seen = value.load(std::memory_order_relaxed);
        for (;;) {
            const uint64_t fresh = static_cast<uint64_t>(phase) << 32;
            const uint64_t current = (seen >> 32) == phase ? seen : fresh;
            if (value.compare_exchange_weak(seen, current + 1, std::memory_order_relaxed)) {
                return static_cast<uint32_t>(current);
            }
        }
    }

    // Like `take`, but does not write once `limit` chunks were taken.
    PEGA_INLINE uint32_t take_below(uint32_t phase, uint32_t limit) {
        const uint64_t seen = value.load(std::memory_order_relaxed);
        if ((seen >> 32) == phase && static_cast<uint32_t>(seen) >= limit) return limit;
        return take(phase);
    }
};

// What the threads of a pool share. Kernels see it through their `Context` only.
struct Team {
    alignas(cache_line) std::atomic<uint32_t> arrived{0};
    alignas(cache_line) std::atomic<uint32_t> phase{0};
    std::atomic<uint32_t> sleepers{0};
    std::atomic<uint64_t> failure{0};  // 2^32 + the phase in which a kernel failed last
    PhaseCounter chunks;
    PhaseCounter* ranges = nullptr;  // [num_threads]
    Pool* pool = nullptr;
};

class alignas(cache_line) Context {
  public:
    const int thread;       // 0 <= thread < num_threads
    const int num_threads;

    Context(int thread_index, int thread_count, Team& shared)
        : thread(thread_index), num_threads(thread_count), team_(shared) {}
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    // Wait until every thread is here. Every thread must call it equally often. What was written before it
    // is visible to all threads after it; chunk counters start again from 0.
    PEGA_INLINE void barrier() {
        if (num_threads > 1) {
            const uint32_t next = phase_ + 1;
            if (team_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(num_threads)) {
                team_.arrived.store(0, std::memory_order_relaxed);
                team_.phase.store(next, std::memory_order_seq_cst);
                if (team_.sleepers.load(std::memory_order_seq_cst)) wake();
            } else {
                int spins = 0;
                while (team_.phase.load(std::memory_order_acquire) != next) {
                    if (++spins == spin_limit) {
                        wait(next);
                        break;
                    }
                    relax();
                }
            }
        }
        if (team_.failure.load(std::memory_order_relaxed) == (uint64_t{1} << 32 | phase_)) leave();
        phase_++;
    }

    // The next number 0, 1, 2, ... of this phase that no other thread got.
    PEGA_INLINE int64_t next_chunk() { return team_.chunks.take(phase_); }

    // Call `body(begin, end)` for pieces of at most `grain` that together make [0, total), shared between the
    // threads: each works through a contiguous range of its own and then helps the others. At most one call
    // in a phase. Does not wait for the other threads.
    template <typename Body>
    PEGA_INLINE void parallel(int64_t total, int64_t grain, Body&& body) {
        if (total <= 0) return;
        const int64_t pieces = (total + grain - 1) / grain;
        if (num_threads == 1 || pieces == 1) {
            if (thread == 0) {
                for (int64_t begin = 0; begin < total; begin += grain) {
                    body(begin, begin + grain < total ? begin + grain : total);
                }
            }
            return;
        }
        for (int step = 0; step < num_threads; step++) {
            const int owner = thread + step < num_threads ? thread + step : thread + step - num_threads;
            const int64_t first = pieces * owner / num_threads;
            const int64_t count = pieces * (owner + 1) / num_threads - first;
            for (;;) {
                const int64_t taken = team_.ranges[owner].take_below(phase_, static_cast<uint32_t>(count));
                if (taken >= count) break;
                const int64_t begin = (first + taken) * grain;
                body(begin, begin + grain < total ? begin + grain : total);
            }
        }
    }

    // Memory of this thread (64-byte aligned, uninitialised) until the kernel returns; a second call in the
    // same kernel gives the same memory again.
    void* scratch(size_t bytes);

    // Memory that all threads see at the same address until the kernel returns. Every thread must ask for the
    // same size, once.
    void* shared_scratch(size_t bytes);

    // End the program with an error. The other threads leave at their next barrier.
    [[noreturn]] void fail(const char* message);

  private:
    friend class Pool;
    static constexpr int spin_limit = 1000;  // a few microseconds to some tens of them

    void wait(uint32_t next);
    void wake();
    [[noreturn]] void leave();

    Team& team_;
    uint32_t phase_ = 0;
    void* scratch_ = nullptr;
    size_t scratch_bytes_ = 0;
};

}  // namespace pega
