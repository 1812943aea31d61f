// How lora_delta is spread over the cores. Plain C++, for the host's tiling and for the tests.
#pragma once

#include "ascendc_common/plan.h"
#include "ascendc_common/prefill_plan.h"
#include "../op_kernel/lora_delta_tiling.h"
#include "lora_delta_decode_plan.h"

namespace mindlora {

constexpr uint64_t kLoraDeltaDecodeKey = 1;
constexpr uint64_t kLoraDeltaPrefillKey = 2;
constexpr uint32_t kLoraDeltaMaxRank = 256;

// Any tokens, K, N >= 1; rank 1 to 256. elementBytes is 2 or 4.
inline Plan<LoraDeltaTiling> PlanLoraDelta(
    uint64_t tokens, uint64_t in, uint64_t out, uint64_t rank, uint64_t elementBytes, const Platform& platform)
{
    Plan<LoraDeltaTiling> plan{};
    LoraDeltaTiling& sizes = plan.tiling;
    sizes.tokens = tokens;
    sizes.inFeatures = in;
    sizes.outFeatures = out;
    sizes.rank = rank;
    plan.tilingKey = kLoraDeltaDecodeKey;
    plan.time = PlanDecode(plan, elementBytes, platform);
    if (TakesPrefill(tokens, rank, std::max(in, out), elementBytes, platform)) {
        Plan<LoraDeltaTiling> cube{sizes};
        cube.tiling.decode = {};
        cube.tilingKey = kLoraDeltaPrefillKey;
        cube.time = PlanPrefill(tokens, in, out, rank, platform, cube);
        // More tokens than a fractal has rows are the cube's: on vector cores each costs repeats of its own.
        if (tokens > prefill::kSide || platform.cores == Cores::kCube ||
            (plan.blocks > 1 && cube.time + platform.mixLaunch * kBytesPerNanosecond < plan.time)) {
            return cube;
        }
    }
    return plan;
}

}  // namespace mindlora
