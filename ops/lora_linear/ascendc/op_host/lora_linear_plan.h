// How lora_linear is spread over the cores. Plain C++, for the host's tiling and for the tests.
#pragma once

#include <algorithm>

#include "ascendc_common/plan.h"
#include "ascendc_common/row_products_plan.h"
#include "../op_kernel/lora_linear_tiling.h"

namespace mindlora {

constexpr uint64_t kLoraLinearVectorKey = 1;
constexpr uint64_t kLoraLinearCubeKey = 2;

// From two tokens on, vector cores compute more slowly than W arrives; more than 16 tokens are not for this kernel.
inline bool LoraLinearTakesCube(uint64_t tokens, uint64_t in, uint64_t elementBytes, const Platform& chip)
{
    constexpr uint64_t kMostStride = 65535;  // between rows that become fractals while they are read
    return elementBytes == 2 && tokens >= 2 && tokens <= 16 && in <= kMostStride && PairedCubeCores(chip) > 0 &&
        chip.cores != Cores::kVector;
}

inline void PlanLoraLinearOnVectorCores(uint64_t elementBytes, const Platform& chip, Plan<LoraLinearTiling>& plan)
{
    constexpr uint64_t kMostTokens = 48;      // at a time
    constexpr uint64_t kOneCore = 32 * 1024;  // bytes: less is not worth a synchronization
    constexpr uint64_t kACore = 8 * 1024;     // bytes: less is not worth another core
    const LoraLinearTiling& sizes = plan.tiling;
    const uint64_t tokens = sizes.tokens, in = sizes.inFeatures, out = sizes.outFeatures, rank = sizes.rank;

    // Of 192 KiB of unified buffer, RowProducts takes up to 108, sums and y up to 48, x A^T twice up to 16.
    const uint64_t low = chip.unifiedBuffer / 48;
    const uint64_t most = std::min({tokens, low / RoundUp(rank, 8), kMostTokens});
    LoraLinearVectorTiling& tiling = plan.tiling.vector;
    tiling.tokensAtOnce = std::max<uint64_t>(1, most);
    tiling.products = PlanRowProducts(out, tiling.tokensAtOnce, chip.unifiedBuffer);
    const uint64_t vector = tiling.products.vectorElements;
    tiling.rowsAtOnce = RoundDown(std::min(2 * vector / tiling.tokensAtOnce, vector), 16);
    tiling.expandRows = RoundDown(tiling.products.matrixElements / RoundUp(rank, 32 / elementBytes), 16);

    const uint64_t weights = ((in + rank) * out + in * rank) * elementBytes;
    plan.tilingKey = kLoraLinearVectorKey;
    plan.kind = KernelKind::kVectorSynchronized;
    plan.blocks = weights <= kOneCore ? 1 : std::min<uint64_t>(chip.vectorCores, weights / kACore);
    plan.workspace = plan.blocks == 1 ? 0 : tokens * rank * sizeof(float);
}

inline void PlanLoraLinearOnCubeCores(const Platform& chip, Plan<LoraLinearTiling>& plan)
{
    constexpr uint64_t kSide = 16;    // of a fractal
    constexpr uint64_t kElement = 2;  // bytes
    constexpr uint64_t kStep = 256;   // whole bursts of global memory, and the largest rank
    const LoraLinearTiling& sizes = plan.tiling;
    plan.tilingKey = kLoraLinearCubeKey;
    plan.kind = KernelKind::kCubeAndVector;
    // Every core has columns of y, at least one fractal.
    plan.blocks = std::min(PairedCubeCores(chip), CeilDiv(sizes.outFeatures, kSide));

    LoraLinearCubeTiling& tiling = plan.tiling.cube;
    tiling.shrinkSlices = std::min<uint64_t>(plan.blocks, CeilDiv(sizes.inFeatures, kSide));
    tiling.step = kStep;
    // Two tiles fill L0B; two sums fill L0C, or as much of it as a tile holds of a bias.
    tiling.tileElements = chip.l0b / 2 / kElement;
    tiling.rowsAtOnce = RoundDown(std::min(chip.l0c / 2 / sizeof(float), chip.l0b / 2 / kElement) / kSide, kSide);
    // Two tiles of partial sums take half of the unified buffer.
    tiling.reduceTile = RoundDown(chip.unifiedBuffer / 4 / sizeof(float) / tiling.shrinkSlices, kSide);
    const uint64_t low = RoundUp(uint64_t{sizes.tokens} * sizes.rank, kSide);
    const uint64_t ones = kSide * kSide;
    plan.workspace = low * (sizeof(float) * tiling.shrinkSlices + kElement) + ones * kElement;
}

// Any tokens, K, N >= 1; rank 1 to 256. elementBytes is 2 or 4.
inline Plan<LoraLinearTiling> PlanLoraLinear(uint64_t tokens, uint64_t in, uint64_t out, uint64_t rank, bool hasBias,
    uint64_t elementBytes, const Platform& chip)
{
    Plan<LoraLinearTiling> plan{};
    LoraLinearTiling& sizes = plan.tiling;
    sizes.tokens = tokens;
    sizes.inFeatures = in;
    sizes.outFeatures = out;
    sizes.rank = rank;
    sizes.hasBias = hasBias;
    if (LoraLinearTakesCube(tokens, in, elementBytes, chip)) {
        PlanLoraLinearOnCubeCores(chip, plan);
    } else {
        PlanLoraLinearOnVectorCores(elementBytes, chip, plan);
    }
    return plan;
}

}  // namespace mindlora
