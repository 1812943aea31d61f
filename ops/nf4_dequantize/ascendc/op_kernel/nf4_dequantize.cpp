// W = absmax' * TABLE[codes]. See ../../README.md.
#include "kernel_operator.h"
#include "nf4_dequantize_decode.h"

extern "C" __global__ __aicore__ void nf4_dequantize(GM_ADDR like, GM_ADDR codes, GM_ADDR absmax, GM_ADDR scales,
    GM_ADDR offsets, GM_ADDR w, GM_ADDR workspace, GM_ADDR tiling)
{
    REGISTER_TILING_DEFAULT(mindlora::Nf4DequantizeTiling);
    GET_TILING_DATA_WITH_STRUCT(mindlora::Nf4DequantizeTiling, sizes, tiling);
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    mindlora::Nf4Dequantize<DTYPE_W> decode(pipe, sizes);
    decode.Bind(codes, absmax, scales, offsets, w);
    decode.Run();
}
