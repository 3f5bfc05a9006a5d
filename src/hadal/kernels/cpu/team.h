// Team of threads that runs one function on every member, with cheap barriers inside. Independent of the function.
//
// A tiny model's decode step is about 40 short phases, each a few microseconds of arithmetic. So a barrier must cost
// only a few line transfers between cores (0.3 us measured) when all members run: they spin. With more processes than
// cores, a spin only uses the core that the missing member needs. So a spin ends after kSpinMicroseconds, and the
// member sleeps on the barrier's word (a futex on Linux). If the caller slept for most of a call, one thread would have
// been faster, so the next calls run on the caller alone, for a time that doubles while the cores stay busy (measured
// with both cores busy: 2.4 ms per step became 0.1 ms). Members with a core each (runtime/pinning) spin for longer.
//
// Only time may depend on the number of members: every kernel gives the same bits for one member as for many. Not
// fork-safe: a forked child has the team's memory and none of its threads. Processes must be spawned.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hadal {

constexpr int kSpinMicroseconds =
    50;  // longer than a phase's imbalance on free cores, shorter than a scheduler's slice
constexpr int kPinnedMicroseconds =
    200;  // for members with a core each; about as long as waking one
constexpr int kIdleMicroseconds =
    100;  // between two steps: waking a sleeping member takes 5-50 us

using Clock = std::chrono::steady_clock;

// Waits until `word` is no longer `old`: spins a bounded time, then sleeps. Returns the time slept.
inline Clock::duration wait_change(const std::atomic<uint32_t>& word, uint32_t old, int spin_microseconds) {
    Clock::time_point start{};
    for (int i = 1;; i++) {
        if (word.load(std::memory_order_acquire) != old) return {};
#if defined(__x86_64__)
        _mm_pause();
#endif
        if (i % 64) continue;
        const auto now = Clock::now();
        if (i == 64) start = now;
        if (now - start > std::chrono::microseconds(spin_microseconds)) {
            word.wait(old, std::memory_order_acquire);
            return Clock::now() - now;
        }
    }
}

// The calling thread's id as in proc(5); 0 where threads have none.
inline int64_t thread_id() {
#if defined(__linux__)
    return int64_t(syscall(SYS_gettid));
#else
    return 0;
#endif
}

class Team;

// Member's index and its share of a range.
struct Member {
    Team* team;
    int index;
    int count;
    inline void barrier() const;
    // This member's share of [0, total), borders on multiples of `grain`.
    void share(int total, int grain, int& begin, int& end) const {
        const long units = (total + grain - 1) / grain;
        begin = int(units * index / count) * grain;
        end = int(units * (index + 1) / count) * grain;
        if (end > total) end = total;
        if (begin > total) begin = total;
    }
};

class Team {
  public:
    explicit Team(int count) : count_(count < 1 ? 1 : count), ids_(new std::atomic<int64_t>[size_t(count_)]) {
        for (int i = 1; i < count_; i++) ids_[size_t(i)].store(kNoId);
        for (int i = 1; i < count_; i++) threads_.emplace_back([this, i] { work(i); });
        for (int i = 1; i < count_; i++) ids_[size_t(i)].wait(kNoId);
    }

    ~Team() {
        stop_.store(true);
        epoch_.fetch_add(1);
        epoch_.notify_all();
        for (auto& thread : threads_) thread.join();
        std::free(scratch_);
    }

    int count() const { return count_; }
    // Return the thread id of a member other than the caller, 1 to count() - 1.
    int64_t thread_of(int index) const { return ids_[size_t(index)].load(); }
    std::mutex& mutex() { return mutex_; }
    // Set whether every member has its own core, so that spinning delays no other member.
    void pinned(bool is_pinned) { spin_.store(is_pinned ? kPinnedMicroseconds : kSpinMicroseconds); }

    // Call f(member) on all members; returns when all are done. The caller is member 0 and holds mutex().
    template <class F>
    void run(const F& f) {
        const auto start = Clock::now();
        active_ = start < alone_until_ ? 1 : count_;
        slept_ = {};
        job_ = [](const void* context, const Member& member) { (*static_cast<const F*>(context))(member); };
        context_ = &f;
        if (active_ > 1) {
            epoch_.fetch_add(1);  // seq_cst, as below: notify must not look for sleepers before the new value is seen
            epoch_.notify_all();
        }
        job_(context_, Member{this, 0, active_});
        barrier(0);
        if (active_ > 1) judge(start);
    }

    void barrier(int index) {
        if (active_ == 1) return;
        const uint32_t generation = generation_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
            arrived_.store(0, std::memory_order_relaxed);
            generation_.fetch_add(1);  // seq_cst: notify must not look for sleepers before the new value is visible
            generation_.notify_all();
        } else {
            const auto slept = wait_change(generation_, generation, spin_.load(std::memory_order_relaxed));
            if (index == 0) slept_ += slept;
        }
    }

    // Return memory valid until the next call. It only grows, so repeated calls allocate nothing. Throws bad_alloc.
    void* scratch(size_t bytes) {
        if (bytes > scratch_bytes_) {
            std::free(scratch_);
            scratch_bytes_ = 0;
            scratch_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
            if (!scratch_) throw std::bad_alloc();
            scratch_bytes_ = bytes;
        }
        return scratch_;
    }

  private:
    void work(int index) {
        uint32_t seen = 0;
        ids_[size_t(index)].store(thread_id());
        ids_[size_t(index)].notify_all();
        for (;;) {
            wait_change(epoch_, seen, kIdleMicroseconds);
            seen++;
            if (stop_.load()) return;
            job_(context_, Member{this, index, count_});
            barrier(index);
        }
    }

    // Decide if later calls run alone: alone, the caller would have needed its busy time times the number of members.
    void judge(Clock::time_point start) {
        const auto now = Clock::now();
        if (slept_ > (now - start) - (now - start) / count_) {
            alone_until_ = now + alone_for_;
            alone_for_ = alone_for_ >= kAloneMost ? kAloneMost : 2 * alone_for_;
        } else {
            alone_for_ = kAloneFirst;
        }
    }

    static constexpr Clock::duration kAloneFirst = std::chrono::milliseconds(10);
    static constexpr Clock::duration kAloneMost = std::chrono::milliseconds(640);

    static constexpr int64_t kNoId = -1;

    const int count_;
    const std::unique_ptr<std::atomic<int64_t>[]> ids_;
    int active_ = 1;  // members of the running call
    Clock::time_point alone_until_{};
    Clock::duration alone_for_ = kAloneFirst;
    Clock::duration slept_{};  // caller's sleep in this call
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    void (*job_)(const void*, const Member&) = nullptr;
    const void* context_ = nullptr;
    void* scratch_ = nullptr;
    size_t scratch_bytes_ = 0;
    std::atomic<bool> stop_{false};
    std::atomic<int> spin_{kSpinMicroseconds};
    // Each on its own cache line, because all members write or poll them.
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
};

inline void Member::barrier() const { team->barrier(index); }

// Allocator of pieces of one memory block, each on its own cache lines. With a null base it only counts.
struct Carver {
    char* base = nullptr;
    size_t used = 0;
    template <class T>
    T* take(size_t n) {
        char* at = base + used;
        used += (n * sizeof(T) + 63) / 64 * 64;
        return base ? reinterpret_cast<T*>(at) : nullptr;
    }
};

}  // namespace hadal
