// The kernels of nf4_linear. Included by for_each_isa.h, once in the namespace of each instruction set.
#include "cpu_common/panels.h"
#include "nf4_linear/cpu/nf4_decode.h"

// Few tokens: every weight is decoded in registers and used there.

// sums[m][n] = x[m] . W[n] for the rows [first, end) of the weight; `absmax` has room for kFewRows rows of blocks.
constexpr int kFewRows = 4;

template <int M>
static void FewTokens(
    const float* x, int64_t stride, const Nf4& w, int64_t first, int64_t end, int64_t out, float* absmax, float* sums)
{
    // As many sums as hide the latency of adding and fit in the registers; more rows share what is loaded of x.
    constexpr int kJ = M <= (kWidth == 16 ? 4 : 2) ? kFewRows : 2;
    for (int64_t n = first; n < end; n += kJ) {
        const uint8_t* codes[kJ];
        for (int j = 0; j < kJ; ++j) {
            // Past the end the last row is computed again, and the result dropped.
            const int64_t row = std::min(n + j, end - 1);
            codes[j] = w.codes + row * w.blocks * kBytes;
            ReadAbsmax(w, row * w.blocks, w.blocks, absmax + j * w.blocks);
        }
        Vec acc[M][kJ] = {};
        for (int64_t b = 0; b < w.blocks; ++b) {
            const float* token = x + b * kBlock;
            for (int j = 0; j < kJ; ++j) {
                const Table table(absmax[j * w.blocks + b]);
                // The rows are too short for the processor's own prefetching.
                __builtin_prefetch(codes[j] + (kJ * w.blocks + b) * kBytes);
                for (int i = 0; i < kBytes; i += kWidth) {
                    const Lanes code = LoadCodes(codes[j] + b * kBytes + i);
                    const Vec low = table.At(code), high = table.At(code >> 4);
                    for (int m = 0; m < M; ++m) {
                        acc[m][j] += Load(token + m * stride + i) * low;
                        acc[m][j] += Load(token + m * stride + kBytes + i) * high;
                    }
                }
            }
        }
        for (int j = 0; j < kJ && n + j < end; ++j) {
            for (int m = 0; m < M; ++m) sums[m * out + n + j] = Sum(acc[m][j]);
        }
    }
}

constexpr int64_t kFewTokens = 8;

template <class F>
MINDLORA_INLINE void WithTokens(int64_t tokens, F f)
{
    switch (tokens) {
        case 1: return f(std::integral_constant<int, 1>());
        case 2: return f(std::integral_constant<int, 2>());
        case 3: return f(std::integral_constant<int, 3>());
        case 4: return f(std::integral_constant<int, 4>());
        case 5: return f(std::integral_constant<int, 5>());
        case 6: return f(std::integral_constant<int, 6>());
        case 7: return f(std::integral_constant<int, 7>());
        default: return f(std::integral_constant<int, 8>());
    }
}

template <class T>
static void LinearOfFew(
    const T* x, const Nf4& w, const T* bias, int64_t tokens, int64_t in, int64_t out, int threads, T* y)
{
    static thread_local std::vector<float> wide_buffer, sums_buffer;
    const int64_t stride = w.blocks * kBlock;
    float *wide = Scratch(&wide_buffer, tokens * stride), *sums = Scratch(&sums_buffer, tokens * out);
    for (int64_t m = 0; m < tokens; ++m) {
        float* to = wide + m * stride;
        for (int64_t k = 0; k < in; k += kWidth) StoreUpTo(LoadUpTo(x + m * in + k, in - k), to + k, in - k);
        std::fill(to + in, to + stride, 0.0f);
    }
    // A small layer is finished before a second thread wakes up.
    const int64_t chunk = out * in < 1 << 17 ? out : std::max<int64_t>(16, out / (8 * threads) / 16 * 16);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (chunk < out)
    for (int64_t start = 0; start < out; start += chunk) {
        static thread_local std::vector<float> absmax_buffer;
        float* absmax = Scratch(&absmax_buffer, kFewRows * w.blocks);
        const int64_t end = std::min(out, start + chunk);
        WithTokens(tokens,
            [&](auto count) { FewTokens<decltype(count)::value>(wide, stride, w, start, end, out, absmax, sums); });
        for (int64_t m = 0; m < tokens; ++m) {
            for (int64_t n = start; n < end; n += kWidth) {
                const Vec sum = LoadUpTo(sums + m * out + n, end - n);
                StoreUpTo(bias == nullptr ? sum : sum + LoadUpTo(bias + n, end - n), y + m * out + n, end - n);
            }
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
MINDLORA_INLINE void DecodeTile(
    const Nf4& w, int64_t row, int64_t rows, int64_t block, int64_t blocks, int64_t stride, float* to)
{
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t first = (row + i) * w.blocks + block;
        float absmax[kSpan / kBlock];
        ReadAbsmax(w, first, blocks, absmax);
        for (int64_t b = 0; b < blocks; ++b) {
            DecodeBlock(w.codes + (first + b) * kBytes, absmax[b], to + i * stride + b * kBlock);
        }
    }
}

// y = x W^T (+ bias), or the first `out` columns of x W where kBackward: then x is dy.
template <bool kBackward, int kVectors, class T>
static void MultiplyMany(
    const T* x, const Nf4& w, const T* bias, int64_t tokens, int64_t in, int64_t out, int threads, T* y)
{
    constexpr int kLanes = kVectors * kWidth;
    // A power of two would put the column of a tile, which the backward reads, into few sets of the L1 cache.
    constexpr int64_t kStride = kBackward ? kSpan + 16 : kDepth;
    constexpr int kRow = kBackward ? 1 : kStride, kColumn = kBackward ? kStride : 1;
    static thread_local std::vector<float> buffer;
    const int64_t panels = (tokens + kLanes - 1) / kLanes;
    const int64_t padded = kBackward ? in : w.blocks * kBlock;
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
                    DecodeTile(w, p, depth, start / kBlock, (span + kBlock - 1) / kBlock, kStride, tile);
                } else {
                    DecodeTile(w, start, span, p / kBlock, depth / kBlock, kStride, tile);
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

template <bool kBackward, class T>
static void Multiply(
    const T* x, const Nf4& w, const T* bias, int64_t tokens, int64_t in, int64_t out, int threads, T* y)
{
    // A small layer is finished before a second thread wakes up.
    threads = tokens * in * out < 1 << 18 ? 1 : threads;
    // The weight is decoded once for each chunk: for 512 tokens the cost is negligible, and their sums still fit in the
    // cache.
    for (int64_t t = 0; t < tokens; t += kTokens) {
        const int64_t count = std::min(kTokens, tokens - t);
        if (count <= kWidth) {
            MultiplyMany<kBackward, 1>(x + t * in, w, bias, count, in, out, threads, y + t * out);
        } else {
            MultiplyMany<kBackward, 2>(x + t * in, w, bias, count, in, out, threads, y + t * out);
        }
    }
}

template <class T>
static void Nf4Linear(
    const T* x, const Nf4& w, const T* bias, int64_t tokens, int64_t in, int64_t out, int threads, T* y)
{
    if (tokens == 0) return;
    if (tokens <= kFewTokens) {
        LinearOfFew(x, w, bias, tokens, in, out, threads, y);
    } else {
        Multiply<false>(x, w, bias, tokens, in, out, threads, y);
    }
}

template <class T>
static void Nf4LinearGrad(const T* dy, const Nf4& w, int64_t tokens, int64_t in, int64_t out, int threads, T* dx)
{
    Multiply<true, T>(dy, w, nullptr, tokens, in, out, threads, dx);
}
