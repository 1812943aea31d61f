// What the parts of the device know of each other. The device's memory is this process's, and what is launched on it
// has run when the launch returns.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

// The first three fields are those of tests/support/cann_stand_in/stand_in.h, whose kernels read such tensors too.
struct aclTensor {
    int type;
    std::vector<int64_t> shape;
    void* data;
    std::vector<int64_t> strides;  // in elements
    int64_t offset;                // of data from the tensor's storage, in bytes
};

namespace device {

struct Scalar {
    double value;
};

struct Integers {
    std::vector<int64_t> values;
};

// An operator that was asked for and may be launched.
struct Executor {
    bool repeatable;  // first, as in the project's own operators: it may be launched again
    const char* name;
    std::vector<uintptr_t> arguments;  // pointers and integers, in order
    std::vector<double> reals;         // floating-point arguments, in order
    std::vector<aclTensor*> tensors;   // those of the arguments that are tensors or lists of them
};

// Of CANN's operators that are called by name: what they read or write.
struct Description {
    int type;
    std::vector<int64_t> shape;
};

struct Buffer {
    void* data;
    size_t bytes;
};

// The tensors that an argument of an operator is: one, those of a list, or none.
std::vector<aclTensor*> TensorsOf(uintptr_t argument);

// Adds a line to the file that STAND_IN_LAUNCHES names: an operator, what was done, and its tensors.
void Log(const std::string& name, bool computed, const std::vector<const aclTensor*>& tensors);

}  // namespace device
