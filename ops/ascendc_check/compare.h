// What a tensor holds after a call, against its golden file: the first wrong index, and how many are wrong.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>

#include "golden_file.h"

namespace mindlora {

inline double NumberAt(const GoldenTensor& tensor, const std::vector<char>& bytes, size_t index)
{
    const char* at = bytes.data() + index * DataTypes().at(tensor.dtype).bytes;
    uint32_t bits = 0;
    float number = 0;
    switch (tensor.type) {
        case ACL_FLOAT16: std::memcpy(&bits, at, 2); return aclFloat16ToFloat(static_cast<aclFloat16>(bits));
        case ACL_BF16: std::memcpy(reinterpret_cast<char*>(&number) + 2, at, 2); return number;
        case ACL_FLOAT: std::memcpy(&number, at, 4); return number;
        case ACL_INT32: std::memcpy(&bits, at, 4); return static_cast<int32_t>(bits);
        default: return static_cast<unsigned char>(*at);
    }
}

inline std::string Text(double number)
{
    if (std::isnan(number)) return "nan";
    char text[32];
    std::snprintf(text, sizeof(text), "%.9g", number);
    return text;
}

// [row, column] of a flat index.
inline std::string IndexText(const GoldenTensor& tensor, size_t index)
{
    std::string text;
    for (size_t axis = tensor.shape.size(); axis-- > 0;) {
        const size_t size = static_cast<size_t>(tensor.shape[axis]);
        text = std::to_string(index % size) + (text.empty() ? "" : ", ") + text;
        index /= size;
    }
    return "[" + text + "]";
}

// What is right at an index.
inline std::string Expected(const GoldenTensor& tensor, size_t index)
{
    const double lowest = tensor.lowest[index], highest = tensor.highest[index];
    if (!std::isfinite(lowest) || !std::isfinite(highest)) return "nan or an infinity";
    return lowest == highest ? Text(lowest) : Text(lowest) + " to " + Text(highest);
}

inline bool IsRight(const GoldenTensor& tensor, size_t index, double got)
{
    const double lowest = tensor.lowest[index], highest = tensor.highest[index];
    if (!std::isfinite(lowest) || !std::isfinite(highest)) return !std::isfinite(got);
    return lowest <= got && got <= highest;
}

// "", or what differs from the golden file. Where NaN or an infinity is expected, any of them is right.
inline std::string Difference(const GoldenTensor& tensor, const std::vector<char>& after)
{
    if (tensor.lowest.empty()) return after == tensor.before ? "" : tensor.name + ", an input, was written to";
    size_t wrong = 0, first = 0;
    for (size_t i = tensor.Count(); i-- > 0;) {
        if (IsRight(tensor, i, NumberAt(tensor, after, i))) continue;
        ++wrong;
        first = i;
    }
    if (wrong == 0) return "";
    return tensor.name + " differs in " + std::to_string(wrong) + " of " + std::to_string(tensor.Count()) +
        " numbers, first at " + IndexText(tensor, first) + ": got " + Text(NumberAt(tensor, after, first)) +
        ", expected " + Expected(tensor, first);
}

// "", or where two rounds of the same call have different bits.
inline std::string BitDifference(
    const GoldenTensor& tensor, const std::vector<char>& earlier, const std::vector<char>& later)
{
    if (earlier == later) return "";
    size_t at = 0;
    while (earlier[at] == later[at]) ++at;
    const size_t index = at / DataTypes().at(tensor.dtype).bytes;
    return tensor.name + " does not have the bits of round 1, first at " + IndexText(tensor, index) + ": got " +
        Text(NumberAt(tensor, later, index)) + ", before " + Text(NumberAt(tensor, earlier, index));
}

}  // namespace mindlora
