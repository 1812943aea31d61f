// The kernels of integer_linear. Included by for_each_isa.h, once in the namespace of each instruction set.
#include "cpu_common/block_linear.h"

MINDLORA_INLINE float OneScale(const float* from) { return *from; }
MINDLORA_INLINE float OneScale(const bfloat16* from) { return ToFloat(*from); }
MINDLORA_INLINE float OneScale(const float16* from)
{
#if MINDLORA_WIDTH >= 8
    return _cvtsh_ss(from->bits);
#else
    return ToFloat(*from);
#endif
}

// By what the codes of a block are decoded: of its first 32 numbers, and of its last.
struct IntegerPart {
    float scale[2], zero[2];
};

// The parts of `count` blocks of a row from `block` on. A zero is a code too: signed where codes have 8 bits.
template <bool kSigned, class S>
MINDLORA_INLINE void ReadParts(
    const Integers& w, const S* scales, int64_t row, int64_t block, int64_t count, IntegerPart* to)
{
    int64_t group = 2 * block / w.halves, left = w.halves - 2 * block % w.halves;
    const int64_t first = row * w.groups;
    for (int64_t half = 0; half < 2 * count; ++half) {
        const uint8_t zero = w.zeros[first + group];
        to[half / 2].scale[half % 2] = OneScale(scales + first + group);
        to[half / 2].zero[half % 2] = kSigned ? static_cast<float>(static_cast<int8_t>(zero)) : zero;
        if (--left == 0) ++group, left = w.halves;
    }
}

template <bool kSigned>
MINDLORA_INLINE void ReadParts(const Integers& w, int64_t row, int64_t block, int64_t count, IntegerPart* to)
{
    switch (w.scale_type) {
        case kHalfScale:
            return ReadParts<kSigned>(w, static_cast<const float16*>(w.scales), row, block, count, to);
        case kBfloatScale:
            return ReadParts<kSigned>(w, static_cast<const bfloat16*>(w.scales), row, block, count, to);
        default: ReadParts<kSigned>(w, static_cast<const float*>(w.scales), row, block, count, to);
    }
}

// (code - zero) * scale of a vector of codes: the difference is exact, the product rounded once.
MINDLORA_INLINE Vec Scaled(Lanes code, float zero, float scale)
{
    return (__builtin_convertvector(code, Vec) - zero) * scale;
}

// Codes of 4 bits: byte i of a block has number i in its low half and number 32 + i in its high one.
struct Int4Format {
    using Weight = Integers;
    using Part = IntegerPart;
    static constexpr int64_t kBytes = kPadded / 2;

    MINDLORA_MEMBER static void Read(const Integers& w, int64_t row, int64_t block, int64_t count, IntegerPart* to)
    {
        ReadParts<false>(w, row, block, count, to);
    }

    MINDLORA_MEMBER static void Ask(const Integers&, int64_t, int64_t) {}

    template <class F>
    MINDLORA_MEMBER static void Each(const uint8_t* codes, const IntegerPart& part, F f)
    {
#if MINDLORA_WIDTH == 16
        // A table of the 16 numbers, and an instruction for each vector.
        const Lanes all = EachLane([](int i) { return i; });
        const Vec low = Scaled(all, part.zero[0], part.scale[0]), high = Scaled(all, part.zero[1], part.scale[1]);
        for (int i = 0; i < kBytes; i += kWidth) {
            const __m512i code = reinterpret_cast<__m512i>(LoadCodes(codes + i));
            f(i, _mm512_permutexvar_ps(code, low));
            f(kBytes + i, _mm512_permutexvar_ps(_mm512_srli_epi32(code, 4), high));
        }
#else
        for (int i = 0; i < kBytes; i += kWidth) {
            const Lanes code = LoadCodes(codes + i);
            f(i, Scaled(code & 15, part.zero[0], part.scale[0]));
            f(kBytes + i, Scaled(code >> 4, part.zero[1], part.scale[1]));
        }
#endif
    }
};

// Signed codes of 8 bits, in order.
struct Int8Format {
    using Weight = Integers;
    using Part = IntegerPart;
    static constexpr int64_t kBytes = kPadded;

    MINDLORA_MEMBER static void Read(const Integers& w, int64_t row, int64_t block, int64_t count, IntegerPart* to)
    {
        ReadParts<true>(w, row, block, count, to);
    }

    MINDLORA_MEMBER static void Ask(const Integers&, int64_t, int64_t) {}

    template <class F>
    MINDLORA_MEMBER static void Each(const uint8_t* codes, const IntegerPart& part, F f)
    {
        for (int i = 0; i < kBytes; i += kWidth) {
            f(i, Scaled(LoadSigned(codes + i), part.zero[i / 32], part.scale[i / 32]));
        }
    }
};

template <int kBits>
using IntegerFormat = std::conditional_t<kBits == 4, Int4Format, Int8Format>;

template <int kBits, class T>
static void IntegerLinear(
    const T* x, const Integers& w, int64_t tokens, int64_t in, int64_t out, int threads, T* y)
{
    BlockLinear<IntegerFormat<kBits>, T>(x, w, nullptr, tokens, in, out, threads, y);
}

template <int kBits, class T>
static void IntegerLinearGrad(
    const T* dy, const Integers& w, int64_t tokens, int64_t in, int64_t out, int threads, T* dx)
{
    BlockLinearGrad<IntegerFormat<kBits>>(dy, w, tokens, in, out, threads, dx);
}
