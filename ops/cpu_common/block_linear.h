// y = x W^T (+ bias) and dx = dy W for a W in few bits, which is decoded where it is multiplied, block by block.
// Included by kernels, once in the namespace of each instruction set: no include guard.
//
// A block is kPadded numbers of a row, 64. A format of W is a class with Weight, which has codes and the blocks of a
// row; kBytes, those of a block; Part, by what its codes are decoded; Read, the parts of blocks of a row; Ask, which
// prefetches them; and Each, which calls f(i, v) with each vector v of a block's numbers and the place i of its first.
#include "cpu_common/few_tokens.h"
#include "cpu_common/panels.h"

// Few tokens: every weight is decoded in registers and used there.

constexpr int64_t kFewTokens = 8;

// Rows of the weight, as FewTokens takes them.
template <class Format>
struct BlockRows {
    using Token = float;
    static constexpr bool kDecoded = false;
    static constexpr int64_t kBytes = Format::kBytes;

    const typename Format::Weight& weight;
    int64_t count;

    template <class T>
    MINDLORA_MEMBER static void Pack(const T* x, int64_t length, float* to)
    {
        PlainRows<float>::Pack(x, length, to);
    }

    MINDLORA_MEMBER int64_t Row(int64_t row) const { return std::min(row, count - 1); }
    MINDLORA_MEMBER const uint8_t* At(int64_t row) const { return weight.codes + Row(row) * weight.blocks * kBytes; }

    // acc[m][j] += the products of M tokens and row first + j, for `depth` numbers from `from` on. Past the last row it
    // is computed again, and dropped by the caller.
    template <int M, int J, class Ask>
    MINDLORA_MEMBER void Add(
        const float* x, int64_t first, int64_t from, int64_t depth, Vec (&acc)[M][J], Ask ask) const
    {
        constexpr int64_t kBlocks = kDeep<float> / kPadded;
        const int64_t end = (from + depth + kPadded - 1) / kPadded;
        for (int64_t start = from / kPadded; start < end; start += kBlocks, x += kDeep<float>) {
            const int64_t blocks = std::min(kBlocks, end - start);
            const uint8_t* codes[J];
            typename Format::Part parts[J][kBlocks];
            for (int j = 0; j < J; ++j) {
                codes[j] = At(first + j) + start * kBytes;
                Format::Read(weight, Row(first + j), start, blocks, parts[j]);
                Format::Ask(weight, Row(first + J + j), start);
            }
            for (int64_t b = 0; b < blocks; ++b) {
                ask(J * kBytes);
                for (int j = 0; j < J; ++j) AddBlock<M, J>(x + b * kPadded, codes[j] + b * kBytes, parts[j][b], j, acc);
            }
        }
    }

    template <int M, int J>
    MINDLORA_MEMBER static void AddBlock(
        const float* x, const uint8_t* codes, const typename Format::Part& part, int j, Vec (&acc)[M][J])
    {
        Format::Each(codes, part, [&](int i, Vec numbers) {
            for (int m = 0; m < M; ++m) acc[m][j] += Load(x + m * kDeep<float> + i) * numbers;
        });
    }
};

template <class Format, class T>
static void LinearOfFew(const T* x, const typename Format::Weight& w, const T* bias, int64_t tokens, int64_t in,
    int64_t out, int threads, T* y)
{
    static thread_local std::vector<float> packed_buffer;
    float* packed = Scratch(&packed_buffer, PackedSize<float>(tokens, in));
    const BlockRows<Format> rows{w, out};
    // A small layer is finished before a second thread wakes up.
    threads = out * in < 1 << 17 ? 1 : threads;
    PackTokens<BlockRows<Format>>(x, tokens, in, threads, packed);
    const int64_t range = threads == 1 ? out : std::max<int64_t>(kSums, out / (8 * threads) / kSums * kSums);
    Tasks ranges((out + range - 1) / range, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        static thread_local std::vector<float> sum_buffer, block_buffer;
        for (int64_t task; (task = ranges.Take(omp_get_thread_num())) >= 0;) {
            const int64_t start = task * range, end = std::min(out, start + range), columns = end - start;
            float* sum = Scratch(&sum_buffer, tokens * columns);
            float* sums = Scratch(&block_buffer, SumsSize(tokens));
            FewTokens(rows, packed, tokens, in, start, end, [](int64_t, int64_t) {}, sums, sum);
            if (bias != nullptr) AddBias(bias + start, tokens, columns, sum);
            WriteColumns(sum, tokens, columns, out, y + start);
        }
    }
}

// Many tokens: tiles of the weight are decoded into the cache and multiplied there, with tokens in the lanes.

// Weights of a tile along the summed and along the other dimension, and tokens that are multiplied with it: the tile,
// its sums and a part of a panel fill an L2 cache of 1 MB.
constexpr int64_t kDepth = 256, kSpan = 256, kTokens = 512;
// Rows of the weight in one micro kernel: with two vectors of tokens the sums fill half of the registers.
constexpr int kTile = kWidth == 16 ? 8 : 4;

// sums[i][lane] += w[i][p] * panel[p][lane] for kTile rows i, with w[i][p] at i * kRow + p * kColumn.
template <int kVectors, int kRow, int kColumn>
static __attribute__((noinline)) void MultiplyTile(const float* w, const float* panel, int64_t depth, float* sums)
{
    constexpr int kLanes = kVectors * kWidth;
    Vec acc[kTile][kVectors];
    for (int i = 0; i < kTile; ++i) {
        for (int v = 0; v < kVectors; ++v) acc[i][v] = Load(sums + i * kLanes + v * kWidth);
    }
    const float* rows[kTile];
    for (int i = 0; i < kTile; ++i) rows[i] = w + i * kRow;
    AddProducts<kColumn>(rows, panel, depth, acc);
    for (int i = 0; i < kTile; ++i) {
        for (int v = 0; v < kVectors; ++v) Store(acc[i][v], sums + i * kLanes + v * kWidth);
    }
}

// Rows [row, row + rows) and blocks [block, block + blocks) of the weight in float32, rows `stride` apart.
template <class Format>
MINDLORA_INLINE void DecodeTile(const typename Format::Weight& w, int64_t row, int64_t rows, int64_t block,
    int64_t blocks, int64_t stride, float* to)
{
    for (int64_t i = 0; i < rows; ++i) {
        typename Format::Part parts[kSpan / kPadded];
        Format::Read(w, row + i, block, blocks, parts);
        for (int64_t b = 0; b < blocks; ++b) {
            float* numbers = to + i * stride + b * kPadded;
            Format::Each(w.codes + ((row + i) * w.blocks + block + b) * Format::kBytes, parts[b],
                [&](int place, Vec v) { Store(v, numbers + place); });
        }
    }
}

// y = x W^T (+ bias), or the first `out` columns of x W where kBackward: then x is dy.
template <class Format, bool kBackward, int kVectors, class T>
static void MultiplyMany(const T* x, const typename Format::Weight& w, const T* bias, int64_t tokens, int64_t in,
    int64_t out, int threads, T* y)
{
    constexpr int kLanes = kVectors * kWidth;
    // A power of two would put the column of a tile, which the backward reads, into few sets of the L1 cache.
    constexpr int64_t kStride = kBackward ? kSpan + 16 : kDepth;
    constexpr int kRow = kBackward ? 1 : kStride, kColumn = kBackward ? kStride : 1;
    static thread_local std::vector<float> buffer;
    const int64_t panels = (tokens + kLanes - 1) / kLanes;
    const int64_t padded = kBackward ? in : w.blocks * kPadded;
    float* packed = Scratch(&buffer, panels * padded * kLanes);
#pragma omp parallel num_threads(threads)
    {
        static thread_local std::vector<float> tile_buffer, sums_buffer;
        float* tile = Scratch(&tile_buffer, std::max(kSpan * kDepth, kDepth * kStride));
        float* sums = Scratch(&sums_buffer, panels * kSpan * kLanes);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < panels; ++i) {
            Pack<kLanes>(x + i * kLanes * in, std::min<int64_t>(kLanes, tokens - i * kLanes), in, padded,
                packed + i * padded * kLanes);
        }
#pragma omp for schedule(dynamic)
        for (int64_t start = 0; start < out; start += kSpan) {
            const int64_t span = std::min(kSpan, out - start), whole = (span + kTile - 1) / kTile * kTile;
            std::fill(sums, sums + panels * whole * kLanes, 0.0f);
            for (int64_t p = 0; p < padded; p += kDepth) {
                const int64_t depth = std::min(kDepth, padded - p);
                if (kBackward) {
                    DecodeTile<Format>(w, p, depth, start / kPadded, (span + kPadded - 1) / kPadded, kStride, tile);
                } else {
                    DecodeTile<Format>(w, start, span, p / kPadded, depth / kPadded, kStride, tile);
                }
                for (int64_t i = 0; i < panels; ++i) {
                    for (int64_t j = 0; j < whole; j += kTile) {
                        MultiplyTile<kVectors, kRow, kColumn>(tile + j * kRow, packed + (i * padded + p) * kLanes,
                            depth, sums + (i * whole + j) * kLanes);
                    }
                }
            }
            for (int64_t i = 0; i < panels; ++i) {
                Unpack<kLanes>(sums + i * whole * kLanes, std::min<int64_t>(kLanes, tokens - i * kLanes), span,
                    bias == nullptr ? nullptr : bias + start, out, y + i * kLanes * out + start);
            }
        }
    }
}

template <class Format, bool kBackward, class T>
static void Multiply(const T* x, const typename Format::Weight& w, const T* bias, int64_t tokens, int64_t in,
    int64_t out, int threads, T* y)
{
    // A small layer is finished before a second thread wakes up.
    threads = tokens * in * out < 1 << 18 ? 1 : threads;
    // The weight is decoded once for each chunk: for 512 tokens the cost is negligible, and their sums still fit in the
    // cache.
    for (int64_t t = 0; t < tokens; t += kTokens) {
        const int64_t count = std::min(kTokens, tokens - t);
        if (count <= kWidth) {
            MultiplyMany<Format, kBackward, 1>(x + t * in, w, bias, count, in, out, threads, y + t * out);
        } else {
            MultiplyMany<Format, kBackward, 2>(x + t * in, w, bias, count, in, out, threads, y + t * out);
        }
    }
}

template <class Format, class T>
static void BlockLinear(const T* x, const typename Format::Weight& w, const T* bias, int64_t tokens, int64_t in,
    int64_t out, int threads, T* y)
{
    if (tokens == 0) return;
    if (tokens <= kFewTokens) {
        LinearOfFew<Format>(x, w, bias, tokens, in, out, threads, y);
    } else {
        Multiply<Format, false>(x, w, bias, tokens, in, out, threads, y);
    }
}

template <class Format, class T>
static void BlockLinearGrad(
    const T* dy, const typename Format::Weight& w, int64_t tokens, int64_t in, int64_t out, int threads, T* dx)
{
    Multiply<Format, true, T>(dy, w, nullptr, tokens, in, out, threads, dx);
}

// The squares of each row's numbers, added up.

template <class Format>
MINDLORA_INLINE float SquaredNorm(const typename Format::Weight& w, int64_t row)
{
    constexpr int64_t kBlocks = kSpan / kPadded;
    Vec sum = {};
    for (int64_t start = 0; start < w.blocks; start += kBlocks) {
        const int64_t blocks = std::min(kBlocks, w.blocks - start);
        typename Format::Part parts[kBlocks];
        Format::Read(w, row, start, blocks, parts);
        for (int64_t b = 0; b < blocks; ++b) {
            Format::Each(
                w.codes + (row * w.blocks + start + b) * Format::kBytes, parts[b], [&](int, Vec v) { sum += v * v; });
        }
    }
    return Sum(sum);
}

template <class Format>
static void SquaredNorms(const typename Format::Weight& w, int64_t rows, int threads, float* y)
{
    // A small layer is finished before a second thread wakes up.
    threads = rows * w.blocks * kPadded < 1 << 17 ? 1 : threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) y[row] = SquaredNorm<Format>(w, row);
}
