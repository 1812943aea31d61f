// The kernel of multi_lora_delta. Included by for_each_isa.h, once in the namespace of each instruction set.

// sum[m, :] += low[m, j] * bt[j, :] for J rows of B^T, which lie `stride` apart.
template <int M, int J, class P>
MINDLORA_INLINE void AddRows(const float* low, int64_t rank, const P* bt, int64_t stride, int64_t out, float* sum)
{
    for (int64_t n = 0; n < out; n += kWidth) {
        Vec column[J];
        for (int j = 0; j < J; ++j) column[j] = LoadUpTo(bt + j * stride + n, out - n);
        for (int m = 0; m < M; ++m) {
            Vec acc = LoadUpTo(sum + m * out + n, out - n);
            for (int j = 0; j < J; ++j) acc += low[m * rank + j] * column[j];
            StoreUpTo(acc, sum + m * out + n, out - n);
        }
    }
}

// M rows of one adapter, whose block of the pool starts at `slot`.
template <int M, class T, class P>
static void OneAdapter(const int64_t* rows, const T* y0, const T* x, const P* slot, int64_t rank, float scale,
    int64_t in, int64_t out, T* y)
{
    static thread_local std::vector<float> low_buffer, sum_buffer;
    float* low = Scratch(&low_buffer, M * rank);
    float* sum = Scratch(&sum_buffer, M * out);
    const T* token[M];
    for (int m = 0; m < M; ++m) {
        token[m] = x + rows[m] * in;
        for (int64_t n = 0; n < out; n += kWidth) {
            StoreUpTo(LoadUpTo(y0 + rows[m] * out + n, out - n), sum + m * out + n, out - n);
        }
    }
    const int64_t stride = in + out;
    Shrink<M>(token, slot, stride, in, rank, scale, low);
    constexpr int kTogether = 8;
    int64_t j = 0;
    for (; j + kTogether <= rank; j += kTogether) {
        AddRows<M, kTogether>(low + j, rank, slot + j * stride + in, stride, out, sum);
    }
    for (; j < rank; ++j) AddRows<M, 1>(low + j, rank, slot + j * stride + in, stride, out, sum);
    for (int m = 0; m < M; ++m) {
        for (int64_t n = 0; n < out; n += kWidth) {
            StoreUpTo(LoadUpTo(sum + m * out + n, out - n), y + rows[m] * out + n, out - n);
        }
    }
}

// `order` holds the rows with an adapter, those of one adapter together; the others are copied by the caller.
template <class T, class P>
static void MultiLoraDelta(const T* y0, const T* x, const P* pool, const int32_t* ranks, const float* scales,
    const int32_t* indices, const std::vector<int64_t>& order, int64_t in, int64_t out, int64_t max_rank, int threads,
    T* y)
{
    // Up to kRows rows of one adapter read it together.
    std::vector<std::pair<int64_t, int64_t>> tasks;
    const int64_t count = static_cast<int64_t>(order.size());
    for (int64_t start = 0, end; start < count; start = end) {
        end = start + 1;
        while (end < count && end - start < kRows && indices[order[end]] == indices[order[start]]) ++end;
        tasks.emplace_back(start, end - start);
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (tasks.size() > 1)
    for (size_t i = 0; i < tasks.size(); ++i) {
        const int64_t* rows = order.data() + tasks[i].first;
        const int32_t index = indices[rows[0]];
        WithRows(tasks[i].second, [&](auto constant) {
            OneAdapter<decltype(constant)::value>(
                rows, y0, x, pool + index * max_rank * (in + out), ranks[index], scales[index], in, out, y);
        });
    }
}
