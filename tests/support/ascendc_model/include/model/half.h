// half and bfloat16_t as bit patterns, and the documented ways to round a float to them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace AscendC {

enum class RoundMode {
    CAST_NONE = 0,
    CAST_RINT,
    CAST_FLOOR,
    CAST_CEIL,
    CAST_ROUND,
    CAST_TRUNC,
    CAST_ODD,
};

}  // namespace AscendC

namespace ascendc_model {

inline uint32_t FloatBits(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

inline float BitsFloat(uint32_t bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// Whether a magnitude with the bits `rest` (out of 1 << shift) below its last kept bit goes up by one.
inline bool RoundsUp(AscendC::RoundMode mode, bool negative, bool odd, uint64_t rest, int shift)
{
    using AscendC::RoundMode;
    const uint64_t middle = uint64_t{1} << (shift - 1);
    switch (mode) {
        case RoundMode::CAST_FLOOR: return negative && rest != 0;
        case RoundMode::CAST_CEIL: return !negative && rest != 0;
        case RoundMode::CAST_ROUND: return rest >= middle;
        case RoundMode::CAST_TRUNC: return false;
        case RoundMode::CAST_ODD: return !odd && rest != 0;
        default: return rest > middle || (rest == middle && odd);
    }
}

// A float in a narrower format of the same family: sign, exponentBits, mantissaBits. Overflow gives infinity where the
// mode rounds away from zero and the largest finite number where it does not, as IEEE 754 has it.
inline uint16_t Narrow(float value, int exponentBits, int mantissaBits, AscendC::RoundMode mode)
{
    using AscendC::RoundMode;
    const uint32_t bits = FloatBits(value);
    const bool negative = bits >> 31 != 0;
    const uint32_t sign = static_cast<uint32_t>(negative) << (exponentBits + mantissaBits);
    const uint32_t infinity = ((1u << exponentBits) - 1) << mantissaBits;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) {
        return static_cast<uint16_t>(sign | infinity | (1u << (mantissaBits - 1)));
    }
    if (magnitude == 0x7F800000u) {
        return static_cast<uint16_t>(sign | infinity);
    }
    if (magnitude == 0) {
        return static_cast<uint16_t>(sign);
    }
    // value = significand * 2^lowest
    const int field = static_cast<int>(magnitude >> 23);
    const uint64_t significand = field == 0 ? magnitude : (magnitude & 0x7FFFFFu) | 0x800000u;
    const int lowest = (field == 0 ? 1 : field) - 127 - 23;
    const int top = lowest + 63 - __builtin_clzll(significand);
    const int smallestStep = 1 - ((1 << (exponentBits - 1)) - 1) - mantissaBits;
    int step = top - mantissaBits > smallestStep ? top - mantissaBits : smallestStep;
    const int shift = step - lowest;
    uint64_t kept;
    if (shift <= 0) {
        kept = significand << -shift;
    } else if (shift > 62) {
        kept = RoundsUp(mode, negative, false, 1, 62) ? 1 : 0;
    } else {
        kept = significand >> shift;
        kept += RoundsUp(mode, negative, kept & 1, significand & ((uint64_t{1} << shift) - 1), shift) ? 1 : 0;
    }
    if (kept >> (mantissaBits + 1)) {
        kept >>= 1;
        ++step;
    }
    const bool normal = kept >> mantissaBits != 0;
    const uint64_t exponent = normal ? static_cast<uint64_t>(step - smallestStep + 1) : 0;
    if (exponent >= (1u << exponentBits) - 1) {
        const bool towardsZero = mode == RoundMode::CAST_TRUNC || mode == RoundMode::CAST_ODD ||
            (mode == RoundMode::CAST_FLOOR && !negative) || (mode == RoundMode::CAST_CEIL && negative);
        return static_cast<uint16_t>(sign | (towardsZero ? infinity - 1 : infinity));
    }
    return static_cast<uint16_t>(sign | (exponent << mantissaBits) | (kept & ((1u << mantissaBits) - 1)));
}

inline float HalfToFloat(uint16_t bits)
{
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1Fu;
    const uint32_t mantissa = bits & 0x3FFu;
    if (exponent == 0x1F) {
        return BitsFloat(sign | 0x7F800000u | (mantissa << 13));
    }
    if (exponent == 0) {
        return BitsFloat(sign | FloatBits(static_cast<float>(mantissa) * 0x1p-24f));
    }
    return BitsFloat(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

}  // namespace ascendc_model

// On the device both are built-in types of the global namespace.
struct half {
    half() = default;
    half(float value) : bits(ascendc_model::Narrow(value, 5, 10, AscendC::RoundMode::CAST_RINT)) {}
    operator float() const { return ascendc_model::HalfToFloat(bits); }
    uint16_t bits;
};

// The documentation lists no immediate of bfloat16_t: a value comes from ToBfloat16 or Cast.
struct bfloat16_t {
    uint16_t bits;
};

namespace AscendC {

inline float ToFloat(const bfloat16_t& value)
{
    return ascendc_model::BitsFloat(static_cast<uint32_t>(value.bits) << 16);
}

inline bfloat16_t ToBfloat16(const float& value)
{
    return bfloat16_t{ascendc_model::Narrow(value, 8, 7, RoundMode::CAST_RINT)};
}

inline bfloat16_t Cast(const float& value) { return ToBfloat16(value); }

}  // namespace AscendC

namespace ascendc_model {

// Arithmetic is done in float and rounded to the operand's type, once for each instruction.
inline float Widen(float value) { return value; }
inline float Widen(half value) { return value; }
inline float Widen(bfloat16_t value) { return AscendC::ToFloat(value); }

template <class T>
T Rounded(float value)
{
    if constexpr (std::is_same_v<T, bfloat16_t>) {
        return AscendC::ToBfloat16(value);
    } else {
        return T(value);
    }
}

template <class T>
constexpr const char* kTypeName = "?";
template <>
inline constexpr const char* kTypeName<half> = "half";
template <>
inline constexpr const char* kTypeName<bfloat16_t> = "bfloat16_t";
template <>
inline constexpr const char* kTypeName<float> = "float";
template <>
inline constexpr const char* kTypeName<int8_t> = "int8_t";
template <>
inline constexpr const char* kTypeName<uint8_t> = "uint8_t";
template <>
inline constexpr const char* kTypeName<int16_t> = "int16_t";
template <>
inline constexpr const char* kTypeName<uint16_t> = "uint16_t";
template <>
inline constexpr const char* kTypeName<int32_t> = "int32_t";
template <>
inline constexpr const char* kTypeName<uint32_t> = "uint32_t";
template <>
inline constexpr const char* kTypeName<int64_t> = "int64_t";
template <>
inline constexpr const char* kTypeName<uint64_t> = "uint64_t";

template <class T, class... Options>
constexpr bool kIsOneOf = (std::is_same_v<T, Options> || ...);

}  // namespace ascendc_model
