// multi_lora_slot_write for the simulator.
#ifndef DTYPE_POOL
#define DTYPE_POOL MINDLORA_ELEMENT
#endif
#include "multi_lora_slot_write/ascendc/op_kernel/multi_lora_slot_write.cpp"

#include "entry.h"
#include "multi_lora_slot_write/ascendc/op_host/multi_lora_slot_write_plan.h"

ASCENDC_MODEL_KERNEL(multi_lora_slot_write);

// sizes: slots, maxRank, K + N, rank.
static auto ModelPlan(const int64_t* sizes, const mindlora::Platform& chip)
{
    return mindlora::PlanMultiLoraSlotWrite({sizes[0], sizes[1], sizes[2], sizes[3]}, sizeof(DTYPE_POOL), chip);
}

MINDLORA_MODEL_PLAN(ModelPlan)
