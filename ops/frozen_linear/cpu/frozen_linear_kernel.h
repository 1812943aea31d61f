// The kernels of frozen_linear. Included by for_each_isa.h, once in the namespace of each instruction set.
//
// Both products are y[t][c] = the sum over d of x[t][d] M[d][c], where M is W^T in the forward and W in the gradient.
// A part of M is packed into the cache, once for up to kTokens tokens, and x once for all parts: as words of 32 bits,
// each a number in float32, or two numbers in bfloat16 that follow each other along d.
#include "cpu_common/panels.h"

constexpr int64_t kTokens = 512;
// Words along d and columns of a part of M: with the sums of its columns it fills an L2 cache of 1 MB.
constexpr int64_t kDepth = 256, kSpan = 256;
// Tokens and columns of one micro kernel, whose sums fill half of the registers.
constexpr int kTile = kWidth == 16 ? 8 : 4, kColumns = 2 * kWidth;

// W [rows, columns], of which the kernels read a part.
template <class W>
struct Frozen {
    const W* weight;
    int64_t rows, columns;
};

// Words that are numbers in float32; what x is rounded to, if it is, is still multiplied in float32.
template <bool kRounds>
struct Numbers {
    static constexpr int64_t kEach = 1;

    MINDLORA_MEMBER static Vec MultiplyAdd(Vec sum, const float* word, Vec words) { return sum + *word * words; }

    // to[d] = x[d], and zero from `length` up to `words`.
    MINDLORA_MEMBER static void PackToken(const float* x, int64_t length, int64_t words, float* to)
    {
        for (int64_t d = 0; d < words; d += kWidth) {
            const Vec v = d < length ? LoadUpTo(x + d, length - d) : Vec{};
            Store(kRounds ? RoundedToBfloat16(v) : v, to + d);
        }
    }

    // kWidth numbers of a row of W from `column` on; zero where there is none.
    template <class W>
    MINDLORA_MEMBER static Vec Words(const Frozen<W>& w, int64_t row, int64_t column)
    {
        if (row >= w.rows || column >= w.columns) return Vec{};
        return LoadUpTo(w.weight + row * w.columns + column, w.columns - column);
    }

    // The words of kWidth columns of M = W.
    template <class W>
    MINDLORA_MEMBER static Vec Across(const Frozen<W>& w, int64_t row, int64_t column)
    {
        return Words(w, row, column);
    }
};

#if MINDLORA_BFLOAT16_DOTS
// Words that are pairs in bfloat16.
struct Pairs {
    static constexpr int64_t kEach = 2;

    MINDLORA_MEMBER static Vec MultiplyAdd(Vec sum, const float* word, Vec words)
    {
        int32_t pair;
        std::memcpy(&pair, word, sizeof pair);
        return _mm512_dpbf16_ps(
            sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)), reinterpret_cast<__m512bh>(words));
    }

    MINDLORA_MEMBER static void PackToken(const float* x, int64_t length, int64_t words, float* to)
    {
        auto* pairs = reinterpret_cast<bfloat16*>(to);
        for (int64_t d = 0; d < words * kEach; d += kWidth) {
            Store(d < length ? LoadUpTo(x + d, length - d) : Vec{}, pairs + d);
        }
    }

    MINDLORA_MEMBER static Vec Words(const Frozen<bfloat16>& w, int64_t row, int64_t column)
    {
        Vec words = {};
        if (row < w.rows && column < w.columns) {
            const int64_t count = std::min(w.columns - column, kEach * kWidth);
            std::memcpy(&words, w.weight + row * w.columns + column, count * sizeof(bfloat16));
        }
        return words;
    }

    // Pairs of numbers of two rows, one below the other.
    MINDLORA_MEMBER static Vec Across(const Frozen<bfloat16>& w, int64_t row, int64_t column)
    {
        // A number of bfloat16 is the upper half of one of float32.
        const auto first = reinterpret_cast<Bits>(Numbers<false>::Words(w, row, column));
        const auto second = reinterpret_cast<Bits>(Numbers<false>::Words(w, row + 1, column));
        return reinterpret_cast<Vec>(first >> 16 | second);
    }
};

template <bool kRounds>
using WordsFor = std::conditional_t<kRounds, Pairs, Numbers<false>>;
#else
template <bool kRounds>
using WordsFor = Numbers<kRounds>;
#endif

// `depth` words of `columns` columns of M, from word `first` and column `start` on: to[group][word][lane].
template <bool kBackward, class Words, class W>
static void PackWeight(const Frozen<W>& w, int64_t first, int64_t depth, int64_t start, int64_t columns, float* to)
{
    for (int64_t c = 0; c < columns; c += kWidth, to += depth * kWidth) {
        if (kBackward) {
            for (int64_t p = 0; p < depth; ++p) {
                Store(Words::Across(w, (first + p) * Words::kEach, start + c), to + p * kWidth);
            }
            continue;
        }
        for (int64_t p = 0; p < depth; p += kWidth) {
            Vec rows[kWidth];
            for (int i = 0; i < kWidth; ++i) rows[i] = Words::Words(w, start + c + i, (first + p) * Words::kEach);
            Transpose(rows);
            for (int i = 0; i < kWidth; ++i) Store(rows[i], to + (p + i) * kWidth);
        }
    }
}

// sums[i][c] += the products of kTile tokens, `stride` words apart, and kColumns columns; rows of sums are kSpan apart.
template <class Words>
static __attribute__((noinline)) void MultiplyTile(
    const float* tokens, int64_t stride, const float* weight, int64_t depth, float* sums)
{
    Vec acc[kTile][2];
    for (int i = 0; i < kTile; ++i) {
        for (int v = 0; v < 2; ++v) acc[i][v] = Load(sums + i * kSpan + v * kWidth);
    }
    for (int64_t p = 0; p < depth; ++p) {
        const Vec words[2] = {Load(weight + p * kWidth), Load(weight + (depth + p) * kWidth)};
        for (int i = 0; i < kTile; ++i) {
            for (int v = 0; v < 2; ++v) acc[i][v] = Words::MultiplyAdd(acc[i][v], tokens + i * stride + p, words[v]);
        }
    }
    for (int i = 0; i < kTile; ++i) {
        for (int v = 0; v < 2; ++v) Store(acc[i][v], sums + i * kSpan + v * kWidth);
    }
}

#if MINDLORA_BFLOAT16_DOTS && MINDLORA_HAS_AMX
#define MINDLORA_TILES 1
// Tokens and columns that the processor's eight tiles multiply together: four hold sums.
constexpr int kTogether = 32;

// Eight tiles of 16 rows of 64 bytes, as the processor reads it. Not a local variable: GCC 12 takes the instruction to
// read eight bytes of it, and leaves the others out.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
extern const TileShapes kTileShapes;
const TileShapes kTileShapes;

__attribute__((target("amx-tile"))) static void BeginTiles() { _tile_loadconfig(&kTileShapes); }

__attribute__((target("amx-tile"))) static void EndTiles() { _tile_release(); }

// As MultiplyTile, for kTogether tokens and columns.
__attribute__((target("amx-tile,amx-bf16"), noinline)) static void MultiplyTiles(
    const float* tokens, int64_t stride, const float* weight, int64_t depth, float* sums)
{
    constexpr int64_t kSide = 16, kSumsStride = kSpan * sizeof(float), kWordsStride = kSide * sizeof(float);
    float* below = sums + kSide * kSpan;
    _tile_loadd(0, sums, kSumsStride);
    _tile_loadd(1, sums + kSide, kSumsStride);
    _tile_loadd(2, below, kSumsStride);
    _tile_loadd(3, below + kSide, kSumsStride);
    for (int64_t p = 0; p < depth; p += kSide) {
        _tile_loadd(4, tokens + p, stride * sizeof(float));
        _tile_loadd(5, tokens + kSide * stride + p, stride * sizeof(float));
        _tile_loadd(6, weight + p * kSide, kWordsStride);
        _tile_loadd(7, weight + (depth + p) * kSide, kWordsStride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, kSumsStride);
    _tile_stored(1, sums + kSide, kSumsStride);
    _tile_stored(2, below, kSumsStride);
    _tile_stored(3, below + kSide, kSumsStride);
}
#else
#define MINDLORA_TILES 0
#endif

MINDLORA_INLINE int64_t RoundedUp(int64_t count, int64_t multiple)
{
    return (count + multiple - 1) / multiple * multiple;
}

// y = x W^T for so many tokens, at most kTokens, or x W where kBackward.
template <bool kBackward, class Words, class W>
static void MultiplyTokens(const float* x, const Frozen<W>& w, int64_t tokens, int threads, float* y)
{
    static thread_local std::vector<float> packed_buffer;
    const int64_t in = kBackward ? w.rows : w.columns, out = kBackward ? w.columns : w.rows;
#if MINDLORA_TILES
    const bool tiles = std::is_same_v<Words, Pairs> && ::mindlora::CurrentIsa() == kAmxBf16;
    const int64_t together = tiles ? kTogether : kTile;
#else
    const int64_t together = kTile;
#endif
    const int64_t words = RoundedUp(in, kWidth * Words::kEach) / Words::kEach, rows = RoundedUp(tokens, together);
    float* packed = Scratch(&packed_buffer, rows * words);
    // A part for each thread even where there are few columns.
    const int64_t span = std::min(kSpan, RoundedUp((out + threads - 1) / threads, kColumns));
#pragma omp parallel num_threads(threads)
    {
        static thread_local std::vector<float> weight_buffer, sums_buffer;
        float* weight = Scratch(&weight_buffer, kDepth * kSpan);
        float* sums = Scratch(&sums_buffer, rows * kSpan);
#if MINDLORA_TILES
        if (tiles) BeginTiles();
#endif
#pragma omp for
        for (int64_t i = 0; i < rows; ++i) {
            Words::PackToken(x + i * in, i < tokens ? in : 0, words, packed + i * words);
        }
#pragma omp for schedule(dynamic)
        for (int64_t start = 0; start < out; start += span) {
            const int64_t columns = std::min(span, out - start), padded = RoundedUp(columns, kColumns);
            std::fill(sums, sums + rows * kSpan, 0.0f);
            for (int64_t p = 0; p < words; p += kDepth) {
                const int64_t depth = std::min(kDepth, words - p);
                PackWeight<kBackward, Words>(w, p, depth, start, padded, weight);
                for (int64_t c = 0; c < padded; c += kColumns) {
                    for (int64_t i = 0; i < rows; i += together) {
                        const float *x_words = packed + i * words + p, *w_words = weight + c * depth;
                        float* to = sums + i * kSpan + c;
#if MINDLORA_TILES
                        if (tiles) {
                            MultiplyTiles(x_words, words, w_words, depth, to);
                            continue;
                        }
#endif
                        MultiplyTile<Words>(x_words, words, w_words, depth, to);
                    }
                }
            }
            for (int64_t i = 0; i < tokens; ++i) {
                std::copy_n(sums + i * kSpan, columns, y + i * out + start);
            }
        }
#if MINDLORA_TILES
        if (tiles) EndTiles();
#endif
    }
}

template <bool kBackward, class Words, class W>
static void Multiply(const float* x, const Frozen<W>& w, int64_t tokens, int threads, float* y)
{
    // A small product is finished before a second thread wakes up.
    threads = tokens * w.rows * w.columns < 1 << 18 ? 1 : threads;
    const int64_t in = kBackward ? w.rows : w.columns, out = kBackward ? w.columns : w.rows;
    for (int64_t t = 0; t < tokens; t += kTokens) {
        MultiplyTokens<kBackward, Words>(x + t * in, w, std::min(kTokens, tokens - t), threads, y + t * out);
    }
}

// y = x W^T, or dx = dy W where `backward`. Where it `rounds`, which W in bfloat16 alone does, x is rounded to
// bfloat16.
template <class W>
static void FrozenProduct(bool backward, bool rounds, const float* x, const W* weight, int64_t tokens, int64_t rows,
    int64_t columns, int threads, float* y)
{
    const Frozen<W> w{weight, rows, columns};
    if constexpr (std::is_same_v<W, bfloat16>) {
        if (rounds && backward) return Multiply<true, WordsFor<true>>(x, w, tokens, threads, y);
        if (rounds) return Multiply<false, WordsFor<true>>(x, w, tokens, threads, y);
    }
    if (backward) return Multiply<true, WordsFor<false>>(x, w, tokens, threads, y);
    Multiply<false, WordsFor<false>>(x, w, tokens, threads, y);
}
#undef MINDLORA_TILES
