// The split of a LoRA product for many tokens over the cube cores.
#pragma once

#include <algorithm>

#include "ascendc_common/plan.h"
#include "ascendc_common/prefill_tiling.h"

namespace mindlora {
namespace prefill {

constexpr uint64_t kSide = 16;           // of a fractal
constexpr uint64_t kElement = 2;         // bytes
constexpr uint64_t kLeastTokens = 17;    // fewer fill one row of fractals only, and are left to the vector cores
constexpr uint64_t kConstants = 2;       // fractals that stay in L0B
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

// The split whose busiest core moves the fewest bytes. With few groups of tokens, A and B are read few times; with few
// slices, little is exchanged. bytes(split) is what one part moves.
template <class Bytes>
Split LeastBytes(uint64_t tokens, uint64_t size, uint64_t mostWidth, uint64_t cores, const Bytes& bytes)
{
    Split best{};
    uint64_t least = ~uint64_t{0};
    for (uint64_t wanted = 1; wanted <= std::min(cores, CeilDiv(tokens, kSide)); ++wanted) {
        Split split{};
        split.rows = RoundUp(CeilDiv(tokens, wanted));
        const uint64_t groups = CeilDiv(tokens, split.rows);
        split.width = RoundUp(CeilDiv(size, std::max(cores / groups, CeilDiv(size, mostWidth))));
        split.slices = CeilDiv(size, split.width);
        split.parts = groups * split.slices;
        const uint64_t cost = CeilDiv(split.parts, cores) * bytes(split);
        if (cost < least) {
            least = cost;
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

// Fills in plan.tiling.prefill and how to launch it. `rank` is the largest one in use.
template <class Tiling>
void PlanPrefill(uint64_t tokens, uint64_t in, uint64_t out, uint64_t rank, const Platform& chip, Plan<Tiling>& plan)
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

    const Split shrink = LeastBytes(tokens, in, mostWidth, cores, [&](const Split& split) {
        const uint64_t exchanged = split.rows * rank + split.slices * low / cores;  // the latter by the vector cores
        return kElement * (split.rows + rank) * split.width + sizeof(float) * exchanged;
    });
    const Split expand = LeastBytes(tokens, out, mostWidth, cores,
        [&](const Split& split) { return kElement * ((2 * split.rows + rank) * split.width + split.rows * rank); });
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
}

}  // namespace mindlora
