// The kernel of lora_delta. Included by for_each_isa.h, once in the namespace of each instruction set.
#include "cpu_common/panels.h"

constexpr int kPanel = kVectors * kWidth;  // columns of y that are computed together
constexpr int64_t kBlock = 16;             // tokens between shrink and expand: their low-rank rows stay in the L1 cache

// packed[n / kPanel][j][n % kPanel] = b[n][j] in float32, with zeros for n past the end.
template <class T>
static void PackExpand(const T* b, int64_t out, int64_t rank, float* packed)
{
    for (int64_t n = 0; n < out; n += kPanel, packed += rank * kPanel) {
        for (int64_t j = 0; j < rank; j += kWidth) {
            for (int c = 0; c < kPanel; c += kWidth) {
                Vec square[kWidth];
                for (int i = 0; i < kWidth; ++i) {
                    const int64_t row = n + c + i;
                    square[i] = row < out ? LoadUpTo(b + row * rank + j, rank - j) : Vec{};
                }
                Transpose(square);
                const int64_t count = std::min<int64_t>(kWidth, rank - j);
                for (int64_t i = 0; i < count; ++i) Store(square[i], packed + (j + i) * kPanel + c);
            }
        }
    }
}

// y[m, :] = y0[m, :] + low[m, :] times the packed B, for M tokens.
template <int M, class T>
MINDLORA_INLINE void Expand(const float* low, const float* packed, int64_t out, int64_t rank, const T* y0, T* y)
{
    for (int64_t n = 0; n < out; n += kPanel, packed += rank * kPanel) {
        Vec acc[M][kVectors];
        for (int m = 0; m < M; ++m) {
            for (int v = 0; v < kVectors; ++v) {
                const int64_t at = n + v * kWidth;
                acc[m][v] = at < out ? LoadUpTo(y0 + m * out + at, out - at) : Vec{};
            }
        }
        for (int64_t j = 0; j < rank; ++j) {
            Vec column[kVectors];
            for (int v = 0; v < kVectors; ++v) column[v] = Load(packed + j * kPanel + v * kWidth);
            for (int m = 0; m < M; ++m) {
                for (int v = 0; v < kVectors; ++v) acc[m][v] += low[m * rank + j] * column[v];
            }
        }
        for (int m = 0; m < M; ++m) {
            for (int v = 0; v < kVectors; ++v) {
                const int64_t at = n + v * kWidth;
                if (at < out) StoreUpTo(acc[m][v], y + m * out + at, out - at);
            }
        }
    }
}

template <class T>
static void LoraDelta(const T* y0, const T* x, const T* a, const T* b, float scale, int64_t tokens, int64_t in,
    int64_t out, int64_t rank, int threads, T* y)
{
    // Every chunk packs B by itself: at 64 tokens that is a twentieth of its work, and no thread waits for another.
    const int64_t chunk = std::min<int64_t>(64, (((tokens + threads - 1) / threads) + kBlock - 1) / kBlock * kBlock);
    const int64_t chunks = chunk == 0 ? 0 : (tokens + chunk - 1) / chunk;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (chunks > 1)
    for (int64_t i = 0; i < chunks; ++i) {
        static thread_local std::vector<float> packed_buffer, low_buffer;
        float* packed = Scratch(&packed_buffer, (out + kPanel - 1) / kPanel * kPanel * rank);
        float* low = Scratch(&low_buffer, kBlock * rank);
        PackExpand(b, out, rank, packed);
        const int64_t end = std::min(tokens, (i + 1) * chunk);
        for (int64_t block = i * chunk; block < end; block += kBlock) {
            const int64_t block_end = std::min(end, block + kBlock);
            for (int64_t t = block; t < block_end; t += kRows) {
                WithRows(std::min<int64_t>(kRows, block_end - t), [&](auto rows) {
                    constexpr int kM = decltype(rows)::value;
                    const T* token[kM];
                    for (int m = 0; m < kM; ++m) token[m] = x + (t + m) * in;
                    Shrink<kM>(token, a, in, in, rank, scale, low + (t - block) * rank);
                });
            }
            for (int64_t t = block; t < block_end; t += kRows) {
                WithRows(std::min<int64_t>(kRows, block_end - t), [&](auto rows) {
                    Expand<decltype(rows)::value>(
                        low + (t - block) * rank, packed, out, rank, y0 + t * out, y + t * out);
                });
            }
        }
    }
}
