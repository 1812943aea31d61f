// The three element types of the operators, and their exact conversion to and from float32, one value at a time.
#pragma once

#include <cstdint>
#include <cstring>

namespace mindlora {

struct float16 {
    uint16_t bits;
};

struct bfloat16 {
    uint16_t bits;
};

inline uint32_t BitsOf(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float FloatOf(uint32_t bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float ToFloat(float value) { return value; }

inline float ToFloat(bfloat16 value) { return FloatOf(static_cast<uint32_t>(value.bits) << 16); }

inline float ToFloat(float16 value)
{
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
    const uint32_t rest = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
    const uint32_t exponent = rest & (0x1fu << 23);
    if (exponent == 0x1fu << 23) return FloatOf(sign | (rest + (224u << 23)));  // infinity and NaN
    if (exponent != 0) return FloatOf(sign | (rest + (112u << 23)));
    // Subnormal: the implicit one is added by the exponent of the smallest normal, then subtracted as a number.
    return FloatOf(sign | BitsOf(FloatOf(rest + (113u << 23)) - FloatOf(113u << 23)));
}

inline void FromFloat(float value, float* to) { *to = value; }

inline void FromFloat(float value, bfloat16* to)
{
    const uint32_t bits = BitsOf(value);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    // Nearest, ties to even. A NaN is made quiet explicitly, since rounding could turn it into infinity.
    to->bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void FromFloat(float value, float16* to)
{
    const uint32_t bits = BitsOf(value), magnitude = bits & 0x7fffffff;
    uint32_t half;
    if (magnitude > 0x7f800000) {
        half = 0x7e00;  // NaN
    } else if (magnitude >= 143u << 23) {
        half = 0x7c00;  // 65536 and above: infinity; smaller values that round up to it are carried there
    } else if (magnitude < 113u << 23) {
        // Below the smallest normal: adding 0.5 leaves the subnormal in the last bits, rounded by the hardware.
        half = BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f);
    } else {
        half = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    }
    to->bits = static_cast<uint16_t>(half | ((bits >> 16) & 0x8000));
}

}  // namespace mindlora
