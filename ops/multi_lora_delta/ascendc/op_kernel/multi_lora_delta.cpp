// y[t] = y0[t] + ((x[t] A_i^T) * scale_i) B_i^T with i = indices[t]. See ../../README.md.
#include "multi_lora_delta_decode.h"
#include "multi_lora_delta_prefill.h"

extern "C" __global__ __aicore__ void multi_lora_delta(GM_ADDR y0, GM_ADDR x, GM_ADDR pool, GM_ADDR ranks,
    GM_ADDR scales, GM_ADDR indices, GM_ADDR y, GM_ADDR workspace, GM_ADDR tiling)
{
    REGISTER_TILING_DEFAULT(mindlora::MultiLoraDeltaTiling);
    GET_TILING_DATA_WITH_STRUCT(mindlora::MultiLoraDeltaTiling, sizes, tiling);
    KERNEL_TASK_TYPE(1, KERNEL_TYPE_MIX_AIV_1_0);
    KERNEL_TASK_TYPE(2, KERNEL_TYPE_MIX_AIC_1_2);
    GM_ADDR exchange = AscendC::GetUserWorkspace(workspace);
    if (TILING_KEY_IS(1)) {
        AscendC::TPipe pipe;
        mindlora::MultiLoraDeltaDecode<DTYPE_X> decode(sizes, pipe);
        decode.SetArguments(y0, x, pool, ranks, scales, indices, y, exchange);
        decode.Run();
    } else if (TILING_KEY_IS(2)) {
        mindlora::MultiLoraDeltaPrefill<DTYPE_X>(y0, x, pool, ranks, scales, indices, y, exchange, sizes);
    }
}
