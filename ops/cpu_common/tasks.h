// Tasks of several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace mindlora {

// The tasks 0 to count - 1. Each thread takes its own share in order, so that what it reads is one stream, and then
// what the others have left.
class Tasks {
public:
    Tasks(int64_t count, int threads) : count_(count), threads_(threads), next_(threads)
    {
        for (int i = 0; i < threads; ++i) next_[i] = First(i);
    }

    // Returns a task that nobody has taken, or -1.
    int64_t Take(int thread)
    {
        for (int i = 0; i < threads_; ++i) {
            const int from = (thread + i) % threads_;
            const int64_t task = next_[from].fetch_add(1, std::memory_order_relaxed);
            if (task < First(from + 1)) return task;
        }
        return -1;
    }

private:
    int64_t First(int thread) const { return count_ * thread / threads_; }

    const int64_t count_;
    const int threads_;
    std::vector<std::atomic<int64_t>> next_;
};

}  // namespace mindlora
