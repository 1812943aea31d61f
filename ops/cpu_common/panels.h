// Panels: tokens side by side in the lanes of vectors, so that a weight is multiplied with kLanes of them at once.
// Included by kernels, once in the namespace of each instruction set: no include guard.

template <int kStep>
MINDLORA_INLINE void Exchange(Vec (&rows)[kWidth])
{
    Lanes low, high;
    for (int i = 0; i < kWidth; ++i) {
        low[i] = i & kStep ? kWidth + i - kStep : i;
        high[i] = i & kStep ? kWidth + i : i + kStep;
    }
    for (int i = 0; i < kWidth; ++i) {
        if (i & kStep) continue;
        const Vec first = rows[i], second = rows[i + kStep];
        rows[i] = __builtin_shuffle(first, second, low);
        rows[i + kStep] = __builtin_shuffle(first, second, high);
    }
}

// Transposes a square of kWidth rows: each round exchanges what lies off the diagonal of squares of twice the size.
MINDLORA_INLINE void Transpose(Vec (&rows)[kWidth])
{
    Exchange<1>(rows);
    Exchange<2>(rows);
#if MINDLORA_WIDTH >= 8
    Exchange<4>(rows);
#endif
#if MINDLORA_WIDTH == 16
    Exchange<8>(rows);
#endif
}

// panel[p][lane] = from[lane][p] for `count` rows of `length`; the other lanes, and the rest to `padded`, are zero.
template <int kLanes, class T>
MINDLORA_INLINE void Pack(const T* from, int64_t count, int64_t length, int64_t padded, float* panel)
{
    for (int64_t p = 0; p < length; p += kWidth) {
        const int64_t rest = std::min<int64_t>(kWidth, length - p);
        for (int lane = 0; lane < kLanes; lane += kWidth) {
            Vec rows[kWidth] = {};
            for (int i = 0; i < kWidth && lane + i < count; ++i)
                rows[i] = LoadUpTo(from + (lane + i) * length + p, rest);
            Transpose(rows);
            for (int64_t i = 0; i < rest; ++i) Store(rows[i], panel + (p + i) * kLanes + lane);
        }
    }
    std::fill(panel + length * kLanes, panel + padded * kLanes, 0.0f);
}

// to[lane][i] = sums[i][lane] (+ bias[i]) for `count` lanes and i to `length`.
template <int kLanes, class T>
MINDLORA_INLINE void Unpack(const float* sums, int64_t count, int64_t length, const T* bias, int64_t stride, T* to)
{
    for (int64_t p = 0; p < length; p += kWidth) {
        const int64_t rest = std::min<int64_t>(kWidth, length - p);
        const Vec start = bias == nullptr ? Vec{} : LoadUpTo(bias + p, rest);
        for (int lane = 0; lane < kLanes; lane += kWidth) {
            Vec rows[kWidth];
            for (int64_t i = 0; i < kWidth; ++i) rows[i] = Load(sums + std::min(p + i, length - 1) * kLanes + lane);
            Transpose(rows);
            for (int i = 0; i < kWidth && lane + i < count; ++i) {
                StoreUpTo(rows[i] + start, to + (lane + i) * stride + p, rest);
            }
        }
    }
}

// acc[i][v] += rows[i][p * kColumn] * panel[p][v], summed over p: R rows of a weight times a panel of V vectors.
template <int kColumn = 1, int R, int V>
MINDLORA_INLINE void AddProducts(const float* const (&rows)[R], const float* panel, int64_t depth, Vec (&acc)[R][V])
{
    for (int64_t p = 0; p < depth; ++p, panel += V * kWidth) {
        Vec tokens[V];
        for (int v = 0; v < V; ++v) tokens[v] = Load(panel + v * kWidth);
        for (int i = 0; i < R; ++i) {
            for (int v = 0; v < V; ++v) acc[i][v] += rows[i][p * kColumn] * tokens[v];
        }
    }
}
