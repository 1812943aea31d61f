// The product of routed_experts with weights in float. Included by for_each_isa.h, once for each instruction set.

// out[t][n - start] = token[t] . row n of an expert's matrix, for rows start to end of it and `count` tokens.
template <class W>
static void ExpertProduct(const DenseExperts<W>& all, int64_t expert, const float* const* token, int64_t count,
    int64_t start, int64_t end, float* const* out)
{
    const W* w = all.data + expert * all.out * all.in;
    for (int64_t n = start; n < end; n += kVectors) {
        const W* rows[kVectors];
        RowsAt(w, n, end, all.in, rows);
        PrefetchNext(rows, all.in);
        for (int64_t t = 0; t < count; t += kRows) {
            WithRows(std::min<int64_t>(kRows, count - t), [&](auto constant) {
                constexpr int kM = decltype(constant)::value;
                Vec acc[kM][kVectors] = {};
                Dots<kM, kVectors>(token + t, rows, all.in, acc);
                for (int i = 0; i < kVectors && n + i < end; ++i) {
                    for (int m = 0; m < kM; ++m) out[t + m][n + i - start] = Sum(acc[m][i]);
                }
            });
        }
    }
}

// The same for kVectors vectors of columns of a transposed matrix from `n` on; of the last ones some are past `end`.
template <bool kWhole, class W>
static void ProductOfColumns(const TransposedExperts<W>& all, int64_t expert, const float* const* token, int64_t count,
    int64_t n, int64_t start, int64_t end, float* const* out)
{
    const W* w = all.data + expert * all.in * all.out;
    for (int64_t t = 0; t < count; t += kRows) {
        WithRows(std::min<int64_t>(kRows, count - t), [&](auto constant) {
            constexpr int kM = decltype(constant)::value;
            Vec acc[kM][kVectors] = {};
            for (int64_t i = 0; i < all.in; ++i) {
                const W* row = w + i * all.out;
                // The rows are too far from each other for the processor's own prefetching.
                __builtin_prefetch(row + 8 * all.out + n);
                for (int v = 0; v < kVectors; ++v) {
                    const int64_t at = n + v * kWidth;
                    if (!kWhole && at >= end) continue;
                    const Vec columns = kWhole ? Load(row + at) : LoadUpTo(row + at, end - at);
                    for (int m = 0; m < kM; ++m) acc[m][v] += token[t + m][i] * columns;
                }
            }
            for (int v = 0; v < kVectors; ++v) {
                const int64_t at = n + v * kWidth;
                if (at >= end) continue;
                for (int m = 0; m < kM; ++m) StoreUpTo(acc[m][v], out[t + m] + at - start, end - at);
            }
        });
    }
}

template <class W>
static void ExpertProduct(const TransposedExperts<W>& all, int64_t expert, const float* const* token, int64_t count,
    int64_t start, int64_t end, float* const* out)
{
    int64_t n = start;
    for (; n + kVectors * kWidth <= end; n += kVectors * kWidth) {
        ProductOfColumns<true>(all, expert, token, count, n, start, end, out);
    }
    if (n < end) ProductOfColumns<false>(all, expert, token, count, n, start, end, out);
}

#include "routed_experts/cpu/routed_experts_kernel.h"
