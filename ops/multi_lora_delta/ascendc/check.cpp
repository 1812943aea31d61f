// multi_lora_delta through CANN's own call, on golden files: ../../ascendc_check/README.md.
#include "aclnn_multi_lora_delta.h"
#include "ascendc_check/check.h"

int main(int argc, char** argv)
{
    return mindlora::Check(argc, argv,
        {"MultiLoraDelta", {"y0", "x", "pool", "ranks", "scales", "indices", "y"},
            [](aclTensor** t, uint64_t* workspace, aclOpExecutor** executor) {
                return aclnnMultiLoraDeltaGetWorkspaceSize(
                    t[0], t[1], t[2], t[3], t[4], t[5], t[6], workspace, executor);
            },
            aclnnMultiLoraDelta});
}
