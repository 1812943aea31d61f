// multi_lora_delta for the simulator.
#ifndef DTYPE_X
#define DTYPE_X MINDLORA_ELEMENT
#endif
#include "multi_lora_delta/ascendc/op_kernel/multi_lora_delta.cpp"

#include "entry.h"
#include "multi_lora_delta/ascendc/op_host/multi_lora_delta_plan.h"

ASCENDC_MODEL_KERNEL(multi_lora_delta);

// sizes: tokens, slots, maxRank, K, N.
static auto ModelPlan(const int64_t* sizes, const mindlora::Platform& chip)
{
    return mindlora::PlanMultiLoraDelta({sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]}, sizeof(DTYPE_X), chip);
}

MINDLORA_MODEL_PLAN(ModelPlan)
