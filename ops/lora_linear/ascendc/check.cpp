// lora_linear through CANN's own call, on golden files: ../../ascendc_check/README.md.
#include "aclnn_lora_linear.h"
#include "ascendc_check/check.h"

int main(int argc, char** argv)
{
    return mindlora::Check(argc, argv,
        {"LoraLinear", {"x", "w", "a", "b", "scale", "bias", "y"},
            [](aclTensor** t, uint64_t* workspace, aclOpExecutor** executor) {
                return aclnnLoraLinearGetWorkspaceSize(t[0], t[1], t[2], t[3], t[4], t[5], t[6], workspace, executor);
            },
            aclnnLoraLinear});
}
