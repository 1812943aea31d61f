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
constexpr uint64_t kExchangeShare = 22;   // the exchange may add 1/22 to the bytes that must be moved

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

}  // namespace lora_delta_decode

// Completes a plan whose tiling has the sizes. Shrinking and expanding cores get equal loads. The exchange costs each
// shrinking core a write and a read of the tokens x rank sums and each expanding core a read: as many cores take part
// as these bytes allow. Where the busiest core moves no more with tokens of its own, there is no exchange.
inline void PlanDecode(Plan<LoraDeltaTiling>& plan, uint64_t elementBytes, const Platform& chip)
{
    using namespace lora_delta_decode;
    LoraDeltaTiling& sizes = plan.tiling;
    LoraDeltaDecodeTiling& tiles = sizes.decode;
    FillTiles(sizes, elementBytes, chip.unifiedBuffer);
    plan.kind = KernelKind::kVectorSynchronized;

    // For one pass over A and B.
    const uint64_t in = sizes.inFeatures, out = sizes.outFeatures, rank = sizes.rank, tokens = tiles.tokensAtOnce;
    const uint64_t shrink = in * (rank + tokens) * elementBytes;
    const uint64_t expand = out * (rank + 2 * tokens) * elementBytes;
    const uint64_t least = shrink + expand;
    const uint64_t worthwhile = least <= kOneCore ? 1 : std::min<uint64_t>(chip.vectorCores, least / kACore);

    const uint64_t own = std::max<uint64_t>(1, std::min<uint64_t>(sizes.tokens, worthwhile));
    const uint64_t ownTokens = CeilDiv(sizes.tokens, own);
    const uint64_t ownBytes =
        CeilDiv(ownTokens, tokens) * (in + out) * rank * elementBytes + ownTokens * (in + 2 * out) * elementBytes;

    const uint64_t sums = RoundUp(tokens * rank, 8) * sizeof(float);
    const uint64_t transfers = least / kExchangeShare / sums;  // = 2 shrinking cores + expanding cores
    const uint64_t joint = std::min(worthwhile, transfers * least / (least + shrink));
    if (joint < 2 || ownBytes <= CeilDiv(sizes.tokens, tokens) * least / joint) {
        plan.blocks = own;
        return;
    }
    const uint64_t shrinkCores = std::min(std::max<uint64_t>(joint * shrink / least, 1), joint - 1);
    tiles.shrinkCores = std::min(shrinkCores, CeilDiv(in, kUnit));
    tiles.expandCores = std::min(joint - shrinkCores, CeilDiv(out, kUnit));
    plan.blocks = tiles.shrinkCores + tiles.expandCores;
    plan.workspace = (tiles.shrinkCores + 1) * sums;
}

}  // namespace mindlora
