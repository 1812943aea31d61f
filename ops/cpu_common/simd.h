// Vectors of MINDLORA_WIDTH float32, and the two products of which the kernels are made.
// Included by for_each_isa.h, once in the namespace of each instruction set: no include guard, no includes.

#define MINDLORA_INLINE static inline __attribute__((always_inline))
#define MINDLORA_MEMBER inline __attribute__((always_inline))

constexpr int kWidth = MINDLORA_WIDTH;
// The products hold kRows x kVectors accumulators: as many as fit in the registers.
constexpr int kRows = 4;
constexpr int kVectors = kWidth == 16 ? 4 : 2;

typedef float Vec __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Bits __attribute__((vector_size(4 * kWidth)));
typedef int32_t Lanes __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));

MINDLORA_INLINE Vec Load(const float* from)
{
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

MINDLORA_INLINE Vec Load(const bfloat16* from)
{
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return reinterpret_cast<Vec>(__builtin_convertvector(halves, Bits) << 16);
}

MINDLORA_INLINE Vec Load(const float16* from)
{
#if MINDLORA_WIDTH == 16
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif MINDLORA_WIDTH == 8
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__aarch64__)
    float16x4_t halves;
    std::memcpy(&halves, from, sizeof halves);
    return vcvt_f32_f16(halves);
#else
    Vec v;
    for (int i = 0; i < kWidth; ++i) v[i] = ToFloat(from[i]);
    return v;
#endif
}

// kWidth bytes, one in each lane.
MINDLORA_INLINE Lanes LoadCodes(const uint8_t* from)
{
#if MINDLORA_WIDTH == 16
    return reinterpret_cast<Lanes>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif MINDLORA_WIDTH == 8
    return reinterpret_cast<Lanes>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    Lanes codes;
    for (int i = 0; i < kWidth; ++i) codes[i] = from[i];
    return codes;
#endif
}

// The same of signed bytes.
MINDLORA_INLINE Lanes LoadSigned(const uint8_t* from)
{
#if MINDLORA_WIDTH == 16
    return reinterpret_cast<Lanes>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif MINDLORA_WIDTH == 8
    return reinterpret_cast<Lanes>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    Lanes codes;
    for (int i = 0; i < kWidth; ++i) codes[i] = static_cast<int8_t>(from[i]);
    return codes;
#endif
}

MINDLORA_INLINE void Store(Vec v, float* to) { std::memcpy(to, &v, sizeof v); }

MINDLORA_INLINE void Store(Vec v, bfloat16* to)
{
    const Bits bits = reinterpret_cast<Bits>(v);
    const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Halves halves = __builtin_convertvector((v != v) ? ((bits >> 16) | 0x40) : rounded, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

MINDLORA_INLINE void Store(Vec v, float16* to)
{
#if MINDLORA_WIDTH == 16
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif MINDLORA_WIDTH == 8
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    const float16x4_t halves = vcvt_f16_f32(v);
    std::memcpy(to, &halves, sizeof halves);
#else
    for (int i = 0; i < kWidth; ++i) FromFloat(v[i], to + i);
#endif
}

MINDLORA_INLINE Vec RoundedToBfloat16(Vec v)
{
    bfloat16 rounded[kWidth];
    Store(v, rounded);
    return Load(rounded);
}

// The first `count` elements, fewer than kWidth; the other lanes are zero. Nothing after them is read.
template <class T>
MINDLORA_INLINE Vec LoadPart(const T* from, int64_t count)
{
    T whole[kWidth] = {};
    std::memcpy(whole, from, count * sizeof(T));
    return Load(whole);
}

// At small ranks rows of B are shorter than a vector, and a copy through memory would cost more than the product.
#if MINDLORA_WIDTH == 16
MINDLORA_INLINE Vec LoadPart(const float* from, int64_t count)
{
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
}

MINDLORA_INLINE Vec LoadPart(const bfloat16* from, int64_t count)
{
    const __m256i halves = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

MINDLORA_INLINE Vec LoadPart(const float16* from, int64_t count)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), from));
}
#elif MINDLORA_WIDTH == 8
MINDLORA_INLINE Vec LoadPart(const float* from, int64_t count)
{
    const Lanes lane = {0, 1, 2, 3, 4, 5, 6, 7};
    const Lanes mask = lane < static_cast<int32_t>(count);
    return _mm256_maskload_ps(from, reinterpret_cast<__m256i>(mask));
}
#endif

template <class T>
MINDLORA_INLINE void StorePart(Vec v, T* to, int64_t count)
{
    T whole[kWidth];
    Store(v, whole);
    std::memcpy(to, whole, count * sizeof(T));
}

template <class T>
MINDLORA_INLINE Vec LoadUpTo(const T* from, int64_t count)
{
    return count >= kWidth ? Load(from) : LoadPart(from, count);
}

template <class T>
MINDLORA_INLINE void StoreUpTo(Vec v, T* to, int64_t count)
{
    if (count >= kWidth) {
        Store(v, to);
    } else {
        StorePart(v, to, count);
    }
}

// A vector of f(0), f(1), ...: a constant, if all is inlined.
template <class F>
MINDLORA_INLINE Lanes EachLane(F f)
{
    Lanes lanes;
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) lanes[i] = f(i);
    return lanes;
}

template <int kHalf = kWidth / 2>
MINDLORA_INLINE float Sum(Vec v)
{
    v += __builtin_shuffle(v, EachLane([](int i) { return i ^ kHalf; }));
    if constexpr (kHalf > 1) return Sum<kHalf / 2>(v);
    return v[0];
}

// Shrink: acc[m][j] += the products of row x[m] and row w[j], spread over the lanes.
template <int M, int J, class X, class W>
MINDLORA_INLINE void Dots(const X* const* x, const W* const* w, int64_t length, Vec (&acc)[M][J])
{
    int64_t k = 0;
    for (; k + kWidth <= length; k += kWidth) {
        Vec row[J];
        for (int j = 0; j < J; ++j) row[j] = Load(w[j] + k);
        for (int m = 0; m < M; ++m) {
            const Vec token = Load(x[m] + k);
            for (int j = 0; j < J; ++j) acc[m][j] += token * row[j];
        }
    }
    if (k < length) {
        Vec row[J];
        for (int j = 0; j < J; ++j) row[j] = LoadPart(w[j] + k, length - k);
        for (int m = 0; m < M; ++m) {
            const Vec token = LoadPart(x[m] + k, length - k);
            for (int j = 0; j < J; ++j) acc[m][j] += token * row[j];
        }
    }
}

// rows[i] = row n + i of a matrix. Past the end it is the last row again, whose result is computed once more and
// dropped: simpler than a kernel for each remainder.
template <int R, class T>
MINDLORA_INLINE void RowsAt(const T* matrix, int64_t n, int64_t end, int64_t stride, const T* (&rows)[R])
{
    for (int i = 0; i < R; ++i) rows[i] = matrix + std::min(n + i, end - 1) * stride;
}

// Asks for the rows that follow these: rows often begin with a page, before which the processor's own prefetching
// stops.
template <int R, class T>
MINDLORA_INLINE void PrefetchNext(const T* const (&rows)[R], int64_t stride)
{
    for (int i = 0; i < R; ++i) {
        for (int line = 0; line < 4; ++line) __builtin_prefetch(rows[i] + R * stride + line * 64 / sizeof(T));
    }
}

// low[m * rank + j] = scale * x[m] . a[j] for M tokens and the `rank` rows of a, which lie `stride` apart.
template <int M, class T, class P>
MINDLORA_INLINE void Shrink(
    const T* const* x, const P* a, int64_t stride, int64_t length, int64_t rank, float scale, float* low)
{
    // As many chains of sums as hide how long an addition takes.
    constexpr int kStep = kRows * kVectors / M < 8 ? kRows * kVectors / M : 8;
    for (int64_t j = 0; j < rank; j += kStep) {
        const P* rows[kStep];
        RowsAt(a, j, rank, stride, rows);
        PrefetchNext(rows, stride);
        Vec acc[M][kStep] = {};
        Dots<M, kStep>(x, rows, length, acc);
        for (int m = 0; m < M; ++m) {
            for (int i = 0; i < kStep && j + i < rank; ++i) low[m * rank + j + i] = scale * Sum(acc[m][i]);
        }
    }
}

// Expand: sum[n] += low[j] * bt[j, n] for J rows of B^T, which lie `stride` apart.
template <int J, class T>
MINDLORA_INLINE void ExpandRows(const float* low, const T* bt, int64_t stride, int64_t count, float* sum)
{
    for (int64_t n = 0; n < count; n += kWidth) {
        Vec acc = LoadUpTo(sum + n, count - n);
        for (int j = 0; j < J; ++j) acc += low[j] * LoadUpTo(bt + j * stride + n, count - n);
        StoreUpTo(acc, sum + n, count - n);
    }
}

// The same for all `rank` rows.
template <class T>
MINDLORA_INLINE void AddExpand(const float* low, const T* bt, int64_t stride, int64_t rank, int64_t count, float* sum)
{
    constexpr int kTogether = 8;
    int64_t j = 0;
    for (; j + kTogether <= rank; j += kTogether) {
        ExpandRows<kTogether>(low + j, bt + j * stride, stride, count, sum);
    }
    for (; j < rank; ++j) ExpandRows<1>(low + j, bt + j * stride, stride, count, sum);
}

// Calls f with the constant that equals `rows`, 1 to kRows, so that loops over rows unroll.
template <class F>
MINDLORA_INLINE void WithRows(int64_t rows, F f)
{
    switch (rows) {
        case 1: f(std::integral_constant<int, 1>()); break;
        case 2: f(std::integral_constant<int, 2>()); break;
        case 3: f(std::integral_constant<int, 3>()); break;
        default: f(std::integral_constant<int, 4>());
    }
}

// Scratch memory of the calling thread, from the beginning of a cache line on: a vector that crosses one costs twice.
// It only grows: allocating at each call would cost more than a small kernel.
MINDLORA_INLINE float* Scratch(std::vector<float>* buffer, int64_t count)
{
    constexpr int64_t kLine = 64;
    const int64_t needed = count + kLine / sizeof(float);
    if (static_cast<int64_t>(buffer->size()) < needed) buffer->resize(needed);
    const intptr_t start = reinterpret_cast<intptr_t>(buffer->data());
    return reinterpret_cast<float*>((start + kLine - 1) / kLine * kLine);
}

// Rows in float32: in place if they are float32, else converted once, since they are read again for each row of W.
MINDLORA_INLINE const float* Widened(const float* from, int64_t, std::vector<float>*) { return from; }

template <class T>
MINDLORA_INLINE const float* Widened(const T* from, int64_t count, std::vector<float>* buffer)
{
    float* to = Scratch(buffer, count);
    for (int64_t i = 0; i < count; i += kWidth) StoreUpTo(LoadUpTo(from + i, count - i), to + i, count - i);
    return to;
}
