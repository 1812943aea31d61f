// For the operators beside this file: lets kernels.py call an operator's plan. Not part of what CANN compiles.
#pragma once

#include <cstring>

#include "ascendc_common/plan.h"
#include "model/python_entry.h"

struct MindloraModelPlan {
    uint32_t blocks;
    uint32_t kind;
    uint64_t tilingKey;
    uint64_t workspace;
    uint64_t tilingBytes;
};

// `plan` is a function (const int64_t* sizes, const mindlora::Platform&) -> mindlora::Plan<...>.
#define MINDLORA_MODEL_PLAN(plan)                                                                                   \
    extern "C" __attribute__((used)) void mindlora_plan(                                                            \
        const int64_t* sizes, uint32_t cubeCores, uint32_t vectorCores, MindloraModelPlan* result, uint8_t* tiling) \
    {                                                                                                               \
        ascendc_model::Platform& chip = ascendc_model::CurrentPlatform();                                           \
        chip.cubeCores = cubeCores;                                                                                 \
        chip.vectorCores = vectorCores;                                                                             \
        const auto made = plan(sizes,                                                                               \
            mindlora::Platform{cubeCores, vectorCores, chip.unifiedBuffer, chip.l1, chip.l0a, chip.l0b, chip.l0c}); \
        *result = {                                                                                                 \
            made.blocks, static_cast<uint32_t>(made.kind), made.tilingKey, made.workspace, sizeof(made.tiling)};    \
        std::memcpy(tiling, &made.tiling, sizeof(made.tiling));                                                     \
    }
