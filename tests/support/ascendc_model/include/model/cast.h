// Cast: the documented pairs of types with their round modes, and nothing else.
#pragma once

#include <limits>

#include "vector.h"

namespace ascendc_model {

enum Modes { kNoMode = 0, kNone = 1, kDirected = 2, kOdd = 4 };  // kDirected: RINT, FLOOR, CEIL, ROUND, TRUNC

// The table of Atlas A2, without the pairs of int4b_t, int8_t and int64_t, and those to uint8_t.
template <class T, class U>
constexpr int SupportedModes()
{
    if constexpr (std::is_same_v<U, float>) {
        return std::is_same_v<T, half>                         ? kNone | kDirected | kOdd
            : kIsOneOf<T, bfloat16_t, int16_t, int32_t, float> ? kDirected
                                                               : kNoMode;
    } else if constexpr (std::is_same_v<U, half>) {
        return std::is_same_v<T, float> ? kNone : kIsOneOf<T, int16_t, int32_t> ? kDirected : kNoMode;
    } else if constexpr (std::is_same_v<U, bfloat16_t>) {
        return std::is_same_v<T, float> ? kNone : std::is_same_v<T, int32_t> ? kDirected : kNoMode;
    } else if constexpr (std::is_same_v<U, uint8_t>) {
        return std::is_same_v<T, half> ? kNone : kNoMode;
    } else if constexpr (std::is_same_v<U, int16_t>) {
        return std::is_same_v<T, float> ? kNone : std::is_same_v<T, half> ? kNone | kDirected : kNoMode;
    } else if constexpr (std::is_same_v<U, int32_t>) {
        return std::is_same_v<T, float> ? kNone | kDirected : std::is_same_v<T, int16_t> ? kNone : kNoMode;
    }
    return kNoMode;
}

inline double RoundToInteger(double value, AscendC::RoundMode mode)
{
    using AscendC::RoundMode;
    switch (mode) {
        case RoundMode::CAST_FLOOR: return std::floor(value);
        case RoundMode::CAST_CEIL: return std::ceil(value);
        case RoundMode::CAST_ROUND: return std::round(value);
        case RoundMode::CAST_TRUNC: return std::trunc(value);
        default: return std::nearbyint(value);
    }
}

// An int32_t as float: the nearest in the mode's direction.
inline float IntegerToFloat(int32_t value, AscendC::RoundMode mode)
{
    using AscendC::RoundMode;
    const auto nearest = static_cast<float>(value);
    const double error = static_cast<double>(nearest) - value;
    const bool down = mode == RoundMode::CAST_FLOOR || (mode == RoundMode::CAST_TRUNC && value > 0);
    const bool up = mode == RoundMode::CAST_CEIL || (mode == RoundMode::CAST_TRUNC && value < 0);
    if ((down && error > 0) || (up && error < 0)) {
        return std::nextafterf(nearest, down ? -INFINITY : INFINITY);
    }
    const bool tie = std::abs(error) * 2 ==
        std::abs(static_cast<double>(nearest) - std::nextafterf(nearest, error > 0 ? -INFINITY : INFINITY));
    const bool nearerToZero = std::abs(static_cast<double>(nearest)) < std::abs(static_cast<double>(value));
    if (mode == RoundMode::CAST_ROUND && tie && nearerToZero) {
        return std::nextafterf(nearest, value > 0 ? INFINITY : -INFINITY);
    }
    return nearest;
}

template <class T, class U>
T Convert(U value, AscendC::RoundMode mode)
{
    if constexpr (std::is_integral_v<T>) {
        const double rounded = RoundToInteger(std::is_integral_v<U> ? static_cast<double>(value) : Widen(value), mode);
        if (std::isnan(rounded)) {
            return 0;
        }
        const double low = std::numeric_limits<T>::min();
        const double high = std::numeric_limits<T>::max();
        return static_cast<T>(std::min(std::max(rounded, low), high));
    } else if constexpr (std::is_integral_v<U>) {
        if constexpr (std::is_same_v<T, float>) {
            return IntegerToFloat(value, mode);
        } else {
            T out;
            out.bits = Narrow(static_cast<float>(value), 5, 10, mode);
            return out;
        }
    } else if constexpr (std::is_same_v<T, U>) {
        return static_cast<float>(RoundToInteger(value, mode));
    } else if constexpr (std::is_same_v<T, float>) {
        return Widen(value);
    } else {
        T out;
        out.bits = std::is_same_v<T, half> ? Narrow(value, 5, 10, mode) : Narrow(value, 8, 7, mode);
        return out;
    }
}

template <class T, class U>
void CheckRoundMode(AscendC::RoundMode mode)
{
    using AscendC::RoundMode;
    constexpr int supported = SupportedModes<T, U>();
    if (supported == kNoMode) {
        Refuse("Cast", kTypeName<U>, " to ", kTypeName<T>, " is not a supported pair");
    }
    const int wanted = mode == RoundMode::CAST_NONE ? kNone : mode == RoundMode::CAST_ODD ? kOdd : kDirected;
    if ((supported & wanted) == 0) {
        static const char* const names[] = {
            "CAST_NONE", "CAST_RINT", "CAST_FLOOR", "CAST_CEIL", "CAST_ROUND", "CAST_TRUNC", "CAST_ODD"};
        Refuse("Cast", kTypeName<U>, " to ", kTypeName<T>, " does not support ", names[static_cast<int>(mode)]);
    }
}

template <class T, class U>
void CastLanes(const Lanes& lanes, const Operand<T>& dst, const Operand<U>& src, AscendC::RoundMode mode)
{
    CheckRoundMode<T, U>(mode);
    if constexpr (SupportedModes<T, U>() != kNoMode) {
        Elementwise("Cast", lanes, dst, [mode](U value) { return Convert<T, U>(value, mode); }, src);
    }
}

}  // namespace ascendc_model

namespace AscendC {

template <typename T, typename U>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const uint32_t count)
{
    using namespace ascendc_model;
    constexpr uint64_t n = kRepeatBytes / std::max(sizeof(T), sizeof(U));
    CastLanes<T, U>(CountLanes("Cast", count, n), {"dst", dst, n}, {"src", src, n}, roundMode);
}

template <typename T, typename U, bool isSetMask = true, typename Mask>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const Mask mask,
    const ascendc_model::U8 repeatTime, const UnaryRepeatParams& p)
{
    using namespace ascendc_model;
    constexpr uint64_t n = kRepeatBytes / std::max(sizeof(T), sizeof(U));
    CastLanes<T, U>(MaskLanes<isSetMask>("Cast", mask, repeatTime, n), {"dst", dst, p.dstBlkStride, p.dstRepStride},
        {"src", src, p.srcBlkStride, p.srcRepStride}, roundMode);
}

}  // namespace AscendC
