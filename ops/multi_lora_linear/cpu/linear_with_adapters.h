// y = x W^T (+ bias) and the adapters of tokens, for a W of any kind of rows, or several with one x. Included once in
// the namespace of each instruction set.
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

// A call of ShrinkRows: for a product, the first of its `order` and how many, up to kRows tokens of one adapter
// together.
struct ShrinkTask {
    size_t product;
    int64_t start, count;
};

// Columns of the y of a product.
struct RangeTask {
    size_t product;
    int64_t start, end;
};

template <class Product>
static std::vector<ShrinkTask> PlanShrinks(const std::vector<Product>& products)
{
    std::vector<ShrinkTask> tasks;
    for (size_t i = 0; i < products.size(); ++i) {
        const auto& [order, indices] = std::tie(products[i].adapters.order, products[i].adapters.indices);
        const int64_t adapted = static_cast<int64_t>(order.size());
        for (int64_t start = 0, end; start < adapted; start = end) {
            end = start + 1;
            while (end < adapted && end - start < kRows && indices[order[end]] == indices[order[start]]) ++end;
            tasks.push_back({i, start, end - start});
        }
    }
    return tasks;
}

// `columns` are those of all products together.
template <class Product>
static std::vector<RangeTask> PlanRanges(const std::vector<Product>& products, int64_t columns, int threads)
{
    const int64_t step = threads == 1 ? columns : std::max<int64_t>(kSums, columns / (8 * threads) / kSums * kSums);
    std::vector<RangeTask> tasks;
    for (size_t i = 0; i < products.size(); ++i) {
        const int64_t out = products[i].out;
        for (int64_t start = 0; start < out; start += step) tasks.push_back({i, start, std::min(out, start + step)});
    }
    return tasks;
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

// The columns of a task. `low` is that of the product; `wait_for_low` returns when it is complete.
template <class Rows, class Product, class F>
static void OneRange(const Rows& w, const Product& product, const RangeTask& task, const typename Rows::Token* packed,
    int64_t tokens, int64_t in, const float* low, F wait_for_low)
{
    static thread_local std::vector<float> sum_buffer, block_buffer;
    const auto& a = product.adapters;
    const int64_t start = task.start, end = task.end, columns = end - start, stride = in + product.out;
    float* sum = Scratch(&sum_buffer, tokens * columns);
    float* sums = Scratch(&block_buffer, SumsSize(tokens));
    // B's parts of a row are too short for the processor's own prefetching: they are asked for in time.
    const auto ask = [&](int64_t n, int64_t m) { AskForExpands(a, in, n, std::min(m, end), stride); };
    FewTokens(w, packed, tokens, in, start, end, ask, sums, sum);
    if (product.bias != nullptr) AddBias(product.bias + start, tokens, columns, sum);
    wait_for_low();
    for (const int64_t t : a.order) {
        const int32_t i = a.indices[t];
        AddExpand(low + t * a.max_rank, a.pool + i * a.max_rank * stride + in + start, stride, a.ranks[i], columns,
            sum + t * columns);
    }
    WriteColumns(sum, tokens, columns, product.out, product.y + start);
}

template <class Rows, class Product, class T>
static void LinearWithAdapters(const std::vector<Rows>& weights, const std::vector<Product>& products, const T* x,
    int64_t tokens, int64_t in, int threads)
{
    if (tokens == 0) return;
    using Token = typename Rows::Token;
    static thread_local std::vector<float> packed_buffer, low_buffer;
    auto* packed = reinterpret_cast<Token*>(Scratch(&packed_buffer, PackedSize<Token>(tokens, in)));
    int64_t columns = 0, max_rank = 0;
    for (const Product& product : products) {
        columns += product.out;
        max_rank = std::max(max_rank, product.adapters.max_rank);
    }
    // A small layer is finished before a second thread wakes up.
    threads = columns * in < 1 << 16 ? 1 : threads;
    PackTokens<Rows>(x, tokens, in, threads, packed);
    float* low = Scratch(&low_buffer, products.size() * tokens * max_rank);
    const std::vector<ShrinkTask> shrinks = PlanShrinks(products);
    const std::vector<RangeTask> ranges = PlanRanges(products, columns, threads);
    Tasks first(shrinks.size(), threads), then(ranges.size(), threads);
    std::atomic<size_t> shrunk{0};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        for (int64_t task; (task = first.Take(omp_get_thread_num())) >= 0;) {
            const auto [which, start, count] = shrinks[task];
            const auto& a = products[which].adapters;
            const int32_t i = a.indices[a.order[start]];
            const int64_t stride = in + products[which].out;
            ShrinkRows(a.order.data() + start, count, x, a.pool + i * a.max_rank * stride, in, stride, a.ranks[i],
                a.max_rank, a.scales[i], low + which * tokens * max_rank);
            shrunk.fetch_add(1, std::memory_order_release);
        }
        // Every shrink was taken by a thread before a range was, so the wait ends.
        const auto wait_for_low = [&] {
            while (shrunk.load(std::memory_order_acquire) < shrinks.size()) std::this_thread::yield();
        };
        for (int64_t task; (task = then.Take(omp_get_thread_num())) >= 0;) {
            const size_t which = ranges[task].product;
            OneRange(weights[which], products[which], ranges[task], packed, tokens, in, low + which * tokens * max_rank,
                wait_for_low);
        }
    }
}
