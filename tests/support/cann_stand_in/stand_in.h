// What the two libraries of the stand-in know of each other.
#pragma once

#include <vector>

#include "aclnn/acl_meta.h"

struct aclTensor {
    aclDataType type;
    std::vector<int64_t> shape;
    void* data;
};

// An executor of any library. Its caller may launch it again, with other addresses, if it said so before.
struct aclOpExecutor {
    bool repeatable = false;
};

// 0, or what MINDLORA_STAND_IN_FAIL=function:code names.
int StandInFailure(const char* function);
void StandInMessage(const char* text);
// Called after a kernel has run, with the operator's name and tensors.
void StandInRan(const char* opType, const std::vector<const aclTensor*>& tensors);
