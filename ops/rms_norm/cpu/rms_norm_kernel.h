// The kernel of rms_norm. Included by for_each_isa.h, once in the namespace of each instruction set.

template <class T>
static void RmsNorm(const T* x, const T* weight, float eps, int64_t rows, int64_t width, int threads, T* y)
{
    // Few rows are finished before a second thread wakes up.
#pragma omp parallel for num_threads(threads) if (rows * width > 1 << 17)
    for (int64_t row = 0; row < rows; ++row) {
        const T* from = x + row * width;
        Vec squares = {};
        for (int64_t i = 0; i < width; i += kWidth) {
            const Vec v = LoadUpTo(from + i, width - i);
            squares += v * v;
        }
        const float factor = 1.0f / std::sqrt(Sum(squares) / static_cast<float>(width) + eps);
        for (int64_t i = 0; i < width; i += kWidth) {
            const Vec v = LoadUpTo(from + i, width - i) * factor * LoadUpTo(weight + i, width - i);
            StoreUpTo(v, y + row * width + i, width - i);
        }
    }
}
