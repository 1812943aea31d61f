// libcust_opapi.so of the stand-in, behind its aclnn functions: the operators' own host sides decide, and their kernels
// run in the simulator.
#pragma once

#include <string>

#include "stand_in.h"

namespace stand_in {

struct Kernel {
    const char* opType;      // LoraDelta
    const char* name;        // lora_delta
    const char* elementOf;   // the tensor whose dtype names the kernel's build
    std::vector<int> types;  // the simulator's number of the kernel's type, by tiling key; 0 for all keys
};

aclnnStatus Prepare(
    const Kernel& kernel, const std::vector<const aclTensor*>& tensors, uint64_t* workspace, aclOpExecutor** executor);
aclnnStatus Launch(void* workspace, uint64_t bytes, aclOpExecutor* executor);

}  // namespace stand_in
