// multi_lora_slot_write through CANN's own call, on golden files: ../../ascendc_check/README.md.
#include "aclnn_multi_lora_slot_write.h"
#include "ascendc_check/check.h"

int main(int argc, char** argv)
{
    return mindlora::Check(argc, argv,
        {"MultiLoraSlotWrite", {"pool", "ranks", "scales", "slot", "packed", "scale", "written"},
            [](aclTensor** t, uint64_t* workspace, aclOpExecutor** executor) {
                return aclnnMultiLoraSlotWriteGetWorkspaceSize(
                    t[0], t[1], t[2], t[3], t[4], t[5], t[6], workspace, executor);
            },
            aclnnMultiLoraSlotWrite});
}
