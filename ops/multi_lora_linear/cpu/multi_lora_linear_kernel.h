// The kernel of multi_lora_linear. Included by for_each_isa.h, once in the namespace of each instruction set.

// Columns start to end of y, for all tokens: x W^T + bias into `sum` [tokens, end - start].
template <class T, class W>
static void BaseColumns(
    const float* wide, const W* w, const T* bias, int64_t tokens, int64_t in, int64_t start, int64_t end, float* sum)
{
    const int64_t columns = end - start;
    for (int64_t n = start; n < end; n += kVectors) {
        const W* rows[kVectors];
        RowsAt(w, n, end, in, rows);
        PrefetchNext(rows, in);
        for (int64_t t = 0; t < tokens; t += kRows) {
            WithRows(std::min<int64_t>(kRows, tokens - t), [&](auto constant) {
                constexpr int kM = decltype(constant)::value;
                const float* token[kM];
                for (int m = 0; m < kM; ++m) token[m] = wide + (t + m) * in;
                Vec acc[kM][kVectors] = {};
                Dots<kM, kVectors>(token, rows, in, acc);
                for (int i = 0; i < kVectors && n + i < end; ++i) {
                    const float begin = bias == nullptr ? 0.0f : ToFloat(bias[n + i]);
                    for (int m = 0; m < kM; ++m) sum[(t + m) * columns + n + i - start] = Sum(acc[m][i]) + begin;
                }
            });
        }
    }
}

// The rows of `order` from first on, `count` of one adapter: low[t, :] = (x[t] A^T) * scale.
template <class T>
static void ShrinkRows(const int64_t* order, int64_t count, const T* x, const T* slot, int64_t in, int64_t stride,
    int64_t rank, int64_t max_rank, float scale, float* low)
{
    WithRows(count, [&](auto constant) {
        constexpr int kM = decltype(constant)::value;
        float result[kM * 256];
        const T* token[kM];
        for (int m = 0; m < kM; ++m) token[m] = x + order[m] * in;
        Shrink<kM>(token, slot, stride, in, rank, scale, result);
        for (int m = 0; m < kM; ++m) std::memcpy(low + order[m] * max_rank, result + m * rank, rank * sizeof(float));
    });
}

// `order` holds the tokens with an adapter, those of one adapter together.
template <class T, class W>
static void MultiLoraLinear(const T* x, const W* w, const T* pool, const int32_t* ranks, const float* scales,
    const int32_t* indices, const T* bias, const std::vector<int64_t>& order, int64_t tokens, int64_t in, int64_t out,
    int64_t max_rank, int threads, T* y)
{
    if (out == 0) return;
    static thread_local std::vector<float> wide_buffer, low_buffer;
    const float* wide = Widened(x, tokens * in, &wide_buffer);
    float* low = Scratch(&low_buffer, tokens * max_rank);
    const int64_t stride = in + out;
    // Up to kRows tokens of one adapter read it together.
    std::vector<std::pair<int64_t, int64_t>> shrinks;
    const int64_t adapted = static_cast<int64_t>(order.size());
    for (int64_t start = 0, end; start < adapted; start = end) {
        end = start + 1;
        while (end < adapted && end - start < kRows && indices[order[end]] == indices[order[start]]) ++end;
        shrinks.emplace_back(start, end - start);
    }
    const int64_t shrink_count = static_cast<int64_t>(shrinks.size());
    // A small layer is finished before a second thread wakes up.
    const bool alone = threads == 1 || out * in < 1 << 16;
    const int64_t range = alone ? out : std::max<int64_t>(16, out / (8 * threads) / 16 * 16);
    const int64_t tasks = shrink_count + (out + range - 1) / range;
    std::atomic<int64_t> next{0}, shrunk{0};
#pragma omp parallel num_threads(threads) if (!alone)
    {
        static thread_local std::vector<float> sum_buffer;
        for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
            if (task < shrink_count) {
                const int64_t* rows = order.data() + shrinks[task].first;
                const int32_t i = indices[rows[0]];
                ShrinkRows(rows, shrinks[task].second, x, pool + i * max_rank * stride, in, stride, ranks[i], max_rank,
                    scales[i], low);
                shrunk.fetch_add(1, std::memory_order_release);
                continue;
            }
            const int64_t start = (task - shrink_count) * range, end = std::min(out, start + range);
            const int64_t columns = end - start;
            float* sum = Scratch(&sum_buffer, tokens * columns);
            BaseColumns(wide, w, bias, tokens, in, start, end, sum);
            // Every shrink was taken by a thread before this task was, so this ends.
            while (shrunk.load(std::memory_order_acquire) < shrink_count) std::this_thread::yield();
            for (const int64_t t : order) {
                const int32_t i = indices[t];
                const T* bt = pool + i * max_rank * stride + in + start;
                AddExpand(low + t * max_rank, bt, stride, ranks[i], columns, sum + t * columns);
            }
            for (int64_t t = 0; t < tokens; ++t) {
                for (int64_t n = 0; n < columns; n += kWidth) {
                    StoreUpTo(LoadUpTo(sum + t * columns + n, columns - n), y + t * out + start + n, columns - n);
                }
            }
        }
    }
}
