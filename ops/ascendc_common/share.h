// The share of one core.
#pragma once

#include "kernel_operator.h"

namespace mindlora {

struct Range {
    uint32_t begin;
    uint32_t end;

    __aicore__ inline uint32_t Size() const { return end - begin; }
};

// Part `index` of `parts` of [0, count): parts begin at multiples of `unit` and differ by at most one unit.
__aicore__ inline Range Share(uint32_t count, uint32_t unit, uint32_t parts, uint32_t index)
{
    const uint64_t units = (uint64_t{count} + unit - 1) / unit;
    const uint64_t begin = units * index / parts * unit;
    const uint64_t end = units * (index + 1) / parts * unit;
    return {static_cast<uint32_t>(begin < count ? begin : count), static_cast<uint32_t>(end < count ? end : count)};
}

__aicore__ inline uint32_t Least(uint64_t a, uint64_t b) { return static_cast<uint32_t>(a < b ? a : b); }

// The tile of `whole` that begins at `begin`, of at most `size`; empty at the end.
__aicore__ inline Range TileOf(const Range& whole, uint32_t begin, uint32_t size)
{
    return {begin, begin + Least(size, whole.end - begin)};
}

}  // namespace mindlora
