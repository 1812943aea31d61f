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

// By what the codes of a block are decoded: those of its first 32 numbers, and of its last, unless it is one for all.
template <bool kWhole>
struct IntegerPart {
    float scale[kWhole ? 1 : 2], zero[kWhole ? 1 : 2];
};

// The parts of `count` blocks of a row from `block` on. A zero is a code too: signed where codes have 8 bits.
template <bool kSigned, bool kWhole, class S>
MINDLORA_INLINE void ReadParts(
    const Integers& w, const S* scales, int64_t row, int64_t block, int64_t count, IntegerPart<kWhole>* to)
{
    // A unit is what has one scale: a block or a half of one.
    constexpr int kUnits = kWhole ? 1 : 2;
    const int64_t size = w.halves * kUnits / 2, first = row * w.groups;
    int64_t group = block * kUnits / size, left = size - block * kUnits % size;
    for (int64_t unit = 0; unit < kUnits * count; ++group, left = size) {
        const uint8_t code = w.zeros[first + group];
        const float scale = OneScale(scales + first + group);
        const float zero = kSigned ? static_cast<float>(static_cast<int8_t>(code)) : code;
        for (const int64_t end = std::min(unit + left, kUnits * count); unit < end; ++unit) {
            to[unit / kUnits].scale[unit % kUnits] = scale;
            to[unit / kUnits].zero[unit % kUnits] = zero;
        }
    }
}

// (code - zero) * scale of a vector of codes: the difference is exact, the product rounded once.
MINDLORA_INLINE Vec Scaled(Lanes code, float zero, float scale)
{
    return (__builtin_convertvector(code, Vec) - zero) * scale;
}

// Codes of 4 bits: byte i of a block has number i in its low half and number 32 + i in its high one. Codes of 8 bits
// are signed, in order. With kWhole no group ends within a block.
template <int kBits, bool kWhole>
struct IntegerFormat {
    using Weight = Integers;
    using Part = IntegerPart<kWhole>;
    static constexpr int64_t kBytes = kPadded * kBits / 8;
    static constexpr int kLast = kWhole ? 0 : 1;

    MINDLORA_MEMBER static void Read(const Integers& w, int64_t row, int64_t block, int64_t count, Part* to)
    {
        constexpr bool kSigned = kBits == 8;
        switch (w.scale_type) {
            case kHalfScale: return ReadParts<kSigned>(w, static_cast<const float16*>(w.scales), row, block, count, to);
            case kBfloatScale:
                return ReadParts<kSigned>(w, static_cast<const bfloat16*>(w.scales), row, block, count, to);
            default: ReadParts<kSigned>(w, static_cast<const float*>(w.scales), row, block, count, to);
        }
    }

    MINDLORA_MEMBER static void Ask(const Integers&, int64_t, int64_t) {}

    template <class F>
    MINDLORA_MEMBER static void Each(const uint8_t* codes, const Part& part, F f)
    {
        if constexpr (kBits == 8) {
            for (int i = 0; i < kBytes; i += kWidth) {
                const int half = kWhole ? 0 : i / 32;
                f(i, Scaled(LoadSigned(codes + i), part.zero[half], part.scale[half]));
            }
            return;
        }
#if MINDLORA_WIDTH == 16
        // A table of the 16 numbers of a group, and an instruction for each vector.
        const Lanes all = EachLane([](int i) { return i; });
        const Vec low = Scaled(all, part.zero[0], part.scale[0]);
        const Vec high = kWhole ? low : Scaled(all, part.zero[kLast], part.scale[kLast]);
        for (int i = 0; i < kPadded / 2; i += kWidth) {
            const __m512i code = reinterpret_cast<__m512i>(LoadCodes(codes + i));
            f(i, _mm512_permutexvar_ps(code, low));
            f(kPadded / 2 + i, _mm512_permutexvar_ps(_mm512_srli_epi32(code, 4), high));
        }
#else
        for (int i = 0; i < kPadded / 2; i += kWidth) {
            const Lanes code = LoadCodes(codes + i);
            f(i, Scaled(code & 15, part.zero[0], part.scale[0]));
            f(kPadded / 2 + i, Scaled(code >> 4, part.zero[kLast], part.scale[kLast]));
        }
#endif
    }
};

template <int kBits, class T>
static void IntegerLinear(const T* x, const Integers& w, int64_t tokens, int64_t in, int64_t out, int threads, T* y)
{
    if (w.halves % 2 == 0) {
        BlockLinear<IntegerFormat<kBits, true>, T>(x, w, nullptr, tokens, in, out, threads, y);
    } else {
        BlockLinear<IntegerFormat<kBits, false>, T>(x, w, nullptr, tokens, in, out, threads, y);
    }
}

template <int kBits, class T>
static void IntegerLinearGrad(
    const T* dy, const Integers& w, int64_t tokens, int64_t in, int64_t out, int threads, T* dx)
{
    if (w.halves % 2 == 0) {
        BlockLinearGrad<IntegerFormat<kBits, true>>(dy, w, tokens, in, out, threads, dx);
    } else {
        BlockLinearGrad<IntegerFormat<kBits, false>>(dy, w, tokens, in, out, threads, dx);
    }
}

template <int kBits>
static void IntegerSquaredNorms(const Integers& w, int64_t rows, int threads, float* y)
{
    if (w.halves % 2 == 0) {
        SquaredNorms<IntegerFormat<kBits, true>>(w, rows, threads, y);
    } else {
        SquaredNorms<IntegerFormat<kBits, false>>(w, rows, threads, y);
    }
}
