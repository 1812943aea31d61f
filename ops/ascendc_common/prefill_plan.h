// The split of a LoRA product for many tokens over the cube cores.
#pragma once

#include <algorithm>
#include <vector>

#include "ascendc_common/plan.h"
#include "ascendc_common/prefill_tiling.h"

namespace mindlora {
namespace prefill {

constexpr uint64_t kSide = 16;           // of a fractal
constexpr uint64_t kElement = 2;         // bytes
constexpr uint64_t kLeastTokens = 2;     // one is bound by bytes on the vector cores too
constexpr uint64_t kConstants = 2;       // fractals that stay in L0B
constexpr uint64_t kMoreParts = 16;      // more parts may add 1/16 to the least bytes
constexpr uint64_t kMostStride = 65535;  // between rows that become fractals while they are read
constexpr uint64_t kMostLow = 1u << 28;  // strides between partial sums are 32-bit numbers of bytes

inline uint64_t CeilDiv(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit; }
inline uint64_t RoundUp(uint64_t value) { return CeilDiv(value, kSide) * kSide; }
inline uint64_t RoundDown(uint64_t value) { return value / kSide * kSide; }

// Parts of `rows` tokens by `width` of K or N.
struct Split {
    uint64_t rows;
    uint64_t width;
    uint64_t slices;
    uint64_t parts;
};

// What one part moves, and how often it multiplies two fractals, which takes as long as a repeat.
struct Load {
    uint64_t bytes;
    uint64_t products;
};

// All splits that keep a slice of A or B within `mostWidth`.
inline std::vector<Split> SplitsOf(uint64_t tokens, uint64_t size, uint64_t mostWidth, uint64_t cores)
{
    std::vector<Split> splits;
    const uint64_t leastSlices = CeilDiv(size, mostWidth);
    for (uint64_t wanted = 1; wanted <= std::min(cores, CeilDiv(tokens, kSide)); ++wanted) {
        const uint64_t rows = RoundUp(CeilDiv(tokens, wanted)), groups = CeilDiv(tokens, rows);
        for (uint64_t slices = leastSlices; slices <= std::max(cores / groups, leastSlices); ++slices) {
            const uint64_t width = RoundUp(CeilDiv(size, slices));
            splits.push_back({rows, width, CeilDiv(size, width), groups * CeilDiv(size, width)});
        }
    }
    return splits;
}

// The fastest split, or one over more cores that adds hardly anything to the `least` bytes. With few groups of tokens,
// A and B are read few times; with few slices, little is exchanged; with many parts, no core has much to do.
// loadOf(split) is that of one part. `time` becomes its time, as the bytes that the chip moves in it.
template <class LoadOf>
Split Choose(const std::vector<Split>& splits, uint64_t cores, uint64_t least, const LoadOf& loadOf, uint64_t& time)
{
    const auto timeOf = [&](const Split& split) {
        const Load load = loadOf(split);
        const uint64_t turns = CeilDiv(split.parts, cores);
        return std::max({split.parts * load.bytes, turns * load.bytes * CeilDiv(cores, kDraw),
            turns * load.products * kBytesPerRepeat});
    };
    uint64_t allowed = ~uint64_t{0};
    for (const Split& split : splits) {
        allowed = std::min(allowed, timeOf(split));
    }
    allowed = std::max(allowed, least + least / kMoreParts);
    Split best{};
    for (const Split& split : splits) {
        const uint64_t now = timeOf(split), parts = std::min(split.parts, cores);
        const uint64_t bestParts = std::min(best.parts, cores);
        if (now <= allowed && (parts > bestParts || (parts == bestParts && now < time))) {
            time = now;
            best = split;
        }
    }
    return best;
}

}  // namespace prefill

// `stride` is the longest row that has to become fractals: of x, A, y0 or B.
inline bool TakesPrefill(uint64_t tokens, uint64_t rank, uint64_t stride, uint64_t elementBytes)
{
    using namespace prefill;
    return elementBytes == kElement && tokens >= kLeastTokens && stride <= kMostStride && tokens * rank <= kMostLow;
}

// Fills in plan.tiling.prefill and how to launch it. `rank` is the largest one in use. Returns the time, as the bytes
// that the chip moves in it.
template <class Tiling>
uint64_t PlanPrefill(
    uint64_t tokens, uint64_t in, uint64_t out, uint64_t rank, const Platform& chip, Plan<Tiling>& plan)
{
    using namespace prefill;
    const uint64_t low = tokens * rank;
    const uint64_t cores = std::min(chip.cubeCores, chip.vectorCores / 2);
    const uint64_t constants = kConstants * kSide * kSide * kElement;
    // Two tiles of x or y0 fill half of L0A, two of A or B what the constants leave of L0B.
    const uint64_t step = RoundDown(
        std::min(chip.l0a / 4 / kElement / kPrefillTileRows, (chip.l0b - constants) / 2 / kElement / RoundUp(rank)));
    // The rest of L1 is for a slice of A or B.
    const uint64_t tiles = kElement * kPrefillTileRows * (kPrefillStages * step + RoundUp(rank));
    const uint64_t mostWidth = RoundDown((chip.l1 - tiles) / kElement / RoundUp(rank));

    // Partial sums are written by the cube cores and read by the vector cores; y0 is multiplied by one fractal.
    uint64_t shrinkTime = 0, expandTime = 0;
    const auto shrinkLoad = [&](const Split& split) {
        const uint64_t rows = std::min(split.rows, tokens);
        return Load{kElement * (rows + rank) * split.width + 2 * sizeof(float) * rows * rank,
            CeilDiv(rows, kSide) * CeilDiv(rank, kSide) * CeilDiv(split.width, kSide)};
    };
    const auto expandLoad = [&](const Split& split) {
        const uint64_t rows = std::min(split.rows, tokens);
        return Load{kElement * ((2 * rows + rank) * split.width + rows * rank),
            CeilDiv(rows, kSide) * (CeilDiv(rank, kSide) + 1) * CeilDiv(split.width, kSide)};
    };
    const Split shrink =
        Choose(SplitsOf(tokens, in, mostWidth, cores), cores, kElement * (tokens + rank) * in, shrinkLoad, shrinkTime);
    const Split expand = Choose(
        SplitsOf(tokens, out, mostWidth, cores), cores, kElement * (2 * tokens + rank) * out, expandLoad, expandTime);
    PrefillTiling& tiling = plan.tiling.prefill;
    tiling.shrinkRows = shrink.rows;
    tiling.shrinkDepth = shrink.width;
    tiling.shrinkSlices = shrink.slices;
    tiling.expandRows = expand.rows;
    tiling.expandWidth = expand.width;
    tiling.expandSlices = expand.slices;
    tiling.step = step;
    // Two tiles of partial sums take half of the unified buffer.
    tiling.reduceTile = RoundDown(chip.unifiedBuffer / 4 / sizeof(float) / shrink.slices);
    plan.blocks = std::min(cores, std::max(shrink.parts, expand.parts));
    plan.kind = KernelKind::kCubeAndVector;
    plan.workspace = RoundUp(low) * (sizeof(float) * shrink.slices + kElement) + constants;
    return shrinkTime + expandTime;
}

}  // namespace mindlora
