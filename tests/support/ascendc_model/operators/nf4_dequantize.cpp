// nf4_dequantize for the simulator.
#ifndef DTYPE_W
#define DTYPE_W MINDLORA_ELEMENT
#endif
#include "nf4_dequantize/ascendc/op_kernel/nf4_dequantize.cpp"

#include "entry.h"
#include "nf4_dequantize/ascendc/op_host/nf4_dequantize_plan.h"

ASCENDC_MODEL_KERNEL(nf4_dequantize);

// sizes: rows, columns.
static auto ModelPlan(const int64_t* sizes, const mindlora::Platform& platform)
{
    return mindlora::PlanNf4Dequantize(sizes[0], sizes[1], sizeof(DTYPE_W), platform);
}

MINDLORA_MODEL_PLAN(ModelPlan)
