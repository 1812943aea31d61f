// Operators that compare elements, choose between them, or repeat them.
#include <cmath>

#include "arithmetic.h"

namespace {

using device::Compute;
using device::Executor;
using device::Index;
using device::Operator;

// z = f(x, y) for two tensors.
Compute OfTensors(double (*f)(double, double))
{
    return [f](Executor& executor) {
        const aclTensor& x = *executor.tensors[0];
        const aclTensor& y = *executor.tensors[1];
        const aclTensor& z = *executor.tensors[2];
        device::ForEach(z.shape,
            [&](const Index& index) { device::Put(z, index, f(device::Get(x, index), device::Get(y, index))); });
    };
}

// y = f(x, number)
Compute OfScalar(double (*f)(double, double))
{
    return [f](Executor& executor) {
        const aclTensor& x = *executor.tensors[0];
        const aclTensor& y = *executor.tensors[1];
        const double scalar = reinterpret_cast<device::Scalar*>(executor.arguments[1])->value;
        device::ForEach(y.shape, [&](const Index& index) { device::Put(y, index, f(device::Get(x, index), scalar)); });
    };
}

// y = x where the first tensor is not 0, and otherwise the third.
void Select(Executor& executor)
{
    const aclTensor& condition = *executor.tensors[0];
    const aclTensor& y = *executor.tensors[3];
    device::ForEach(y.shape, [&](const Index& index) {
        const aclTensor& chosen = *executor.tensors[device::Get(condition, index) != 0 ? 1 : 2];
        device::Put(y, index, device::Get(chosen, index));
    });
}

void Expand(Executor& executor)
{
    const aclTensor& x = *executor.tensors[0];
    const aclTensor& y = *executor.tensors[1];
    device::ForEach(y.shape, [&](const Index& index) { device::Put(y, index, device::Get(x, index)); });
}

double Greater(double x, double y) { return x > y; }
double Less(double x, double y) { return x < y; }
double FloorDivide(double x, double y) { return std::floor(x / y); }

const Operator operators[] = {
    {"aclnnExpand", Expand},
    {"aclnnFloorDivide", OfTensors(FloorDivide)},
    {"aclnnGtTensor", OfTensors(Greater)},
    {"aclnnLtScalar", OfScalar(Less)},
    {"aclnnLtTensor", OfTensors(Less)},
    {"aclnnSWhere", Select},
};

}  // namespace
