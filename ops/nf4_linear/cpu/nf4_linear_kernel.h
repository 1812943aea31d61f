// The kernels of nf4_linear. Included by for_each_isa.h, once in the namespace of each instruction set.
#include "cpu_common/block_linear.h"
#include "nf4_linear/cpu/nf4_decode.h"

// NF4, as block_linear.h takes it.
struct Nf4Format {
    using Weight = Nf4;
    using Part = float;
    static constexpr int64_t kBytes = kBlock / 2;

    MINDLORA_MEMBER static void Read(const Nf4& w, int64_t row, int64_t block, int64_t count, float* to)
    {
        ReadAbsmax(w, row * w.blocks + block, count, to);
    }

    MINDLORA_MEMBER static void Ask(const Nf4& w, int64_t row, int64_t block)
    {
        __builtin_prefetch(w.absmax + row * w.blocks + block);
    }

    template <class F>
    MINDLORA_MEMBER static void Each(const uint8_t* codes, float absmax, F f)
    {
        const Table table(absmax);
        for (int i = 0; i < kBytes; i += kWidth) {
            const Lanes code = LoadCodes(codes + i);
            f(i, table.At(code));
            f(kBytes + i, table.At(code >> 4));
        }
    }
};

template <class T>
static void Nf4Linear(
    const T* x, const Nf4& w, const T* bias, int64_t tokens, int64_t in, int64_t out, int threads, T* y)
{
    BlockLinear<Nf4Format>(x, w, bias, tokens, in, out, threads, y);
}

template <class T>
static void Nf4LinearGrad(const T* dy, const Nf4& w, int64_t tokens, int64_t in, int64_t out, int threads, T* dx)
{
    BlockLinearGrad<Nf4Format>(dy, w, tokens, in, out, threads, dx);
}

static void Nf4SquaredNorms(const Nf4& w, int64_t rows, int threads, float* y)
{
    SquaredNorms<Nf4Format>(w, rows, threads, y);
}
