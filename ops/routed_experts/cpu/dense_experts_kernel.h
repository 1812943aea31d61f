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

#include "routed_experts/cpu/routed_experts_kernel.h"
