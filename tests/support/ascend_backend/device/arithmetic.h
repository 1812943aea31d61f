// What the built-in operators of CANN that these tests meet compute, in plain loops: one line of a table for each.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "device.h"
#include "elements.h"

namespace device {

using Index = std::vector<int64_t>;

// Calls visit(index) for each element of a shape.
template <class Visit>
void ForEach(const Index& shape, Visit visit)
{
    for (int64_t size : shape) {
        if (size == 0) return;
    }
    Index index(shape.size(), 0);
    for (;;) {
        visit(index);
        size_t axis = shape.size();
        while (axis > 0 && ++index[axis - 1] == shape[axis - 1]) index[--axis] = 0;
        if (axis == 0) return;
    }
}

// The element of a tensor at the last axes of an index; axes of size 1 are broadcast.
char* At(const aclTensor& tensor, const Index& index);
double Get(const aclTensor& tensor, const Index& index);
void Put(const aclTensor& tensor, const Index& index, double value);
// Of a tensor that is contiguous.
double Get(const aclTensor& tensor, int64_t element);

using Compute = std::function<void(Executor&)>;

// Makes an operator known, before main: const Operator mul("aclnnMul", ...).
struct Operator {
    Operator(const char* name, Compute compute);
};

// The computation of an operator; null if there is none.
const Compute* ComputationOf(const std::string& name);

}  // namespace device
