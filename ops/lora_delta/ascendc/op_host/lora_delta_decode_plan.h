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

struct Load {
    uint64_t bytes;
    uint64_t repeats;
};

struct Split {
    uint64_t shrinkCores;
    uint64_t expandCores;
    uint64_t time;
};

// One pass over A and B, shared by cores that shrink and cores that expand.
class Pass {
public:
    Pass(const LoraDeltaTiling& sizes, uint64_t elementBytes, const Platform& chip)
        : sizes_(sizes), chip_(chip), tokens_(sizes.decode.tokensAtOnce), elementBytes_(elementBytes),
          sums_(RoundUp(tokens_ * sizes.rank, 8) * sizeof(float)), shrink_(ShrinkOf(sizes.inFeatures)),
          expand_(ExpandOf(sizes.outFeatures))
    {}

    uint64_t ExchangedSums() const { return sums_; }  // bytes
    Load All() const { return {shrink_.bytes + expand_.bytes, shrink_.repeats + expand_.repeats}; }

    // The split over the most of `cores` whose exchange is worth it, or else the fastest. None if there are not two.
    Split Choose(uint64_t cores) const
    {
        uint64_t allowed = ~uint64_t{0};
        for (uint64_t count = 2; count <= cores; ++count) {
            allowed = std::min(allowed, SplitOf(count).time);
        }
        allowed = std::max(allowed, WithMoreCores(All().bytes));
        for (uint64_t count = cores; count >= 2; --count) {
            const Split split = SplitOf(count);
            if (split.time <= allowed) {
                return split;
            }
        }
        return {};
    }

private:
    // So many cores, with about equal loads. The exchange costs each shrinking core a write and a read of the sums, and
    // each expanding core a read.
    Split SplitOf(uint64_t cores) const
    {
        const uint64_t shrinkTime = Time(shrink_.bytes * cores, shrink_);
        const uint64_t expandTime = Time(expand_.bytes * cores, expand_);
        const uint64_t balanced = cores * shrinkTime / (shrinkTime + expandTime);
        Split best{0, 0, ~uint64_t{0}};
        for (uint64_t s = std::max<uint64_t>(balanced, 1); s <= std::min(balanced + 1, cores - 1); ++s) {
            const uint64_t e = cores - s;
            const Load shrink = ShrinkOf(RoundUp(CeilDiv(sizes_.inFeatures, s), kUnit));
            const Load expand = ExpandOf(RoundUp(CeilDiv(sizes_.outFeatures, e), kUnit));
            const uint64_t time = Time(All().bytes + Cached((2 * s + e) * sums_),
                {std::max(shrink.bytes, expand.bytes), std::max(shrink.repeats, expand.repeats)});
            if (time < best.time) {
                best = {s, e, time};
            }
        }
        return best;
    }

    uint64_t Time(uint64_t bytes, const Load& busiest) const
    {
        return TimeAtBest(bytes, busiest.bytes, busiest.repeats, chip_.vectorCores, chip_);
    }

    Load ShrinkOf(uint64_t columns) const
    {
        return {columns * (sizes_.rank + tokens_) * elementBytes_,
            RowProductsRepeats(sizes_.rank, columns, sizes_.decode.products.columns, tokens_, elementBytes_) +
                ConversionRepeats(tokens_, columns, elementBytes_)};
    }

    Load ExpandOf(uint64_t rows) const
    {
        return {rows * (sizes_.rank + 2 * tokens_) * elementBytes_,
            RowProductsRepeats(rows, sizes_.rank, sizes_.rank, tokens_, elementBytes_) +
                2 * ConversionRepeats(tokens_, rows, elementBytes_)};  // y0 and y
    }

    const LoraDeltaTiling& sizes_;
    const Platform& chip_;
    const uint64_t tokens_, elementBytes_, sums_;
    const Load shrink_, expand_;
};

}  // namespace lora_delta_decode

// Completes a plan whose tiling has the sizes, and returns the time. As many cores take part as the exchange between
// them allows; where tokens of its own cost no core more, there is no exchange.
inline uint64_t PlanDecode(Plan<LoraDeltaTiling>& plan, uint64_t elementBytes, const Platform& chip)
{
    using namespace lora_delta_decode;
    LoraDeltaTiling& sizes = plan.tiling;
    LoraDeltaDecodeTiling& tiles = sizes.decode;
    FillTiles(sizes, elementBytes, chip.unifiedBuffer);
    plan.kind = KernelKind::kVectorSynchronized;

    const uint64_t in = sizes.inFeatures, out = sizes.outFeatures, tokens = tiles.tokensAtOnce;
    const Pass pass(sizes, elementBytes, chip);
    const Load all = pass.All();
    const uint64_t worthwhile = all.bytes <= kOneCore ? 1 : std::min<uint64_t>(chip.vectorCores, all.bytes / kACore);

    const uint64_t own = std::max<uint64_t>(1, std::min<uint64_t>(sizes.tokens, worthwhile));
    const uint64_t ownTokens = CeilDiv(sizes.tokens, own);
    // A and B come from memory once; other cores, and other passes, read them from the cache.
    const uint64_t adapter = (in + out) * sizes.rank * elementBytes, rows = (in + 2 * out) * elementBytes;
    const uint64_t passes = CeilDiv(ownTokens, tokens);
    const uint64_t ownTime = TimeAtBest(adapter + Cached((own * passes - 1) * adapter) + own * ownTokens * rows,
        adapter + Cached((passes - 1) * adapter) + ownTokens * rows, all.repeats * ownTokens / tokens, chip.vectorCores,
        chip);

    const Split joint = pass.Choose(worthwhile);
    const uint64_t jointTime = CeilDiv(sizes.tokens, tokens) * joint.time;
    if (joint.shrinkCores == 0 || ownTime <= jointTime) {
        plan.blocks = own;
        return ownTime;
    }
    tiles.shrinkCores = std::min(joint.shrinkCores, CeilDiv(in, kUnit));
    tiles.expandCores = std::min(joint.expandCores, CeilDiv(out, kUnit));
    plan.blocks = tiles.shrinkCores + tiles.expandCores;
    plan.workspace = (tiles.shrinkCores + 1) * pass.ExchangedSums();
    return jointTime;
}

}  // namespace mindlora
