// Add, Sub, Mul, Adds, Muls, Axpy, MulAddDst. A result is rounded once, to the type of dst.
#pragma once

#include "vector.h"

namespace ascendc_model {

// Float arithmetic rounded to T, or integer arithmetic that must not overflow, since overflow is not documented.
template <class T, class F>
T Arithmetic(const char* api, const F& f, T a, T b)
{
    if constexpr (std::is_integral_v<T>) {
        const int64_t result = f(int64_t{a}, int64_t{b});
        if (result != static_cast<T>(result)) {
            Refuse(api, "integer overflow: ", a, " and ", b);
        }
        return static_cast<T>(result);
    } else {
        return Rounded<T>(f(Widen(a), Widen(b)));
    }
}

template <class T, class F>
void Binary(
    const char* api, const F& f, const Lanes& lanes, const Operand<T>& dst, const Operand<T>& src0, Operand<T> src1)
{
    CheckType<int16_t, half, int32_t, float>(api, "dst", static_cast<const T*>(nullptr));
    // Add, Sub and Mul may accumulate in dst where it is the second source and one of the two does not advance.
    const bool sameStart = dst.ref.begin == src1.ref.begin && dst.ref.slot == src1.ref.slot;
    src1.mayFollowDst =
        kIsOneOf<T, half, int32_t, float> && sameStart && (dst.repeatStride == 0 || src1.repeatStride == 0);
    Elementwise(api, lanes, dst, [&](T a, T b) { return Arithmetic(api, f, a, b); }, src0, src1);
}

template <class T, class F>
void WithScalar(const char* api, const F& f, const Lanes& lanes, const Operand<T>& dst, const Operand<T>& src, T scalar)
{
    CheckType<int16_t, half, int32_t, float>(api, "dst", static_cast<const T*>(nullptr));
    Elementwise(api, lanes, dst, [&](T a) { return Arithmetic(api, f, a, scalar); }, src);
}

template <class T, class U>
void CheckMulAddTypes(const char* api)
{
    const bool supported =
        (std::is_same_v<T, U> && kIsOneOf<T, half, float>) || (std::is_same_v<T, float> && std::is_same_v<U, half>);
    if (!supported) {
        Refuse(api, "dst of type ", kTypeName<T>, " and src of type ", kTypeName<U>, " is not a supported pair");
    }
}

// a * b + c with one rounding to float and one to T. Whether the hardware rounds the product first is not documented.
template <class T, class U>
T MulAdd(U a, U b, T c)
{
    return Rounded<T>(std::fma(Widen(a), Widen(b), Widen(c)));
}

template <class T, class U = T>
constexpr uint64_t kPerRepeat = kRepeatBytes / (sizeof(T) > sizeof(U) ? sizeof(T) : sizeof(U));

}  // namespace ascendc_model

namespace AscendC {

#define ASCENDC_MODEL_BINARY(NAME, EXPRESSION)                                                                         \
    template <typename T>                                                                                              \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count) \
    {                                                                                                                  \
        using namespace ascendc_model;                                                                                 \
        constexpr uint64_t n = kPerRepeat<T>;                                                                          \
        Binary<T>(#NAME, [](auto a, auto b) { return EXPRESSION; }, CountLanes(#NAME, count, n), {"dst", dst, n},      \
            {"src0", src0, n}, {"src1", src1, n});                                                                     \
    }                                                                                                                  \
    template <typename T, bool isSetMask = true, typename Mask>                                                        \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, Mask mask,            \
        const ascendc_model::U8 repeatTime, const BinaryRepeatParams& p)                                               \
    {                                                                                                                  \
        using namespace ascendc_model;                                                                                 \
        Binary<T>(#NAME, [](auto a, auto b) { return EXPRESSION; },                                                    \
            MaskLanes<isSetMask>(#NAME, mask, repeatTime, kPerRepeat<T>),                                              \
            {"dst", dst, p.dstBlkStride, p.dstRepStride}, {"src0", src0, p.src0BlkStride, p.src0RepStride},            \
            {"src1", src1, p.src1BlkStride, p.src1RepStride});                                                         \
    }

ASCENDC_MODEL_BINARY(Add, a + b)
ASCENDC_MODEL_BINARY(Sub, a - b)
ASCENDC_MODEL_BINARY(Mul, (a * b))
#undef ASCENDC_MODEL_BINARY

#define ASCENDC_MODEL_SCALAR(NAME, EXPRESSION)                                                                         \
    template <typename T, bool isSetMask = true>                                                                       \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count)        \
    {                                                                                                                  \
        using namespace ascendc_model;                                                                                 \
        constexpr uint64_t n = kPerRepeat<T>;                                                                          \
        WithScalar<T>(                                                                                                 \
            #NAME, [](auto a, auto b) { return EXPRESSION; }, CountLanes<isSetMask>(#NAME, count, n), {"dst", dst, n}, \
            {"src", src, n}, scalarValue);                                                                             \
    }                                                                                                                  \
    template <typename T, bool isSetMask = true, typename Mask>                                                        \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, Mask mask,                   \
        const ascendc_model::U8 repeatTime, const UnaryRepeatParams& p)                                                \
    {                                                                                                                  \
        using namespace ascendc_model;                                                                                 \
        WithScalar<T>(                                                                                                 \
            #NAME, [](auto a, auto b) { return EXPRESSION; },                                                          \
            MaskLanes<isSetMask>(#NAME, mask, repeatTime, kPerRepeat<T>),                                              \
            {"dst", dst, p.dstBlkStride, p.dstRepStride}, {"src", src, p.srcBlkStride, p.srcRepStride}, scalarValue);  \
    }

ASCENDC_MODEL_SCALAR(Adds, a + b)
ASCENDC_MODEL_SCALAR(Muls, (a * b))
#undef ASCENDC_MODEL_SCALAR

template <typename T, typename U>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue, const int32_t& count)
{
    using namespace ascendc_model;
    constexpr uint64_t n = kPerRepeat<T, U>;
    CheckMulAddTypes<T, U>("Axpy");
    const Operand<T> sum("dst", dst, n);
    Elementwise(
        "Axpy", CountLanes("Axpy", count, n), sum, [&](U a, T c) { return MulAdd<T, U>(scalarValue, a, c); },
        Operand<U>("src", src, n), sum);
}

template <typename T, typename U, bool isSetMask = true, typename Mask>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue, Mask mask,
    const ascendc_model::U8 repeatTime, const UnaryRepeatParams& p)
{
    using namespace ascendc_model;
    CheckMulAddTypes<T, U>("Axpy");
    const Operand<T> sum("dst", dst, p.dstBlkStride, p.dstRepStride);
    Elementwise(
        "Axpy", MaskLanes<isSetMask>("Axpy", mask, repeatTime, kPerRepeat<T, U>), sum,
        [&](U a, T c) { return MulAdd<T, U>(scalarValue, a, c); },
        Operand<U>("src", src, p.srcBlkStride, p.srcRepStride), sum);
}

template <typename T, typename U>
void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, const int32_t& count)
{
    using namespace ascendc_model;
    constexpr uint64_t n = kPerRepeat<T, U>;
    CheckMulAddTypes<T, U>("MulAddDst");
    const Operand<T> sum("dst", dst, n);
    Elementwise(
        "MulAddDst", CountLanes("MulAddDst", count, n), sum, [](U a, U b, T c) { return MulAdd<T, U>(a, b, c); },
        Operand<U>("src0", src0, n), Operand<U>("src1", src1, n), sum);
}

template <typename T, typename U, bool isSetMask = true, typename Mask>
void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, Mask mask,
    const ascendc_model::U8 repeatTime, const BinaryRepeatParams& p)
{
    using namespace ascendc_model;
    CheckMulAddTypes<T, U>("MulAddDst");
    const Operand<T> sum("dst", dst, p.dstBlkStride, p.dstRepStride);
    Elementwise(
        "MulAddDst", MaskLanes<isSetMask>("MulAddDst", mask, repeatTime, kPerRepeat<T, U>), sum,
        [](U a, U b, T c) { return MulAdd<T, U>(a, b, c); }, Operand<U>("src0", src0, p.src0BlkStride, p.src0RepStride),
        Operand<U>("src1", src1, p.src1BlkStride, p.src1RepStride), sum);
}

}  // namespace AscendC
