// The split of a LoRA product over the cube cores: for many tokens, and for few with much arithmetic.
#pragma once

#include <algorithm>
#include <vector>

#include "ascendc_common/plan.h"
#include "ascendc_common/prefill_tiling.h"

namespace mindlora {
namespace prefill {

constexpr uint64_t kSide = 16;                           // of a fractal
constexpr uint64_t kElement = 2;                         // bytes
constexpr uint64_t kLeastTokens = 2;                     // one is bound by bytes on the vector cores too
constexpr uint64_t kFractal = kSide * kSide * kElement;  // of the identity, which stays in L0B
constexpr uint64_t kMostStride = 65535;                  // between rows that become fractals while they are read
constexpr uint64_t kMostLow = 1u << 28;                  // strides between partial sums are 32-bit numbers of bytes

// Parts of `rows` tokens by `width` of K or N.
struct Split {
    uint64_t rows;
    uint64_t width;
    uint64_t slices;
    uint64_t parts;
};

// What all parts move, what one of them moves, and how often that one multiplies two fractals, which takes as long as a
// repeat. A or B comes from memory once; groups of tokens after the first read it from the cache.
struct Load {
    uint64_t allBytes;
    uint64_t bytes;
    uint64_t products;
};

// Partial sums are written by the cube cores and read by the vector cores.
inline Load ShrinkLoad(const Split& split, uint64_t tokens, uint64_t rank)
{
    const uint64_t rows = std::min(split.rows, tokens), size = split.slices * split.width;
    const uint64_t again = kElement * (split.parts / split.slices - 1) * rank * size;
    return {kElement * (tokens + rank) * size + Cached(again + 2 * sizeof(float) * split.slices * tokens * rank),
        kElement * (rows + rank) * split.width + Cached(2 * sizeof(float) * rows * rank),
        CeilDiv(rows, kSide) * CeilDiv(rank, kSide) * CeilDiv(split.width, kSide)};
}

// y0 is multiplied by an identity.
inline Load ExpandLoad(const Split& split, uint64_t tokens, uint64_t rank)
{
    const uint64_t rows = std::min(split.rows, tokens), size = split.slices * split.width;
    const uint64_t again = kElement * (split.parts / split.slices - 1) * rank * size;
    return {kElement * (2 * tokens + rank) * size +
            Cached(again + kElement * split.slices * tokens * rank + split.parts * kFractal),
        kElement * (2 * rows + rank) * split.width + Cached(kElement * rows * rank + kFractal),
        CeilDiv(rows, kSide) * (CeilDiv(rank, kSide) + 1) * CeilDiv(split.width, kSide)};
}

// All splits over the cores that keep a slice of A or B within `mostWidth`.
inline std::vector<Split> SplitsOf(uint64_t tokens, uint64_t size, uint64_t mostWidth, uint64_t cores)
{
    std::vector<Split> splits;
    const uint64_t leastSlices = CeilDiv(size, mostWidth);
    for (uint64_t wanted = 1; wanted <= std::min(cores, CeilDiv(tokens, kSide)); ++wanted) {
        const uint64_t rows = RoundUp(CeilDiv(tokens, wanted), kSide), groups = CeilDiv(tokens, rows);
        for (uint64_t slices = leastSlices; slices <= std::max(cores / groups, leastSlices); ++slices) {
            const uint64_t width = RoundUp(CeilDiv(size, slices), kSide);
            splits.push_back({rows, width, CeilDiv(size, width), groups * CeilDiv(size, width)});
        }
    }
    return splits;
}

// Cores take parts in turns.
inline uint64_t TimeOf(const Load& load, uint64_t parts, const Platform& chip)
{
    const uint64_t cores = PairedCubeCores(chip), turns = CeilDiv(parts, cores);
    return TimeAtBest(load.allBytes, turns * load.bytes, turns * load.products, cores, chip);
}

// The split over the most cores that takes no longer than `allowed`, or than the fastest. With few groups of tokens, A
// and B are read few times; with few slices, little is exchanged; with many parts, no core has much to do.
// loadOf(split) is the load of one part. `time` becomes that of the split.
template <class LoadOf>
Split Choose(
    const std::vector<Split>& splits, const Platform& chip, uint64_t allowed, const LoadOf& loadOf, uint64_t& time)
{
    const uint64_t cores = PairedCubeCores(chip);
    std::vector<uint64_t> times;
    for (const Split& split : splits) {
        times.push_back(TimeOf(loadOf(split), split.parts, chip));
    }
    allowed = std::max(allowed, *std::min_element(times.begin(), times.end()));
    Split best{};
    uint64_t most = 0;
    for (size_t i = 0; i < splits.size(); ++i) {
        const uint64_t busy = std::min(splits[i].parts, cores);
        if (times[i] <= allowed && (busy > most || (busy == most && times[i] < time))) {
            best = splits[i];
            most = busy;
            time = times[i];
        }
    }
    return best;
}

// The widths of tiles: fills in tiling.step, and returns the most of a slice of A or B.
inline uint64_t PlanTiles(uint64_t rank, const Platform& chip, PrefillTiling& tiling)
{
    // Two tiles of x or y0 fill half of L0A, two of A or B what the identity leaves of L0B.
    tiling.step = RoundDown(std::min(chip.l0a / 4 / kElement / kPrefillTileRows,
                                (chip.l0b - kFractal) / 2 / kElement / RoundUp(rank, kSide)),
        kSide);
    // The rest of L1 is for a slice of A or B.
    const uint64_t tiles = kElement * kPrefillTileRows * (kPrefillStages * tiling.step + RoundUp(rank, kSide));
    return RoundDown((chip.l1 - tiles) / kElement / RoundUp(rank, kSide), kSide);
}

}  // namespace prefill

// `stride` is the longest row that has to become fractals: of x, A, y0 or B.
inline bool TakesPrefill(uint64_t tokens, uint64_t rank, uint64_t stride, uint64_t elementBytes, const Platform& chip)
{
    using namespace prefill;
    return elementBytes == kElement && tokens >= kLeastTokens && stride <= kMostStride && tokens * rank <= kMostLow &&
        PairedCubeCores(chip) > 0 && chip.cores != Cores::kVector;
}

// Fills in plan.tiling.prefill and how to launch it, and returns the time. `rank` is the largest one in use.
template <class Tiling>
uint64_t PlanPrefill(
    uint64_t tokens, uint64_t in, uint64_t out, uint64_t rank, const Platform& chip, Plan<Tiling>& plan)
{
    using namespace prefill;
    PrefillTiling& tiling = plan.tiling.prefill;
    const uint64_t cores = PairedCubeCores(chip), mostWidth = PlanTiles(rank, chip, tiling);
    const uint64_t leastShrink = kElement * (tokens + rank) * in, leastExpand = kElement * (2 * tokens + rank) * out;

    uint64_t shrinkTime = 0, expandTime = 0;
    const Split shrink = Choose(
        SplitsOf(tokens, in, mostWidth, cores), chip, WithMoreCores(leastShrink),
        [&](const Split& split) { return ShrinkLoad(split, tokens, rank); }, shrinkTime);
    const uint64_t all = WithMoreCores(leastShrink + leastExpand);
    const Split expand = Choose(
        SplitsOf(tokens, out, mostWidth, cores), chip, all > shrinkTime ? all - shrinkTime : 0,
        [&](const Split& split) { return ExpandLoad(split, tokens, rank); }, expandTime);
    tiling.shrinkRows = shrink.rows;
    tiling.shrinkDepth = shrink.width;
    tiling.shrinkSlices = shrink.slices;
    tiling.expandRows = expand.rows;
    tiling.expandWidth = expand.width;
    tiling.expandSlices = expand.slices;
    // Two tiles of partial sums take half of the unified buffer.
    tiling.reduceTile = RoundDown(chip.unifiedBuffer / 4 / sizeof(float) / shrink.slices, kSide);
    plan.blocks = std::min(cores, std::max(shrink.parts, expand.parts));
    plan.kind = KernelKind::kCubeAndVector;
    plan.workspace = RoundUp(tokens * rank, kSide) * (sizeof(float) * shrink.slices + kElement) + kFractal;
    return shrinkTime + expandTime;
}

}  // namespace mindlora
