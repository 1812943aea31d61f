// The four tensors of a weight in NF4 among the inputs of an operator: codes, absmax, scales, offsets. See
// ../README.md.
#pragma once

#include "cpu_common/aot.h"
#include "nf4_linear/cpu/nf4_groups.h"

namespace mindlora {

// Numbers of a block, and the bytes of its codes.
constexpr int64_t kNf4Block = 64, kNf4Bytes = 32;

// The blocks of a row of so many numbers, or -1.
inline int64_t Nf4BlocksOf(int64_t numbers) { return numbers < 0 ? -1 : Nf4Over(numbers, kNf4Block); }

// The weight whose codes are input `codes`, with rows of `in` numbers, -1 for any.
inline void CheckNf4Weight(const Shapes& s, int codes, int64_t in)
{
    s.CheckRank(codes, "codes", 2);
    s.CheckRank(codes + 1, "absmax", 2);
    s.CheckRank(codes + 2, "scales", 1);
    s.CheckRank(codes + 3, "offsets", 1);
    const int64_t rows = s.At(codes + 1, 0), blocks = s.At(codes + 1, 1), groups = s.At(codes + 2, 0);
    const int64_t bytes = s.At(codes, 1);
    s.CheckSame("N", s.At(codes, 0), rows);
    s.CheckSame("the number of blocks of a row", bytes < 0 ? -1 : Nf4Over(bytes, kNf4Bytes), blocks);
    const bool known = rows >= 0 && blocks >= 0 && groups >= 0;
    if (known && Nf4GroupOf(rows * blocks, groups) == 0) {
        s.CheckSame("the number of groups", Nf4Over(rows * blocks, kNf4Group), groups);
    }
    s.CheckSame("the number of groups", groups, s.At(codes + 3, 0));
    s.CheckSame("the number of blocks of a row", Nf4BlocksOf(in), blocks);
}

inline void CheckNf4Dtypes(const char* op, const char** dtypes, int codes)
{
    CheckDtype(op, "codes", dtypes[codes], "uint8");
    CheckDtype(op, "absmax", dtypes[codes + 1], "uint8");
    CheckDtype(op, "scales", dtypes[codes + 2], "float32");
    CheckDtype(op, "offsets", dtypes[codes + 3], "float32");
}

// A weight and what is needed to read it. K is padded to whole blocks in each row.
struct Nf4 {
    const uint8_t* codes;
    const uint8_t* absmax;
    const float* scales;
    const float* offsets;
    int64_t blocks;  // of a row
    int64_t group;   // blocks that share a scale and an offset
};

inline Nf4 Nf4At(const Shapes& s, void** data, int codes)
{
    const int64_t blocks = s.At(codes + 1, 1), all = s.At(codes + 1, 0) * blocks;
    return {static_cast<const uint8_t*>(data[codes]), static_cast<const uint8_t*>(data[codes + 1]),
        static_cast<const float*>(data[codes + 2]), static_cast<const float*>(data[codes + 3]), blocks,
        Nf4GroupOf(all, s.At(codes + 2, 0))};
}

}  // namespace mindlora
