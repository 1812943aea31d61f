// What paged_attention is made of: scores, weights and sums of a tile of up to kKeys keys and a few rows. Included by
// paged_attention_kernel.h. Every number is a sum in one order, however many rows and vectors are computed together.

#include "cpu_common/exp.h"

constexpr int kKeys = 64;

MINDLORA_INLINE int64_t Rounded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// The largest lane, in all lanes.
template <int kHalf = kWidth / 2>
MINDLORA_INLINE Vec Largest(Vec v)
{
    v = Larger(v, __builtin_shuffle(v, EachLane([](int i) { return i ^ kHalf; })));
    if constexpr (kHalf > 1) v = Largest<kHalf / 2>(v);
    return v;
}

// v[i][j] <-> v[j][i], first in squares of four, for which every processor has instructions.
MINDLORA_INLINE void Transpose(Vec (&v)[kWidth])
{
    // Of four lanes from each of two vectors: 0 0 1 1 and 2 2 3 3, then 01 01 and 23 23.
    const Lanes low = EachLane([](int i) { return i / 4 * 4 + i % 4 / 2 + i % 2 * kWidth; }), high = low + 2;
    const Lanes even = EachLane([](int i) { return i / 4 * 4 + i % 2 + i % 4 / 2 * kWidth; }), odd = even + 2;
#pragma GCC unroll 4
    for (int i = 0; i < kWidth; i += 4) {
        const Vec low01 = __builtin_shuffle(v[i], v[i + 1], low), high01 = __builtin_shuffle(v[i], v[i + 1], high);
        const Vec low23 = __builtin_shuffle(v[i + 2], v[i + 3], low);
        const Vec high23 = __builtin_shuffle(v[i + 2], v[i + 3], high);
        v[i] = __builtin_shuffle(low01, low23, even);
        v[i + 1] = __builtin_shuffle(low01, low23, odd);
        v[i + 2] = __builtin_shuffle(high01, high23, even);
        v[i + 3] = __builtin_shuffle(high01, high23, odd);
    }
#pragma GCC unroll 2
    for (int step = 4; step < kWidth; step *= 2) {
        const Lanes first = EachLane([step](int i) { return (i & step) == 0 ? i : i - step + kWidth; });
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) {
            if ((i & step) != 0) continue;
            const Vec a = v[i], b = v[i + step];
            v[i] = __builtin_shuffle(a, b, first);
            v[i + step] = __builtin_shuffle(a, b, first + step);
        }
    }
}

// kt[d * step + i] = key i at d, for the heads of kWidth keys.
template <class T>
MINDLORA_INLINE void PackKeys(const T* const* keys, int64_t size, int64_t step, float* kt)
{
    for (int64_t d = 0; d < size; d += kWidth) {
        Vec square[kWidth];
        if (d + kWidth <= size) {
#pragma GCC unroll 16
            for (int i = 0; i < kWidth; ++i) square[i] = Load(keys[i] + d);
        } else {
#pragma GCC unroll 16
            for (int i = 0; i < kWidth; ++i) square[i] = LoadPart(keys[i] + d, size - d);
        }
        Transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) {
            if (d + i < size) Store(square[i], kt + (d + i) * step);
        }
    }
}

// s[m * kKeys + j] = row m . key j for J vectors of keys; row m has the numbers q[d * M + m].
template <int M, int J>
MINDLORA_INLINE void Scores(const float* q, const float* kt, int64_t size, float* s)
{
    Vec acc[M][J] = {};
    for (int64_t d = 0; d < size; ++d) {
        Vec key[J];
        for (int j = 0; j < J; ++j) key[j] = Load(kt + d * kKeys + j * kWidth);
        for (int m = 0; m < M; ++m) {
            for (int j = 0; j < J; ++j) acc[m][j] += q[d * M + m] * key[j];
        }
    }
    for (int m = 0; m < M; ++m) {
        for (int j = 0; j < J; ++j) Store(acc[m][j], s + m * kKeys + j * kWidth);
    }
}

// Turns the scores of M rows into weights e^(s - largest), where row m sees seen[m] keys of this tile, and scales what
// is known of a row to its new largest score: `pitch` floats, the sums of weights times values first, and at the end
// the largest score and the sum of the weights (online softmax: Milakov and Gimelshein, 2018).
template <int M>
MINDLORA_INLINE void Weigh(float* s, const int64_t* seen, int64_t pitch, float* state)
{
    const int64_t end = Rounded(*std::max_element(seen, seen + M), kWidth);
    Vec largest[M], total[M];
    float most[M];
    for (int m = 0; m < M; ++m) {
        for (int64_t j = std::max<int64_t>(seen[m], 0); j < end; ++j) s[m * kKeys + j] = -INFINITY;
        largest[m] = Load(s + m * kKeys);
    }
    for (int64_t j = kWidth; j < end; j += kWidth) {
        for (int m = 0; m < M; ++m) largest[m] = Larger(largest[m], Load(s + m * kKeys + j));
    }
    for (int m = 0; m < M; ++m) {
        most[m] = std::max(state[m * pitch + pitch - 2], Largest(largest[m])[0]);
        total[m] = Vec{};
    }
    for (int64_t j = 0; j < end; j += kWidth) {
        for (int m = 0; m < M; ++m) {
            const Vec weight = Exp(Load(s + m * kKeys + j) - most[m]);
            Store(weight, s + m * kKeys + j);
            total[m] += weight;
        }
    }
    for (int m = 0; m < M; ++m) {
        if (seen[m] <= 0) continue;
        float* row = state + m * pitch;
        const float factor = Exp(Splat(row[pitch - 2] - most[m]))[0], sum = row[pitch - 1] * factor + Sum(total[m]);
        if (factor != 1) {
            for (int64_t d = 0; d < pitch; d += kWidth) Store(Load(row + d) * factor, row + d);
        }
        row[pitch - 2] = most[m];
        row[pitch - 1] = sum;
    }
}

// J vectors of a row of values; one may reach past the end of the row.
template <int J, class V>
MINDLORA_INLINE void LoadValues(const V* row, int64_t rest, Vec (&value)[J])
{
    if (J == 1) {
        value[0] = LoadUpTo(row, rest);
    } else {
        for (int j = 0; j < J; ++j) value[j] = Load(row + j * kWidth);
    }
}

// Adds weights times values to the sums of M rows, for J vectors of columns. Row m sees seen[m] keys, the last row
// most. Calls `ask` for each cache line of values.
template <int M, int J, class V, class Ask>
MINDLORA_INLINE void AddValues(const float* weights, const V* const* values, int64_t column, int64_t size,
    int64_t pitch, const int64_t* seen, float* state, Ask ask)
{
    Vec acc[M][J];
    for (int m = 0; m < M; ++m) {
        for (int j = 0; j < J; ++j)
            acc[m][j] = LoadUpTo(state + m * pitch + column + j * kWidth, size - column - j * kWidth);
    }
    const int64_t all = std::max<int64_t>(seen[0], 0);
    for (int64_t key = 0; key < all; ++key) {
        Vec value[J];
        LoadValues(values[key] + column, size - column, value);
        for (size_t line = 0; line < J * kWidth * sizeof(V); line += 64) ask();
        for (int m = 0; m < M; ++m) {
            for (int j = 0; j < J; ++j) acc[m][j] += weights[m * kKeys + key] * value[j];
        }
    }
    // Keys that only the later rows see. They are not multiplied by zero, which infinity and NaN would survive.
    for (int64_t key = all; key < seen[M - 1]; ++key) {
        Vec value[J];
        LoadValues(values[key] + column, size - column, value);
        for (int m = 0; m < M; ++m) {
            if (key >= seen[m]) continue;
            for (int j = 0; j < J; ++j) acc[m][j] += weights[m * kKeys + key] * value[j];
        }
    }
    for (int m = 0; m < M; ++m) {
        for (int j = 0; j < J; ++j)
            StoreUpTo(acc[m][j], state + m * pitch + column + j * kWidth, size - column - j * kWidth);
    }
}

// Calls f with constants for the largest register tile of up to `rows` rows.
template <class F>
MINDLORA_INLINE void WithTileRows(int64_t rows, F f)
{
    if (rows >= 6) return f(std::integral_constant<int, 6>());
    if (rows >= 4) return f(std::integral_constant<int, 4>());
    if (rows >= 2) return f(std::integral_constant<int, 2>());
    return f(std::integral_constant<int, 1>());
}

// Calls f with constants for the largest number of vectors up to `count`.
template <class F>
MINDLORA_INLINE void WithVectors(int64_t count, F f)
{
    if (count >= kVectors) return f(std::integral_constant<int, kVectors>());
    if (count >= 2) return f(std::integral_constant<int, 2>());
    return f(std::integral_constant<int, 1>());
}

// The same for all columns.
template <int M, class V, class Ask>
MINDLORA_INLINE void AddAllValues(const float* weights, const V* const* values, int64_t size, int64_t pitch,
    const int64_t* seen, float* state, Ask ask)
{
    for (int64_t column = 0; column < size;) {
        WithVectors((size - column) / kWidth, [&](auto constant) {
            constexpr int J = decltype(constant)::value;
            AddValues<M, J>(weights, values, column, size, pitch, seen, state, ask);
            column += J * kWidth;
        });
    }
}
