// Tensors and executors of CANN's aclnn functions, as its public documentation declares them.
#pragma once

#include "acl/acl.h"

struct aclTensor;
struct aclOpExecutor;
using aclnnStatus = int32_t;

extern "C" {
aclTensor* aclCreateTensor(const int64_t* viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t* stride,
    int64_t offset, aclFormat format, const int64_t* storageDims, uint64_t storageDimsNum, void* tensorData);
aclnnStatus aclDestroyTensor(const aclTensor* tensor);
}
