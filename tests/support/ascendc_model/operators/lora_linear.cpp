// lora_linear for the simulator.
#ifndef DTYPE_X
#define DTYPE_X MINDLORA_ELEMENT
#endif
#include "lora_linear/ascendc/op_kernel/lora_linear.cpp"

#include "entry.h"
#include "lora_linear/ascendc/op_host/lora_linear_plan.h"

ASCENDC_MODEL_KERNEL(lora_linear);

// sizes: tokens, K, N, rank, whether there is a bias.
static auto ModelPlan(const int64_t* sizes, const mindlora::Platform& platform)
{
    return mindlora::PlanLoraLinear(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4] != 0, sizeof(DTYPE_X), platform);
}

MINDLORA_MODEL_PLAN(ModelPlan)
