// How lora_linear is spread over the vector cores. Plain C++, for the host's tiling and for the tests.
#pragma once

#include <algorithm>

#include "ascendc_common/plan.h"
#include "ascendc_common/row_products_plan.h"
#include "../op_kernel/lora_linear_tiling.h"

namespace mindlora {

constexpr uint64_t kLoraLinearKey = 1;

// Any tokens, K, N >= 1; rank 1 to 256. elementBytes is 2 or 4.
inline Plan<LoraLinearTiling> PlanLoraLinear(uint64_t tokens, uint64_t in, uint64_t out, uint64_t rank, bool hasBias,
    uint64_t elementBytes, const Platform& chip)
{
    constexpr uint64_t kMostTokens = 48;     // at once
    constexpr uint64_t kOneCore = 32 * 1024; // bytes: so little is not worth a synchronization
    constexpr uint64_t kACore = 8 * 1024;    // bytes: nor is a core for less than this
    Plan<LoraLinearTiling> plan{};
    plan.tilingKey = kLoraLinearKey;
    plan.kind = KernelKind::kVectorSynchronized;
    LoraLinearTiling& sizes = plan.tiling;
    sizes.tokens = tokens;
    sizes.inFeatures = in;
    sizes.outFeatures = out;
    sizes.rank = rank;
    sizes.hasBias = hasBias;

    // Of 192 KiB of unified buffer, RowProducts takes up to 108, sums and y up to 48, x A^T twice up to 16.
    const uint64_t low = chip.unifiedBuffer / 48;
    const uint64_t most = std::min({tokens, low / RoundUp(rank, 8), kMostTokens});
    sizes.tokensAtOnce = std::max<uint64_t>(1, most);
    sizes.products = PlanRowProducts(out, sizes.tokensAtOnce, chip.unifiedBuffer);
    const uint64_t vector = sizes.products.vectorElements;
    sizes.rowsAtOnce = RoundDown(std::min(2 * vector / sizes.tokensAtOnce, vector), 16);
    sizes.expandRows = RoundDown(sizes.products.matrixElements / RoundUp(rank, 32 / elementBytes), 16);

    const uint64_t weights = ((in + rank) * out + in * rank) * elementBytes;
    plan.blocks = weights <= kOneCore ? 1 : std::min<uint64_t>(chip.vectorCores, weights / kACore);
    plan.workspace = plan.blocks == 1 ? 0 : tokens * rank * sizeof(float);
    return plan;
}

}  // namespace mindlora
