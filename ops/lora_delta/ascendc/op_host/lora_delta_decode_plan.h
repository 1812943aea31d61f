// How lora_delta for few tokens is spread over the vector cores. Plain C++.
#pragma once

#include <algorithm>

#include "ascendc_common/plan.h"
#include "ascendc_common/row_products_plan.h"
#include "../op_kernel/lora_delta_tiling.h"

namespace mindlora {
namespace lora_delta_decode {

constexpr uint64_t kUnit = 16;            // columns and rows are dealt out in units of so many: whole data blocks
constexpr uint64_t kMostTokens = 48;      // at a time
constexpr uint64_t kOneCore = 16 * 1024;  // bytes: less is not worth two synchronizations
constexpr uint64_t kACore = 2 * 1024;     // bytes: less is not worth another core
constexpr uint64_t kMoreCores = 22;       // more cores than the fastest plan's may cost 1/22 of its time

// Of 192 KiB of unified buffer, RowProducts takes up to 108 and y up to 24; x A^T may have 16, twice: once to be
// written and once to be read back.
inline void FillTiles(LoraDeltaTiling& sizes, uint64_t elementBytes, uint64_t unifiedBuffer)
{
    LoraDeltaDecodeTiling& tiles = sizes.decode;
    const uint64_t low = unifiedBuffer / 48;
    const uint64_t tokens = std::min({uint64_t{sizes.tokens}, low / RoundUp(sizes.rank, 8), kMostTokens});
    tiles.tokensAtOnce = std::max<uint64_t>(1, tokens);
    tiles.products = PlanRowProducts(sizes.rank, tiles.tokensAtOnce, unifiedBuffer);
    tiles.expandRows = RoundDown(std::min<uint64_t>(tiles.products.vectorElements / tiles.tokensAtOnce,
                                     tiles.products.matrixElements / RoundUp(sizes.rank, 32 / elementBytes)),
        kUnit);
}

// What the cores share for one pass over A and B.
struct Work {
    uint64_t bytes;
    uint64_t repeats;
};

inline Work ShrinkOf(const LoraDeltaTiling& sizes, uint64_t elementBytes)
{
    const uint64_t in = sizes.inFeatures, tokens = sizes.decode.tokensAtOnce;
    return {in * (sizes.rank + tokens) * elementBytes,
        RowProductsRepeats(sizes.rank, in, sizes.decode.products.columns, tokens, elementBytes)};
}

inline Work ExpandOf(const LoraDeltaTiling& sizes, uint64_t elementBytes)
{
    const uint64_t out = sizes.outFeatures, tokens = sizes.decode.tokensAtOnce;
    const uint64_t converted = elementBytes < sizeof(float) ? 2 * tokens * CeilDiv(out, 64) : 0;  // y0 and y
    return {out * (sizes.rank + 2 * tokens) * elementBytes,
        RowProductsRepeats(out, sizes.rank, sizes.rank, tokens, elementBytes) + converted};
}

// A time, as the bytes that the chip moves in it: the larger of the bytes, `busiest.bytes` of which are the busiest
// core's, and of that core's repeats.
inline uint64_t TimeOf(const Work& busiest, uint64_t cores, uint64_t exchange, uint64_t allCores)
{
    const uint64_t bytes = busiest.bytes * std::max(cores, CeilDiv(allCores, kDraw));
    return std::max(bytes + exchange, busiest.repeats * kBytesPerRepeat);
}

struct Split {
    uint64_t shrinkCores;
    uint64_t expandCores;
    uint64_t time;
};

// The fastest split of so many cores. The exchange costs each shrinking core a write and a read of the sums and each
// expanding core a read.
inline Split SplitOf(uint64_t cores, const Work& shrink, const Work& expand, uint64_t sums, uint64_t allCores)
{
    Split best{0, 0, ~uint64_t{0}};
    for (uint64_t s = 1; s < cores; ++s) {
        const uint64_t e = cores - s;
        const Work busiest{std::max(CeilDiv(shrink.bytes, s), CeilDiv(expand.bytes, e)),
            std::max(CeilDiv(shrink.repeats, s), CeilDiv(expand.repeats, e))};
        const uint64_t time = TimeOf(busiest, cores, (2 * s + e) * sums, allCores);
        if (time < best.time) {
            best = {s, e, time};
        }
    }
    return best;
}

// The split over the most cores that costs hardly more than the fastest one over any number of cores.
inline Split MostCores(uint64_t mostCores, const Work& shrink, const Work& expand, uint64_t sums, uint64_t allCores)
{
    uint64_t least = ~uint64_t{0};
    for (uint64_t cores = 2; cores <= mostCores; ++cores) {
        least = std::min(least, SplitOf(cores, shrink, expand, sums, allCores).time);
    }
    for (uint64_t cores = mostCores; cores >= 2; --cores) {
        const Split split = SplitOf(cores, shrink, expand, sums, allCores);
        if (split.time <= least + least / kMoreCores) {
            return split;
        }
    }
    return {0, 0, least};
}

}  // namespace lora_delta_decode

// Completes a plan whose tiling has the sizes. As many cores take part as the exchange between them allows; where
// tokens of its own cost no core more, there is no exchange. Returns the time, as the bytes that the chip moves in it.
inline uint64_t PlanDecode(Plan<LoraDeltaTiling>& plan, uint64_t elementBytes, const Platform& chip)
{
    using namespace lora_delta_decode;
    LoraDeltaTiling& sizes = plan.tiling;
    LoraDeltaDecodeTiling& tiles = sizes.decode;
    FillTiles(sizes, elementBytes, chip.unifiedBuffer);
    plan.kind = KernelKind::kVectorSynchronized;

    const uint64_t tokens = tiles.tokensAtOnce;
    const Work shrink = ShrinkOf(sizes, elementBytes), expand = ExpandOf(sizes, elementBytes);
    const uint64_t least = shrink.bytes + expand.bytes;
    const uint64_t worthwhile = least <= kOneCore ? 1 : std::min<uint64_t>(chip.vectorCores, least / kACore);

    const uint64_t own = std::max<uint64_t>(1, std::min<uint64_t>(sizes.tokens, worthwhile));
    const uint64_t ownTokens = CeilDiv(sizes.tokens, own), passes = CeilDiv(ownTokens, tokens);
    const uint64_t in = sizes.inFeatures, out = sizes.outFeatures;
    const uint64_t ownBytes = (passes * (in + out) * sizes.rank + ownTokens * (in + 2 * out)) * elementBytes;
    const uint64_t ownRepeats = (shrink.repeats + expand.repeats) * ownTokens / tokens;
    const uint64_t ownTime = TimeOf({ownBytes, ownRepeats}, own, 0, chip.vectorCores);

    const uint64_t sums = RoundUp(tokens * sizes.rank, 8) * sizeof(float);
    const Split joint = MostCores(worthwhile, shrink, expand, sums, chip.vectorCores);
    const uint64_t jointTime = joint.shrinkCores == 0 ? joint.time : CeilDiv(sizes.tokens, tokens) * joint.time;
    if (ownTime <= jointTime) {
        plan.blocks = own;
        return ownTime;
    }
    tiles.shrinkCores = std::min(joint.shrinkCores, CeilDiv(in, kUnit));
    tiles.expandCores = std::min(joint.expandCores, CeilDiv(out, kUnit));
    plan.blocks = tiles.shrinkCores + tiles.expandCores;
    plan.workspace = (tiles.shrinkCores + 1) * sums;
    return jointTime;
}

}  // namespace mindlora
