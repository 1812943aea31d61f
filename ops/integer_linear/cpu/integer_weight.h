// The three tensors of a weight in integers among the inputs of an operator: codes, zeros, scales. See ../README.md.
#pragma once

#include "cpu_common/aot.h"

namespace mindlora {

constexpr int64_t kIntegerBlock = 64;

enum ScaleType { kFloatScale, kHalfScale, kBfloatScale };

// A weight and what is needed to read it.
struct Integers {
    const uint8_t* codes;
    const uint8_t* zeros;
    const void* scales;
    ScaleType scale_type;
    int64_t blocks;  // of a row
    int64_t groups;  // of a row
    int64_t halves;  // of blocks, in a group
};

// The weight in codes of so many bits whose codes are input `codes`; x has rows of `in` numbers, -1 for any.
inline void CheckIntegers(const char* op, const Shapes& s, int codes, int bits, int64_t in)
{
    s.CheckRank(codes, "codes", 2);
    s.CheckRank(codes + 1, "zeros", 2);
    s.CheckRank(codes + 2, "scales", 2);
    const int64_t bytes = s.At(codes, 1), groups = s.At(codes + 1, 1);
    s.CheckSame("N", s.At(codes, 0), s.At(codes + 1, 0));
    s.CheckSame("N", s.At(codes, 0), s.At(codes + 2, 0));
    s.CheckSame("the number of groups of a row", groups, s.At(codes + 2, 1));
    s.CheckSame("K", in, bytes < 0 ? -1 : bytes * 8 / bits);
    if (bytes < 0) return;
    const int64_t columns = bytes * 8 / bits;
    if (columns % kIntegerBlock != 0) {
        Refuse(op, "K is " + std::to_string(columns) + ": it must be a multiple of 64.");
    }
    if (groups == 0 || (groups > 0 && columns / 32 % groups != 0)) {
        Refuse(op,
            "a row of " + std::to_string(columns) + " numbers has " + std::to_string(groups) +
                " groups: they must be alike, of a multiple of 32 numbers.");
    }
}

inline ScaleType ScaleTypeOf(const char* op, const std::string& dtype)
{
    if (dtype == "float32") return kFloatScale;
    if (dtype == "float16") return kHalfScale;
    if (dtype == "bfloat16") return kBfloatScale;
    Refuse(op, "scales is " + dtype + ": it must be float32, float16 or bfloat16.");
}

inline Integers IntegersAt(const char* op, const Shapes& s, void** data, const char** dtypes, int codes, int bits)
{
    CheckDtype(op, "codes", dtypes[codes], "uint8");
    CheckDtype(op, "zeros", dtypes[codes + 1], "uint8");
    const int64_t columns = s.At(codes, 1) * 8 / bits, groups = s.At(codes + 1, 1);
    return {static_cast<const uint8_t*>(data[codes]), static_cast<const uint8_t*>(data[codes + 1]), data[codes + 2],
        ScaleTypeOf(op, dtypes[codes + 2]), columns / kIntegerBlock, groups, columns / 32 / groups};
}

}  // namespace mindlora
