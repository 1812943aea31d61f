// lora_delta for the simulator.
#ifndef DTYPE_X
#define DTYPE_X MINDLORA_ELEMENT
#endif
#include "lora_delta/ascendc/op_kernel/lora_delta.cpp"

#include "entry.h"
#include "lora_delta/ascendc/op_host/lora_delta_plan.h"

ASCENDC_MODEL_KERNEL(lora_delta);

// sizes: tokens, K, N, rank.
static auto ModelPlan(const int64_t* sizes, const mindlora::Platform& platform)
{
    return mindlora::PlanLoraDelta(sizes[0], sizes[1], sizes[2], sizes[3], sizeof(DTYPE_X), platform);
}

MINDLORA_MODEL_PLAN(ModelPlan)
