// y = y0 + ((x A^T) * scale) B^T.
#include "kernel_operator.h"

#include "lora_delta_decode.h"
#include "lora_delta_prefill.h"
#include "lora_delta_tiling.h"

extern "C" __global__ __aicore__ void lora_delta(
    GM_ADDR y0, GM_ADDR x, GM_ADDR a, GM_ADDR b, GM_ADDR scale, GM_ADDR y, GM_ADDR workspace, GM_ADDR tiling)
{
    REGISTER_TILING_DEFAULT(LoraDeltaTiling);
    GET_TILING_DATA_WITH_STRUCT(LoraDeltaTiling, sizes, tiling);
    GM_ADDR exchange = AscendC::GetUserWorkspace(workspace);
    if (TILING_KEY_IS(1)) {
        KERNEL_TASK_TYPE(1, KERNEL_TYPE_MIX_AIV_1_0);
        AscendC::TPipe pipe;
        mindlora::LoraDeltaDecode<DTYPE_X> decode(pipe, sizes);
        decode.Bind(y0, x, a, b, scale, y, exchange);
        decode.Run();
    } else if (TILING_KEY_IS(2)) {
        KERNEL_TASK_TYPE(2, KERNEL_TYPE_MIX_AIC_1_2);
        mindlora::LoraDeltaPrefill<DTYPE_X>(y0, x, a, b, scale, y, exchange, sizes);
    }
}
