// nf4_dequantize through CANN's own call, on golden files: ../../ascendc_check/README.md.
#include "aclnn_nf4_dequantize.h"
#include "ascendc_check/check.h"

int main(int argc, char** argv)
{
    return mindlora::Check(argc, argv,
        {"Nf4Dequantize", {"like", "codes", "absmax", "scales", "offsets", "w"},
            [](aclTensor** t, uint64_t* workspace, aclOpExecutor** executor) {
                return aclnnNf4DequantizeGetWorkspaceSize(t[0], t[1], t[2], t[3], t[4], t[5], workspace, executor);
            },
            aclnnNf4Dequantize});
}
