// lora_linear for more tokens: they lie in the lanes of panels, and a row of [W, B] is multiplied with a whole panel of
// [x, low] at once. Included by lora_linear_kernel.h.
#include "cpu_common/panels.h"

// Tokens that share one pass over W: their panels stay in the L2 cache at K = 4096.
constexpr int64_t kManyTokens = 64;

// The rows of a matrix in float32, widened into the buffer if they are not.
template <int R>
MINDLORA_INLINE void WideRowsAt(
    const float* matrix, int64_t n, int64_t end, int64_t length, std::vector<float>*, const float* (&rows)[R])
{
    RowsAt(matrix, n, end, length, rows);
}

template <int R, class T>
MINDLORA_INLINE void WideRowsAt(
    const T* matrix, int64_t n, int64_t end, int64_t length, std::vector<float>* buffer, const float* (&rows)[R])
{
    const int64_t count = std::min<int64_t>(R, end - n);
    RowsAt(Widened(matrix + n * length, count * length, buffer), 0, count, length, rows);
}

// V vectors of tokens make a panel, and R rows of a matrix are multiplied with it at a time.
template <int R, int V, class T>
static void LoraLinearOfMany(const T* x, const T* w, const T* a, const T* b, float scale, const T* bias, int64_t tokens,
    int64_t in, int64_t out, int64_t rank, int64_t chunk, int threads, T* y)
{
    constexpr int kLanes = V * kWidth;
    static thread_local std::vector<float> packed_buffer, low_buffer;
    const int64_t panels = (tokens + kLanes - 1) / kLanes, shrinks = (rank + R - 1) / R;
    const auto count = [&](int64_t panel) { return std::min<int64_t>(kLanes, tokens - panel * kLanes); };
    float* packed = Scratch(&packed_buffer, panels * in * kLanes);
    float* low = Scratch(&low_buffer, panels * rank * kLanes);
#pragma omp parallel num_threads(threads) if (chunk < out)
    {
        static thread_local std::vector<float> wide_buffer, expand_buffer, sums_buffer;
        const float *rows[R], *expand[R];
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < panels; ++i)
            Pack<kLanes>(x + i * kLanes * in, count(i), in, in, packed + i * in * kLanes);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < shrinks * panels; ++task) {
            const int64_t i = task % panels, j = task / panels * R;
            WideRowsAt(a, j, rank, in, &wide_buffer, rows);
            Vec acc[R][V] = {};
            AddProducts(rows, packed + i * in * kLanes, in, acc);
            for (int r = 0; r < R && j + r < rank; ++r) {
                for (int v = 0; v < V; ++v) Store(scale * acc[r][v], low + (i * rank + j + r) * kLanes + v * kWidth);
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t start = 0; start < out; start += chunk) {
            const int64_t end = std::min(out, start + chunk), columns = (end - start + R - 1) / R * R;
            float* sums = Scratch(&sums_buffer, panels * columns * kLanes);
            for (int64_t n = start; n < end; n += R) {
                WideRowsAt(w, n, end, in, &wide_buffer, rows);
                WideRowsAt(b, n, end, rank, &expand_buffer, expand);
                for (int64_t i = 0; i < panels; ++i) {
                    Vec acc[R][V] = {};
                    AddProducts(rows, packed + i * in * kLanes, in, acc);
                    AddProducts(expand, low + i * rank * kLanes, rank, acc);
                    float* sum = sums + (i * columns + n - start) * kLanes;
                    for (int r = 0; r < R; ++r) {
                        for (int v = 0; v < V; ++v) Store(acc[r][v], sum + r * kLanes + v * kWidth);
                    }
                }
            }
            for (int64_t i = 0; i < panels; ++i) {
                Unpack<kLanes>(sums + i * columns * kLanes, count(i), end - start,
                    bias == nullptr ? nullptr : bias + start, out, y + i * kLanes * out + start);
            }
        }
    }
}
