// The kernels of rms_norm. Included by for_each_isa.h, once in the namespace of each instruction set.

// Few rows are finished before a second thread wakes up.
constexpr int64_t kAlone = 1 << 17;

// 1 / sqrt(mean(x^2) + eps) of a row.
template <class T>
MINDLORA_INLINE float Factor(const T* row, float eps, int64_t width)
{
    Vec squares = {};
    for (int64_t i = 0; i < width; i += kWidth) {
        const Vec v = LoadUpTo(row + i, width - i);
        squares += v * v;
    }
    return 1.0f / std::sqrt(Sum(squares) / static_cast<float>(width) + eps);
}

template <class T>
static void RmsNorm(const T* x, const T* weight, float eps, int64_t rows, int64_t width, int threads, T* y)
{
#pragma omp parallel for num_threads(threads) if (rows * width > kAlone)
    for (int64_t row = 0; row < rows; ++row) {
        const T* from = x + row * width;
        const float factor = Factor(from, eps, width);
        for (int64_t i = 0; i < width; i += kWidth) {
            const Vec v = LoadUpTo(from + i, width - i) * factor * LoadUpTo(weight + i, width - i);
            StoreUpTo(v, y + row * width + i, width - i);
        }
    }
}

template <class T>
static void RmsNormGrad(
    const T* dy, const T* x, const T* weight, float eps, int64_t rows, int64_t width, int threads, T* dx)
{
#pragma omp parallel for num_threads(threads) if (rows * width > kAlone)
    for (int64_t row = 0; row < rows; ++row) {
        const T *of_y = dy + row * width, *from = x + row * width;
        const float factor = Factor(from, eps, width);
        Vec products = {};
        for (int64_t i = 0; i < width; i += kWidth) {
            const int64_t count = width - i;
            products += LoadUpTo(of_y + i, count) * LoadUpTo(weight + i, count) * LoadUpTo(from + i, count);
        }
        const float mean = Sum(products) / static_cast<float>(width) * factor * factor;
        for (int64_t i = 0; i < width; i += kWidth) {
            const int64_t count = width - i;
            const Vec scaled = LoadUpTo(of_y + i, count) * LoadUpTo(weight + i, count);
            StoreUpTo((scaled - LoadUpTo(from + i, count) * mean) * factor, dx + row * width + i, count);
        }
    }
}

// Threads take columns, so that each sum has one order.
template <class T>
static void RmsNormWeightGrad(const T* dy, const T* x, float eps, int64_t rows, int64_t width, int threads, T* dweight)
{
    std::vector<float> factors(rows);
#pragma omp parallel num_threads(threads) if (rows * width > kAlone)
    {
#pragma omp for
        for (int64_t row = 0; row < rows; ++row) factors[row] = Factor(x + row * width, eps, width);
#pragma omp for
        for (int64_t i = 0; i < width; i += kWidth) {
            Vec sum = {};
            for (int64_t row = 0; row < rows; ++row) {
                const int64_t at = row * width + i;
                sum += LoadUpTo(dy + at, width - i) * (LoadUpTo(x + at, width - i) * factors[row]);
            }
            StoreUpTo(sum, dweight + i, width - i);
        }
    }
}
