// The kernel of lora_linear. Included by for_each_isa.h, once in the namespace of each instruction set.

template <class T>
static void LoraLinear(const T* x, const T* w, const T* a, const T* b, float scale, const T* bias, int64_t tokens,
    int64_t in, int64_t out, int64_t rank, int threads, T* y)
{
    static thread_local std::vector<float> wide_buffer, low_buffer;
    const float* wide = Widened(x, tokens * in, &wide_buffer);
    float* low = Scratch(&low_buffer, tokens * rank);
    for (int64_t t = 0; t < tokens; t += kRows) {
        WithRows(std::min<int64_t>(kRows, tokens - t), [&](auto rows) {
            constexpr int kM = decltype(rows)::value;
            const T* token[kM];
            for (int m = 0; m < kM; ++m) token[m] = x + (t + m) * in;
            Shrink<kM>(token, a, in, in, rank, scale, low + t * rank);
        });
    }

    // A small layer is finished before a second thread wakes up.
    const int64_t chunk = out * in < 1 << 16 ? out : std::max<int64_t>(16, out / (8 * threads) / 16 * 16);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (chunk < out)
    for (int64_t start = 0; start < out; start += chunk) {
        const int64_t end = std::min(out, start + chunk);
        for (int64_t n = start; n < end; n += kVectors) {
            const T *base[kVectors], *expand[kVectors];
            // Past the end the last row is computed again, and the result dropped.
            for (int i = 0; i < kVectors; ++i) {
                base[i] = w + std::min(n + i, end - 1) * in;
                expand[i] = b + std::min(n + i, end - 1) * rank;
            }
            for (int64_t t = 0; t < tokens; t += kRows) {
                WithRows(std::min<int64_t>(kRows, tokens - t), [&](auto rows) {
                    constexpr int kM = decltype(rows)::value;
                    const float *token[kM], *low_rank[kM];
                    for (int m = 0; m < kM; ++m) {
                        token[m] = wide + (t + m) * in;
                        low_rank[m] = low + (t + m) * rank;
                    }
                    // One dot product of [x, low] with [W, B]: the delta costs r more terms and no pass over y.
                    Vec acc[kM][kVectors] = {};
                    Dots<kM, kVectors>(token, base, in, acc);
                    Dots<kM, kVectors>(low_rank, expand, rank, acc);
                    for (int i = 0; i < kVectors && n + i < end; ++i) {
                        const float start_value = bias == nullptr ? 0.0f : ToFloat(bias[n + i]);
                        for (int m = 0; m < kM; ++m) FromFloat(Sum(acc[m][i]) + start_value, y + (t + m) * out + n + i);
                    }
                });
            }
        }
    }
}
