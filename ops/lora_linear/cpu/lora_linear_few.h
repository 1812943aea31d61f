// lora_linear for 1 to 4 tokens, where W arrives from memory more slowly than it is multiplied.
// Included by lora_linear_kernel.h.

constexpr int64_t kFewTokens = 4;

// Rows of a weight that are read at a time: as many as keep the memory busy and hide how long an addition takes.
template <int M>
constexpr int kRowsTogether = M == 1 ? 8 : 4;

// low[m, j] = scale * x[m] . a[j] for the rows j of A from start to end.
template <int M, class T>
MINDLORA_INLINE void ShrinkTile(
    const T* const (&x)[M], const T* a, float scale, int64_t in, int64_t rank, int64_t start, int64_t end, float* low)
{
    float result[M * kRowsTogether<M>];
    const int64_t count = end - start;
    Shrink<M>(x, a + start * in, in, in, count, scale, result);
    for (int m = 0; m < M; ++m) std::memcpy(low + m * rank + start, result + m * count, count * sizeof(float));
}

// y[m, n] = [x[m], low[m]] . [W[n], B[n]] (+ bias[n]) for n from start to end: the delta costs r more terms and no pass
// over y. `wait_for_low` returns when low is complete.
template <int M, class T, class F>
MINDLORA_INLINE void FewColumns(const float* const (&x)[M], const float* const (&low)[M], const T* w, const T* b,
    const T* bias, int64_t in, int64_t out, int64_t rank, int64_t start, int64_t end, T* y, F wait_for_low)
{
    constexpr int kTogether = kRowsTogether<M>;
    for (int64_t n = start; n < end; n += kTogether) {
        const T *base[kTogether], *expand[kTogether];
        RowsAt(w, n, end, in, base);
        RowsAt(b, n, end, rank, expand);
        PrefetchNext(base, in);
        Vec acc[M][kTogether] = {};
        Dots<M, kTogether>(x, base, in, acc);
        wait_for_low();
        Dots<M, kTogether>(low, expand, rank, acc);
        for (int i = 0; i < kTogether && n + i < end; ++i) {
            const float begin = bias == nullptr ? 0.0f : ToFloat(bias[n + i]);
            for (int m = 0; m < M; ++m) FromFloat(Sum(acc[m][i]) + begin, y + m * out + n + i);
        }
    }
}

template <int M, class T>
static void LoraLinearOfFew(const T* x, const T* w, const T* a, const T* b, float scale, const T* bias, int64_t in,
    int64_t out, int64_t rank, int64_t chunk, int threads, T* y)
{
    constexpr int kTogether = kRowsTogether<M>;
    static thread_local std::vector<float> wide_buffer, low_buffer;
    const float* wide = Widened(x, M * in, &wide_buffer);
    float* low_rows = Scratch(&low_buffer, M * rank);
    const T* narrow[M];
    const float *token[M], *low[M];
    for (int m = 0; m < M; ++m) {
        narrow[m] = x + m * in;
        token[m] = wide + m * in;
        low[m] = low_rows + m * rank;
    }
    // The tasks in turn: the rows of A, then those of W. A thread that has its products with W by then waits for low.
    const int64_t shrinks = (rank + kTogether - 1) / kTogether, tasks = shrinks + (out + chunk - 1) / chunk;
    std::atomic<int64_t> next{0}, shrunk{0};
#pragma omp parallel num_threads(threads) if (chunk < out)
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
        if (task < shrinks) {
            const int64_t start = task * kTogether;
            ShrinkTile(narrow, a, scale, in, rank, start, std::min(rank, start + kTogether), low_rows);
            shrunk.fetch_add(1, std::memory_order_release);
            continue;
        }
        const int64_t start = (task - shrinks) * chunk;
        // Every shrink was taken by a thread before this task was, so the wait ends.
        FewColumns(token, low, w, b, bias, in, out, rank, start, std::min(out, start + chunk), y, [&] {
            while (shrunk.load(std::memory_order_acquire) < shrinks) std::this_thread::yield();
        });
    }
}
