// The threads that run kernels, and the executor of programs.
//
// A program is a flat list of 64-bit words: for each node the address of its kernel, the number of arguments,
// and the arguments. All threads walk through it together.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>

#include "cpu/runtime.h"

namespace pega {

namespace {

struct Left {};  // thrown through a kernel when another thread has failed

using Kernel = void (*)(const int64_t* args, Context& ctx);

// Between programs and in an unequal phase a thread first spins, then lets others run, then sleeps. Sleeping
// early matters when the machine is shared: an idle core takes over a thread that waits behind a neighbour.
constexpr auto patience = std::chrono::microseconds(100);

void* allocate(size_t bytes) {
    constexpr size_t huge_page = size_t{2} << 20;
    const size_t alignment = bytes >= huge_page ? huge_page : static_cast<size_t>(cache_line);
    bytes = (bytes + alignment - 1) / alignment * alignment;
    void* memory = std::aligned_alloc(alignment, bytes);
    if (memory == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (alignment == huge_page) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return memory;
}

}  // namespace

class Pool {
  public:
    explicit Pool(int num_threads) : ranges_(static_cast<size_t>(num_threads)) {
        team_.ranges = ranges_.data();
        team_.pool = this;
        for (int thread = 0; thread < num_threads; thread++) {
            contexts_.push_back(std::make_unique<Context>(thread, num_threads, team_));
        }
        // Signals are for the thread that runs Python.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (int thread = 1; thread < num_threads; thread++) {
                threads_.emplace_back([this, thread] { work(*contexts_[static_cast<size_t>(thread)]); });
                char name[24];
                std::snprintf(name, sizeof name, "pega-cpu-%d", thread);
#if defined(__linux__)
                pthread_setname_np(threads_.back().native_handle(), name);
#endif
            }
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            stop();
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    ~Pool() {
        stop();
        for (auto& context : contexts_) std::free(context->scratch_);
        std::free(shared_scratch_.load());
    }

    bool run(const int64_t* words, int64_t num_nodes, char* error, size_t error_bytes) {
        if (num_nodes <= 0) return true;
        std::lock_guard<std::mutex> one_at_a_time(run_mutex_);
        words_ = words;
        num_nodes_ = num_nodes;
        failed_ = false;
        publish();
        execute(*contexts_[0]);
        if (!failed_) return true;
        std::snprintf(error, error_bytes, "%s", message_);
        return false;
    }

    void* shared_scratch(size_t bytes) {
        if (shared_scratch_bytes_.load(std::memory_order_acquire) < bytes) {
            std::lock_guard<std::mutex> lock(scratch_mutex_);
            if (shared_scratch_bytes_.load(std::memory_order_relaxed) < bytes) {
                std::free(shared_scratch_.load());
                shared_scratch_.store(nullptr);
                shared_scratch_bytes_.store(0);
                shared_scratch_.store(allocate(bytes));
                shared_scratch_bytes_.store(bytes, std::memory_order_release);
            }
        }
        return shared_scratch_.load(std::memory_order_relaxed);
    }

    // Wait until `ready()`, which somebody makes true before calling `wake`.
    template <typename Ready>
    void wait(Ready ready, std::atomic<uint32_t>& sleepers) {
        const auto start = std::chrono::steady_clock::now();
        while (std::chrono::steady_clock::now() - start < patience) {
            for (int i = 0; i < 20; i++) {
                if (ready()) return;
                relax();
            }
            sched_yield();
        }
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, ready);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }

    void wake() {
        { std::lock_guard<std::mutex> lock(sleep_mutex_); }
        wake_.notify_all();
    }

  private:
    void publish() {
        program_.fetch_add(1, std::memory_order_seq_cst);
        if (idle_.load(std::memory_order_seq_cst)) wake();
    }

    void stop() {
        stopping_.store(true);
        publish();
        for (auto& thread : threads_) thread.join();
        threads_.clear();
    }

    void work(Context& ctx) {
        for (uint32_t done = 0;; done++) {
            for (int spins = 0; program_.load(std::memory_order_acquire) == done; spins++) {
                if (spins == Context::spin_limit) {
                    wait([&] { return program_.load(std::memory_order_seq_cst) != done; }, idle_);
                    break;
                }
                relax();
            }
            if (stopping_.load()) return;
            execute(ctx);
        }
    }

    void execute(Context& ctx) {
        const int64_t* words = words_;
        try {
            for (int64_t node = num_nodes_; node > 0; node--) {
                reinterpret_cast<Kernel>(words[0])(words + 2, ctx);
                words += 2 + words[1];
                ctx.barrier();
            }
        } catch (const Left&) {
        } catch (const std::exception& problem) {
            leave_failed(ctx, problem.what());
        } catch (...) {
            leave_failed(ctx, "a kernel threw something unknown");
        }
    }

    void leave_failed(Context& ctx, const char* message) {
        {
            std::lock_guard<std::mutex> lock(scratch_mutex_);
            if (!failed_) std::snprintf(message_, sizeof message_, "%s", message);
            failed_ = true;
            team_.failure.store(uint64_t{1} << 32 | ctx.phase_, std::memory_order_relaxed);
        }
        try {
            ctx.barrier();  // where the other threads learn of it
        } catch (const Left&) {
        }
    }

    Team team_;
    std::vector<PhaseCounter> ranges_;
    std::vector<std::unique_ptr<Context>> contexts_;
    std::vector<std::thread> threads_;

    alignas(cache_line) std::atomic<uint32_t> program_{0};  // number of the program that is to be run
    std::atomic<uint32_t> idle_{0};
    std::atomic<bool> stopping_{false};
    const int64_t* words_ = nullptr;
    int64_t num_nodes_ = 0;

    std::mutex run_mutex_, sleep_mutex_, scratch_mutex_;
    std::condition_variable wake_;
    std::atomic<void*> shared_scratch_{nullptr};
    std::atomic<size_t> shared_scratch_bytes_{0};
    bool failed_ = false;
    char message_[512] = "";
};

void* Context::scratch(size_t bytes) {
    if (bytes > scratch_bytes_) {
        std::free(scratch_);
        scratch_ = nullptr;
        scratch_bytes_ = 0;
        scratch_ = allocate(bytes);
        scratch_bytes_ = bytes;
    }
    return scratch_;
}

void* Context::shared_scratch(size_t bytes) { return team_.pool->shared_scratch(bytes); }

void Context::fail(const char* message) { throw std::runtime_error(message); }

void Context::wait(uint32_t next) {
    team_.pool->wait([&] { return team_.phase.load(std::memory_order_seq_cst) == next; }, team_.sleepers);
}

void Context::wake() { team_.pool->wake(); }

void Context::leave() {
    phase_++;
    throw Left{};
}

}  // namespace pega

PEGA_EXPORT pega::Pool* pega_pool_create(int32_t num_threads, char* error, size_t error_bytes) {
    try {
        return new pega::Pool(num_threads);
    } catch (const std::exception& problem) {
        std::snprintf(error, error_bytes, "%s", problem.what());
        return nullptr;
    }
}

PEGA_EXPORT void pega_pool_destroy(pega::Pool* pool) { delete pool; }

// Run a program to its end; 0, or 1 with a message in `error`.
PEGA_EXPORT int32_t pega_run(pega::Pool* pool, const int64_t* words, int64_t num_nodes, char* error, size_t error_bytes) {
    return pool->run(words, num_nodes, error, error_bytes) ? 0 : 1;
}

// Kernels without a purpose of their own: for measuring the pool and for testing it.
PEGA_KERNEL(pega_nothing) {
    (void)args;
    (void)ctx;
}

// args: thread that fails (-1: none)
PEGA_KERNEL(pega_fail) {
    if (ctx.thread == args[0]) ctx.fail("a kernel failed because it was asked to");
    ctx.barrier();
}
