// How many blocks of an NF4 weight share a scale and an offset. See ../README.md.
#pragma once

#include <cstdint>

namespace mindlora {

constexpr int64_t kNf4Group = 256;

inline int64_t Nf4Over(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// The largest power of two, 256 at most, of which `blocks` have so many groups; 0 if there is none.
inline int64_t Nf4GroupOf(int64_t blocks, int64_t groups)
{
    int64_t size = kNf4Group;
    while (size > 0 && Nf4Over(blocks, size) != groups) size /= 2;
    return size;
}

}  // namespace mindlora
