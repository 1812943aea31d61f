// pool[slot, :r] = packed, ranks[slot] = r, scales[slot] = scale, in place. See ../../README.md.
#include "kernel_operator.h"
#include "multi_lora_slot_write_copy.h"

// pool_ref, ranks_ref and scales_ref are the outputs, in the memory of pool, ranks and scales.
extern "C" __global__ __aicore__ void multi_lora_slot_write(GM_ADDR pool, GM_ADDR ranks, GM_ADDR scales, GM_ADDR slot,
    GM_ADDR packed, GM_ADDR scale, GM_ADDR pool_ref, GM_ADDR ranks_ref, GM_ADDR scales_ref, GM_ADDR written,
    GM_ADDR workspace, GM_ADDR tiling)
{
    REGISTER_TILING_DEFAULT(mindlora::MultiLoraSlotWriteTiling);
    GET_TILING_DATA_WITH_STRUCT(mindlora::MultiLoraSlotWriteTiling, sizes, tiling);
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    mindlora::MultiLoraSlotWrite<DTYPE_POOL> write(sizes, pipe);
    write.SetArguments(pool_ref, ranks_ref, scales_ref, slot, packed, scale, written);
    write.Run();
}
