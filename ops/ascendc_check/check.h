// Calls an operator through CANN's aclnn functions on golden files and says what is wrong; without MindSpore.
#pragma once

#include <string>
#include <vector>

#include "acl/acl.h"
#include "aclnn/acl_meta.h"

namespace mindlora {

// One operator: the names of its tensors in the order of its golden files, and its two functions.
struct Operator {
    const char* name;
    std::vector<std::string> tensors;
    aclnnStatus (*prepare)(aclTensor** tensors, uint64_t* workspace, aclOpExecutor** executor);
    aclnnStatus (*launch)(void* workspace, uint64_t bytes, aclOpExecutor* executor, aclrtStream stream);
};

// The main function of a program: 0 if all files pass, 1 if one does not, 2 if they could not be tried.
int Check(int argc, char** argv, const Operator& op);

}  // namespace mindlora
