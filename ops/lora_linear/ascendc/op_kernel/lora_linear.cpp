// y = x W^T (+ bias) + ((x A^T) * scale) B^T.
#include "kernel_operator.h"

#include "lora_linear_cube.h"
#include "lora_linear_decode.h"
#include "lora_linear_tiling.h"

extern "C" __global__ __aicore__ void lora_linear(GM_ADDR x, GM_ADDR w, GM_ADDR a, GM_ADDR b, GM_ADDR scale,
    GM_ADDR bias, GM_ADDR y, GM_ADDR workspace, GM_ADDR tiling)
{
    REGISTER_TILING_DEFAULT(LoraLinearTiling);
    GET_TILING_DATA_WITH_STRUCT(LoraLinearTiling, sizes, tiling);
    GM_ADDR exchange = AscendC::GetUserWorkspace(workspace);
    if (TILING_KEY_IS(1)) {
        KERNEL_TASK_TYPE(1, KERNEL_TYPE_MIX_AIV_1_0);
        AscendC::TPipe pipe;
        mindlora::LoraLinearDecode<DTYPE_X> decode(pipe, sizes);
        decode.Bind(x, w, a, b, scale, bias, y, exchange);
        decode.Run();
    } else if (TILING_KEY_IS(2)) {
        KERNEL_TASK_TYPE(2, KERNEL_TYPE_MIX_AIC_1_2);
        mindlora::LoraLinearFewTokens<DTYPE_X>(x, w, a, b, scale, bias, y, exchange, sizes);
    }
}
