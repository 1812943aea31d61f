// How nf4_dequantize is spread over the vector cores. Plain C++.
#pragma once

#include <algorithm>
#include <iterator>

#include "../op_kernel/nf4_dequantize_tiling.h"
#include "ascendc_common/plan.h"

namespace mindlora {

constexpr int64_t kNf4Block = 64;             // numbers that share an absmax
constexpr int64_t kNf4Bytes = kNf4Block / 2;  // of the codes of a block
constexpr int64_t kNf4Group = 256;            // blocks that share a scale and an offset
constexpr int64_t kNf4MaxBlocks = INT32_MAX;  // a 32-bit number in the kernel
// Dettmers et al., QLoRA, 2023: quantiles of a normal distribution, scaled to [-1, 1], with an exact zero.
constexpr float kNf4Table[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f,
    0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
    0.7229568362236023f, 1.0f};

constexpr int64_t Nf4BlocksOf(int64_t columns) { return (columns + kNf4Block - 1) / kNf4Block; }
constexpr int64_t Nf4GroupsOf(int64_t blocks) { return (blocks + kNf4Group - 1) / kNf4Group; }

// What the kernel holds on chip for a block: its bytes twice, as half and as offsets; their values; absmax and its data
// block; W twice, and for 16 bits once more as float.
constexpr uint64_t Nf4BytesOnChip(uint64_t elementBytes)
{
    const uint64_t numbers = 2 * elementBytes + (elementBytes == sizeof(float) ? 0 : sizeof(float));
    return (kNf4Bytes + 1) * (2 + 2) + kNf4Bytes * (4 + 4) + 4 + 32 + kNf4Block * numbers;
}

// Any rows and columns from 1, as long as there are at most kNf4MaxBlocks blocks. elementBytes is 2 or 4.
inline Plan<Nf4DequantizeTiling> PlanNf4Dequantize(
    int64_t rows, int64_t columns, uint64_t elementBytes, const Platform& chip)
{
    constexpr uint64_t kMost = 128;  // blocks of a tile: an instruction has 255 repeats, and tiles fill a group
    constexpr uint64_t kUnit = 32;   // blocks, and the least tile: less is not worth another core
    constexpr uint64_t kTables = 2 * 256 * sizeof(float) + 224;  // with the padding that the kernel explains
    const int64_t rowBlocks = Nf4BlocksOf(columns);
    const bool whole = columns % kNf4Block == 0;  // then all rows are one
    Nf4DequantizeTiling t{};
    t.blocks = static_cast<uint32_t>(rows * rowBlocks);
    t.rowBlocks = static_cast<uint32_t>(whole ? rows * rowBlocks : rowBlocks);
    t.columns = static_cast<uint64_t>(whole ? rows * columns : columns);
    uint64_t tile = kMost;
    while (tile > kUnit && tile * Nf4BytesOnChip(elementBytes) + kTables > chip.unifiedBuffer) tile /= 2;
    t.tile = static_cast<uint32_t>(tile);
    t.unit = static_cast<uint32_t>(kUnit);
    std::copy(std::begin(kNf4Table), std::end(kNf4Table), t.table);
    const auto units = (t.blocks + kUnit - 1) / kUnit;
    return {t, static_cast<uint32_t>(std::min<uint64_t>(chip.vectorCores, units)), 0, 0, KernelKind::kVector};
}

}  // namespace mindlora
