// y = x W^T (+ bias) and the adapters of tokens, for a W of any kind of rows. Included once in the namespace of each
// instruction set.
#include "cpu_common/few_tokens.h"

// The rows of `order` from first on, `count` of one adapter: low[t, :] = (x[t] A^T) * scale.
template <class T, class P>
static void ShrinkRows(const int64_t* order, int64_t count, const T* x, const P* slot, int64_t in, int64_t stride,
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

// The calls of ShrinkRows: the first of `order` and how many, up to kRows tokens of one adapter together.
using Shrinks = std::vector<std::pair<int64_t, int64_t>>;

MINDLORA_INLINE Shrinks PlanShrinks(const std::vector<int64_t>& order, const int32_t* indices)
{
    Shrinks shrinks;
    const int64_t adapted = static_cast<int64_t>(order.size());
    for (int64_t start = 0, end; start < adapted; start = end) {
        end = start + 1;
        while (end < adapted && end - start < kRows && indices[order[end]] == indices[order[start]]) ++end;
        shrinks.emplace_back(start, end - start);
    }
    return shrinks;
}

// Asks for the columns [n, m) of the B of each adapter, whose rows have x's `in` numbers before them.
template <class P>
MINDLORA_INLINE void AskForExpands(const Adapters<P>& a, int64_t in, int64_t n, int64_t m, int64_t stride)
{
    constexpr int64_t kLine = 64 / sizeof(P);
    int32_t last = -1;
    for (const int64_t t : a.order) {
        const int32_t i = a.indices[t];
        if (i == last) continue;
        last = i;
        const P* slot = a.pool + i * a.max_rank * stride + in;
        for (int64_t j = 0; j < a.ranks[i]; ++j) {
            for (int64_t at = n; at < m; at += kLine) __builtin_prefetch(slot + j * stride + at, 0, 2);
        }
    }
}

template <class Rows, class T, class P>
static void LinearWithAdapters(const Rows& w, const T* x, const Adapters<P>& adapters, const T* bias, int64_t tokens,
    int64_t in, int64_t out, int threads, T* y)
{
    if (out == 0 || tokens == 0) return;
    using Token = typename Rows::Token;
    static thread_local std::vector<float> packed_buffer, low_buffer;
    auto* packed = reinterpret_cast<Token*>(Scratch(&packed_buffer, PackedSize<Token>(tokens, in)));
    const auto& [pool, max_rank, ranks, scales, indices, order] = adapters;
    float* low = Scratch(&low_buffer, tokens * max_rank);
    const Shrinks shrinks = PlanShrinks(order, indices);
    const int64_t stride = in + out, slot_size = max_rank * stride;
    // A small layer is finished before a second thread wakes up.
    threads = out * in < 1 << 16 ? 1 : threads;
    PackTokens<Rows>(x, tokens, in, threads, packed);
    const int64_t range = threads == 1 ? out : std::max<int64_t>(kSums, out / (8 * threads) / kSums * kSums);
    Tasks first(shrinks.size(), threads), ranges((out + range - 1) / range, threads);
    std::atomic<size_t> shrunk{0};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        static thread_local std::vector<float> sum_buffer, block_buffer;
        for (int64_t task; (task = first.Take(omp_get_thread_num())) >= 0;) {
            const auto [start, count] = shrinks[task];
            const int32_t i = indices[order[start]];
            ShrinkRows(
                order.data() + start, count, x, pool + i * slot_size, in, stride, ranks[i], max_rank, scales[i], low);
            shrunk.fetch_add(1, std::memory_order_release);
        }
        for (int64_t task; (task = ranges.Take(omp_get_thread_num())) >= 0;) {
            const int64_t start = task * range, end = std::min(out, start + range), columns = end - start;
            float* sum = Scratch(&sum_buffer, tokens * columns);
            float* sums = Scratch(&block_buffer, SumsSize(tokens));
            // B's parts of a row are too short for the processor's own prefetching: they are asked for in time.
            const auto ask = [&](int64_t n, int64_t m) { AskForExpands(adapters, in, n, std::min(m, end), stride); };
            FewTokens(w, packed, tokens, in, start, end, ask, sums, sum);
            if (bias != nullptr) AddBias(bias + start, tokens, columns, sum);
            // Every shrink was taken by a thread before this task was, so this ends.
            while (shrunk.load(std::memory_order_acquire) < shrinks.size()) std::this_thread::yield();
            for (const int64_t t : order) {
                const int32_t i = indices[t];
                AddExpand(low + t * max_rank, pool + i * slot_size + in + start, stride, ranks[i], columns,
                    sum + t * columns);
            }
            WriteColumns(sum, tokens, columns, out, y + start);
        }
    }
}
